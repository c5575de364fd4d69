"""`twolane simulate`: the real engine on simulated GPUs, and what it reports."""

import csv
import json
from itertools import pairwise

import msgspec
import pytest
from typer.testing import CliRunner

from twolane.cli.main import app
from twolane.common.errors import FieldError
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Launched, Output, Outputs, Refused, Stats
from twolane.results.result import BenchConfig
from twolane.results.summary import result_dict, warnings
from twolane.sim.report import LaunchCounts
from twolane.sim.run import REQUEST_COLUMNS, Ledger, SimulateConfig, simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

MODEL = "llama-3.1-8b"
PROMPTS = 20


def config(system="static-split", seed=0, gpu="h200", tp=1, workload=None, **engine):
    spec = workload or WorkloadSpec(
        dataset="azure-conv", num_prompts=PROMPTS, request_rate=8, seed=seed
    )
    return SimulateConfig(
        engine=EngineConfig(model=MODEL, system=system, **engine),
        gpu=gpu,
        tp=tp,
        bench=BenchConfig(workload=spec, goodput={"ttft": 1.0, "tbt": 0.05}),
    )


def report(asked):
    report = result_dict(simulate(asked).result)
    del report["date"], report["provenance"]
    return report


@pytest.mark.parametrize("system", ["static-split", "chunked", "prefill-first"])
def test_every_request_is_served_and_reported_as_bench_does(system):
    simulation = simulate(config(system))
    report = result_dict(simulation.result)
    asked = simulation.result.workload
    assert report["completed"] == PROMPTS
    assert report["output_lens"] == [request.output_tokens for request in asked]
    assert all(0.0 < ttft < 1.0 for ttft in report["ttfts"])
    assert [len(gaps) + 1 for gaps in report["itls"]] == report["output_lens"]
    assert report["backend"] == "simulation"
    assert report["simulated"]["device"] == "simulated h200"


def test_tokens_come_when_they_are_due_and_a_refusal_is_a_429():
    asked = [TraceRequest(arrival, 10, 2) for arrival in (0.0, 1.0)]
    ledger = Ledger(asked, lambda record: False, lambda *_: False)
    for at, due in ((2.0, 3.0), (4.0, 3.5)):
        end = "length" if at == 4.0 else None
        ledger.hear(at, Outputs([Output("0", [1], end, due=due)], [], Stats()))
    late = [Refused("1", "refused", "overloaded")]
    ledger.hear(5.0, Outputs([], late, Stats()))
    served, refused = (one.record for one in ledger.in_order())
    assert served.token_times == (3.0, 4.0)  # none before it was made
    assert refused.outcome == "status_429"


def test_the_seed_decides_everything():
    assert report(config()) == report(config())
    assert report(config())["ttfts"] != report(config(seed=1))["ttfts"]


def test_shared_blocks_are_found_in_the_prefix_cache():
    """The second prompt begins as the first, which was served before it comes."""
    blocks = [(1, 2, 3), (1, 2, 4), (5, 6, 7)]
    requests = [TraceRequest(float(i), 1536, 8, ids) for i, ids in enumerate(blocks)]
    served = simulate(config(), requests).served
    assert [one.cached for one in served] == [0, 1024, 0]
    cold = simulate(config(prefix_cache=False), requests).served
    assert [one.cached for one in cold] == [0, 0, 0]
    assert served[1].record.ttft < cold[1].record.ttft


def test_several_gpus_are_faster_and_hold_more():
    one, eight = (simulate(config(gpu="a100-80gb", tp=tp)).result for tp in (1, 8))
    assert eight.metrics.ttft.mean < one.metrics.ttft.mean / 2
    assert eight.simulated["kv_tokens"] > 4 * one.simulated["kv_tokens"]


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("qwen3-8b", 752_064),
        (MODEL, 845_536),
        pytest.param("codellama-34b", 284_672, marks=pytest.mark.full),
    ],
)
def test_the_pool_has_the_size_of_the_real_one(model, tokens):
    """As measured on an H200 (benchmarks/results/engine-h200-cublas.json)."""
    engine = EngineConfig(model=model, max_running=10_000)
    asked = msgspec.structs.replace(config(), engine=engine)
    held = simulate(asked, []).result.simulated["kv_tokens"]
    assert held == pytest.approx(tokens, rel=0.03)


def test_what_does_not_fit_is_refused_and_counts_as_missed():
    asked = config(workload=WorkloadSpec(num_prompts=1, random_input_len=600), max_model_len=512)
    [one] = simulate(asked).served
    assert one.record.outcome == "status_400"
    assert "context length is 512" in one.record.error


def test_a_run_can_be_stopped():
    ended = []

    def enough(record):
        ended.append(record)
        return len(ended) == 5

    result = simulate(config(), on_record=enough).result
    assert result.interrupted
    assert warnings(result)[0].startswith(f"the run ended early, after {len(result.records)} of ")
    assert 5 <= len(result.records) < PROMPTS


def test_the_command(tmp_path):
    files = {name: tmp_path / name for name in ("result.json", "requests.csv", "trace.json")}
    arguments = f"simulate {MODEL} --gpu h100 --dataset sharegpt --num-prompts 20".split()
    arguments += ["--request-rate", "10", "--seed", "3", "--goodput", "ttft:500", "tbt:40"]
    arguments += ["--result-file", str(files["result.json"]), "--trace", str(files["trace.json"])]
    arguments += ["--requests-file", str(files["requests.csv"])]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "Attainment" in done.output
    saved = json.loads(files["result.json"].read_text())
    assert (saved["completed"], saved["seed"]) == (20, 3)
    assert saved["slos_ms"] == {"ttft": 500, "tbt": 40}
    rows = list(csv.DictReader(files["requests.csv"].open()))
    assert tuple(rows[0]) == REQUEST_COLUMNS
    assert [float(row["ttft"]) for row in rows] == pytest.approx(saved["ttfts"], abs=1e-6)
    launches = [one for one in json.loads(files["trace.json"].read_text()) if one["ph"] == "X"]
    assert {one["args"]["units"] for one in launches} >= {132}


def test_a_full_disk_costs_the_file_and_not_the_figures():
    command = f"simulate {MODEL} --num-prompts 3 --result-file /dev/full"
    done = CliRunner().invoke(app, command.split())
    assert (done.exit_code, done.stderr) == (1, "twolane: /dev/full: No space left on device\n")
    assert "TTFT" in done.stdout


def test_the_report_names_what_was_simulated(tmp_path):
    """Lanes, changes of SMs and prediction errors are those of the trace."""
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    command = f"simulate {MODEL} --system muxwise --slo-tbt-ms 15 --slo-ttft-ms 1000 --seed 4"
    command += " --dataset azure-conv --num-prompts 30 --request-rate 15 --goodput ttft:900"
    command += f" --result-file {result} --trace {trace} --option slice_seconds=0.02"
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    for words in (
        "muxwise (slice_seconds=0.02)",
        "ttft 1000 ms, tbt 15 ms",
        "15 ms in the server",
        "1 x h200, fitted to measurements of such a card",
        "guard, fitted on a profile of the simulated GPU",
    ):
        assert words in done.stdout
    found = json.loads(result.read_text())["simulated"]
    assert (found["seed"], found["system"], found["tbt_buffer_at"]) == (4, "muxwise", "server")
    assert found["settings"]["slice_seconds"] == "0.02"
    assert found["settings"]["max_batch_tokens"] == 4096
    events = json.loads(trace.read_text())
    launches = sorted(
        (one for one in events if one["ph"] == "X" and "units" in one.get("args", {})),
        key=lambda one: one["ts"] + one["dur"],
    )
    lanes = {(one["lane"], one["units"]): one["launches"] for one in found["lanes"]}
    assert sum(lanes.values()) == len(launches)
    assert {units for _, units in lanes} == {one["args"]["units"] for one in launches}
    decode = [one["args"]["units"] for one in launches if one["name"].startswith("decode")]
    assert found["switches"]["decode"] == sum(a != b for a, b in pairwise(decode)) > 0
    assert found["predictions"]["decode steps"]["launches"] <= len(decode)
    assert 0 < found["predictions"]["decode steps"]["mean_error"] < 1


@pytest.mark.parametrize(
    ("gpu", "words"),
    [("h20", "by its data sheet; no such card was measured"), ("h100", "fitted to measurements")],
)
def test_the_report_says_whether_a_card_was_measured(gpu, words):
    assert words in str(simulate(config(gpu=gpu), []).result.simulated["gpu_model"])


def test_predictions_are_compared_with_what_launches_took():
    def launch(lane, units, seconds, predicted, prompts=(), decoding=0):
        fields = {"layers": (0, 0), "new": 1, "reused": 0, "steps": 1, "reason": ""}
        times = {"start": 1.0, "end": 1.0 + seconds, "predicted": predicted}
        return Launched(
            lane=lane, units=units, prompts=list(prompts), decoding=decoding, **times, **fields
        )

    counts = LaunchCounts()
    counts.add([launch("decode", 32, 0.011, 0.010, decoding=2), launch("prefill", 100, 1.0, None)])
    counts.add([launch("decode", 48, 0.008, 0.010, decoding=2)])
    counts.add([launch("device", 132, 0.03, 0.02, ["a"], 2), launch("decode", 48, 0.01, 0.01)])
    assert counts.switches == {"decode": 1, "prefill": 0, "device": 0}
    found = counts.predictions()
    assert set(found) == {"decode steps", "hybrid passes"}
    assert found["decode steps"]["launches"] == 3
    assert found["decode steps"]["mean_error"] == pytest.approx(0.1)
    assert found["decode steps"]["mean_ratio"] == pytest.approx(2.9 / 3)
    assert found["hybrid passes"]["mean_ratio"] == pytest.approx(1.5)
    lanes = counts.lanes([("decode", 48, 0.018), ("decode", 32, 0.011)])
    assert [(one["units"], one["launches"]) for one in lanes] == [(32, 1), (48, 2)]


def test_two_buffers_never_act():
    both = msgspec.structs.replace(config(slo=Slo(tbt=0.05)), bench=config().bench)
    asked = msgspec.structs.replace(both, bench=msgspec.structs.replace(both.bench, playout=0.02))
    with pytest.raises(FieldError, match="tbt-buffer-at client"):
        asked.check()
    for one in ({"tbt_buffer": 0.0}, {"tbt_buffer_at": "client"}):
        engine = msgspec.structs.replace(asked.engine, **one)
        msgspec.structs.replace(asked, engine=engine).check()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu", "b200"], "there are: a100-80gb, a100-80gb-split, h20, h100, h200"),
        (["--tp", "3"], "--tensor-parallel-size 3 does not divide"),
        (["--tensor-parallel-size", "3"], "--tensor-parallel-size 3 does not divide"),
        (["--disaggregated", "--system", "auto"], "--system must be two-stream"),
        (["--levels", "132"], "--levels 132 leave none"),
        (["--page-size", "7"], "--page-size must be one of 16, 32, 64"),
        (["--result-file", "/"], "--result-file: / is a folder"),
        (["--system", "nonsense"], "--system"),
        (["--dataset", "nowhere"], "--dataset"),
        (["--cores", "2"], "No such option"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, complaint):
    done = CliRunner().invoke(app, ["simulate", MODEL, *arguments])
    assert done.exit_code == 2
    assert complaint in done.output + done.stderr
    assert not done.stderr.startswith("\n")


def test_a_model_that_leaves_no_memory_for_its_kv_is_one_line(tmp_path):
    """In a simulation, and in a search that simulates."""
    goodput = f"bench goodput --simulate a100-80gb --model llama-3.1-70b --out {tmp_path}/found"
    for command in (f"simulate {MODEL} --gpu-memory-utilization 0.00001", goodput):
        few = "--num-prompts=3", "--goodput=ttft:900"
        brief = ["--brief"] if command == goodput else []
        done = CliRunner().invoke(app, [*command.split(), *few, *brief])
        assert done.exit_code == 1
        [line] = done.stderr.strip().splitlines()
        assert line.endswith("there is not enough memory for the model and a KV pool")
