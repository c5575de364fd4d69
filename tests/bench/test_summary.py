"""The result file and the command line."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.server.serving import PATIENCE
from twolane.cli.bench.main import app
from twolane.results.metrics import LAG_PERCENTILES, Distribution
from twolane.results.record import Record
from twolane.results.result import BenchConfig, Result
from twolane.results.summary import default_name, result_dict, result_json, summary, warnings
from twolane.workload.lengths import TABLES
from twolane.workload.traces import TraceRequest

from .scripted import DONE, bench, text, usage

# The keys of `vllm bench serve --save-result --save-detailed`, vLLM 0.25.
VLLM_KEYS = """
    date backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
    duration completed failed total_input_tokens total_output_tokens request_throughput
    request_goodput output_throughput total_token_throughput input_lens output_lens ttfts itls
    latencies start_times queue_times generated_texts errors max_output_tokens_per_s
    max_concurrent_requests
""".split()  # noqa: SIM905


def script(number, body):
    """Four requests: two answered, at 0.5 s and 1 s after sending, one refused, one slow."""
    start = [0.0, 2.0, 4.0, 4.0][number]
    if number == 2:
        return 429, "full"
    first = start + [0.5, 1.0, 0.0, 5.0][number]
    return [
        (first, text("a")),
        (first + 0.1, text("b", "length")),
        (first + 0.1, usage(4, 2)),
        (start + 2.0 if number < 2 else first + 0.1, DONE),
    ]


def result_of_script(**config):
    settings = {"goodput": {"ttft": 0.75, "tbt": 0.2}, **config}
    spec = {"num_prompts": 4, "random_output_len": 2}
    return bench(script, spec=spec, **settings)[0]


def test_a_terminal_obeys_no_server_s_words():
    """Neither its control sequences nor what looks like the table's own marks."""
    result = bench(lambda number, body: (500, ""), spec={"num_prompts": 1})[0]
    (record,) = result.records
    said = msgspec.structs.replace(record, error="\x1b[2J[/bold]")
    result = msgspec.structs.replace(result, model="\x1b[31mm[/red]", records=(said,))
    console = Console(width=100)
    with console.capture() as shown:
        console.print(summary(result))
    assert r"\x1b[31mm[/red]" in shown.get()
    assert r"status_500: \x1b[2J[/bold]" in shown.get()


def test_result_has_the_keys_of_vllm_and_figures_of_the_script():
    saved = json.loads(result_json(result_of_script()))
    for key in VLLM_KEYS:
        assert key in saved
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p90", "p95", "p99", "max"):
            assert f"{statistic}_{metric}_ms" in saved
    assert (saved["completed"], saved["failed"], saved["sent"]) == (3, 1, 4)
    assert saved["outcomes"] == {"ok": 3, "status_429": 1}
    assert saved["duration"] == pytest.approx(9.1)
    assert saved["request_throughput"] == pytest.approx(3 / 9.1)
    assert saved["request_goodput"] == pytest.approx(1 / 9.1)
    assert saved["output_throughput"] == pytest.approx(6 / 9.1)
    assert saved["total_token_throughput"] == pytest.approx(18 / 9.1)
    assert saved["mean_ttft_ms"] == pytest.approx(6500 / 3)
    assert saved["median_ttft_ms"] == pytest.approx(1000)
    assert saved["mean_itl_ms"] == pytest.approx(100)
    assert saved["max_tpot_ms"] == pytest.approx(1500)
    assert saved["attainment"] == {"ttft": 0.25, "tbt": 0.75}
    assert saved["attainment_all"] == 0.25
    assert saved["tbt_gap_attainment"] == 0.75
    assert saved["slos_ms"] == {"ttft": 750, "tbt": 200}
    assert saved["ttfts"][2] is None
    assert saved["itls"][2] == []
    assert saved["output_lens"] == [2, 2, 0, 2]
    assert "full" in saved["errors"][2]
    assert (saved["request_rate"], saved["max_concurrency"]) == ("inf", 1)


def test_a_run_can_be_repeated_from_its_result():
    saved = result_dict(result_of_script())
    assert saved["workload"] == {
        "arrivals": [0.0] * 4, "prompt_tokens": [4] * 4, "output_tokens": [2] * 4,
    }  # fmt: skip
    arguments = json.loads(result_json(result_of_script()))["arguments"]
    assert (arguments["seed"], arguments["dataset"], arguments["num_prompts"]) == (0, "random", 4)
    assert arguments["vocab_range"] == {"low": 1000, "high": 30000}
    assert arguments["goodput"] == {"ttft": 750, "tbt": 200}


def test_secrets_stay_out_of_the_result():
    saved = result_json(
        result_of_script(api_key="k3y", headers={"Authorization": "Bearer t0ken"})
    ).decode()
    assert "k3y" not in saved
    assert "t0ken" not in saved
    assert "Authorization" in saved


def test_nothing_answered_gives_nulls_not_zeros():
    result = bench(lambda number, body: (429, "full"), spec={"num_prompts": 3})[0]
    saved = json.loads(result_json(result))
    assert saved["mean_ttft_ms"] is saved["p99_itl_ms"] is saved["max_e2el_ms"] is None
    assert (saved["completed"], saved["failed"], saved["request_goodput"]) == (0, 3, None)
    shown(result)


def shown(result) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(summary(result))
    return console.export_text()


def test_summary_shows_outcomes_latencies_slos_and_warnings():
    page = shown(result_of_script(percentiles=(50.0, 99.9)))
    for part in (
        "ok 3, status_429 1",
        "P99.9",
        "TTFT",
        "25.00%",
        "TBT, of all gaps owed",
        "75.00%",
        "full",
    ):
        assert part in page

    def lumps(number, body):
        return [(1.0, text("abc")), (2.0, text("d", "stop")), (2.0, usage(4, 9)), (2.0, DONE)]

    page = shown(bench(lumps, spec={"random_output_len": 20})[0])
    assert "4.50 tokens a chunk" in page
    assert "1 answers are shorter than asked" in page
    page = shown(bench(lambda n, b: [(1.0, text("a", "stop"))])[0])
    assert "1 answers came without usage" in page


def test_a_client_that_stood_still_says_so():
    """Once, which no percentile shows, for longer than the bound on TBT of 200 ms."""
    for longest, said in ((0.19, False), (0.21, True)):
        lag = Distribution.of([0.0] * 999 + [longest], LAG_PERCENTILES)
        page = shown(msgspec.structs.replace(result_of_script(), loop_lag=lag))
        assert ("stood still for 210" in page) == said
        assert "bottleneck" not in page


def test_default_name():
    name = default_name(result_of_script())
    assert name.startswith("openai-infqps-concurrency1-scripted-model-")
    assert name.endswith(".json")


def command(*words: str):
    return CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "200"})


def test_command_runs_and_saves(thirdparty, tmp_path):
    path = tmp_path / "run.json"
    words = ["--base-url", thirdparty.url, "--dataset", "azure-conv", "--num-prompts", "6"]
    words += ["--request-rate", "200", "--scale-lengths", "0.05", "--max-output-len", "9"]
    words += ["--goodput", "ttft:60000", "tbt:60000", "--percentiles", "50,99.9"]
    done = command(*words, "--num-warmups", "1", "--result-file", str(path))
    assert done.exit_code == 0, done.output
    assert "org/tiny" in done.output
    saved = json.loads(path.read_text())
    assert saved["completed"] == 6
    assert saved["attainment"] == {"ttft": 1.0, "tbt": 1.0}
    assert saved["p99.9_ttft_ms"] > 0
    assert saved["output_lens"] == saved["workload"]["output_tokens"]
    assert saved["input_lens"] == saved["workload"]["prompt_tokens"]


def test_save_result_goes_to_the_folder(thirdparty, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--base-url", thirdparty.url, "--num-prompts", "2", "--random-output-len", "2"]
    done = command(*words, "--save-result")
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("openai-infqps-tiny-")
    assert path.name in done.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--goodput", "itl:5"], "--goodput"),
        (["--goodput", "ttft:x"], "--goodput"),
        (["--goodput", "ttft:5", "ttft:6"], "--goodput"),
        (["--goodput", "ttft:-5"], "--goodput"),
        (["ttft:x"], "--goodput"),
        (["--percentiles", "0"], "--metric-percentiles"),
        (["--percentiles", "a"], "--metric-percentiles"),
        (["--vocab-range", "9:5"], "--vocab-range"),
        (["--vocab-range", "x"], "--vocab-range"),
        (["--header", "nothing"], "--header"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--extra-body", '{"stream": false}'], "--extra-body"),
        (["--endpoint", "/v1/embeddings"], "--endpoint"),
        (["--endpoint", "/v1/chat/completions", "--prompt-format", "ids"], "--prompt-format"),
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--base-url", "http://localhost:http"], "--base-url"),
        (["--base-url", "http://:8000"], "--base-url"),
        (["--header", "X-Trace=1\nHost: elsewhere"], "--header"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--num-warmups", "-1"], "--num-warmups"),
        (["--timeout", "0"], "--timeout"),
        (["--burstiness", "2"], "--burstiness"),
        (["--dataset", "nowhere.csv"], "nowhere.csv"),
        (["--result-file", "/no/such/folder/x.json"], "--result-file"),
    ],
)
def test_wrong_options_are_refused_by_name(words, named):
    done = command(*words)
    assert done.exit_code == 2
    assert named in done.output


def test_no_server_is_one_line():
    done = command("--base-url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "is the server up?" in done.output
    done = command("--base-url", "http://127.0.0.1:9", "--model", "m", "--num-prompts", "1")
    assert done.exit_code == 1
    assert "is the server up?" in done.output


def test_help_names_every_table():
    page = command("--help").output
    for name in TABLES:
        assert name in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_still_writes_what_was_measured(thirdparty, tmp_path, number):
    trace = tmp_path / "trace.csv"
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n,5,2\n,5,2\n,5,999\n,5,2\n"
    trace.write_text(rows)
    path = tmp_path / "run.json"
    program = "from twolane.cli.bench.main import app; app()"
    words = ["serve", "--base-url", thirdparty.url, "--dataset", str(trace)]
    words += ["--max-concurrency", "1", "--result-file", str(path)]
    process = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE)
    assert thirdparty.stalled.wait(PATIENCE)
    process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert b"Interrupted" in output
    saved = json.loads(path.read_text())
    assert saved["interrupted"] is True
    assert saved["outcomes"] == {"ok": 2, "interrupted": 1}
    assert saved["num_prompts"] == 4


def cached(known, hash_ids=()):
    """A run of four requests whose server knew a part of their prompts of 100 tokens."""
    rows = [TraceRequest(None, 100, 2, hash_ids=hash_ids, block_tokens=16) for _ in range(4)]
    records = [
        Record(
            index=i, asked_prompt=100, asked_output=2, scheduled=0.0, waited=0.0, sent=0.0,
            ended=1.0, outcome="ok", token_times=(0.5, 1.0), usage_prompt=100, usage_output=2,
            usage_cached=known,
        )
        for i in range(4)
    ]  # fmt: skip
    return Result(
        config=BenchConfig(), model="m", date=datetime.now(UTC), workload=tuple(rows),
        records=tuple(records), duration=1.0, interrupted=False,
        loop_lag=Distribution.of((), LAG_PERCENTILES),
    )  # fmt: skip


def test_a_run_that_measures_the_prefix_cache_says_so():
    [warning] = warnings(cached(96))
    assert warning.startswith("96% of the input tokens were in the server's prefix cache")
    assert "--seed" in warning
    assert not warnings(cached(10)), "a chat template is shared by all prompts"
    assert not warnings(cached(96, (1, 2))), "prompts of this workload share prefixes"


def test_latencies_fit_their_columns_in_a_narrow_terminal():
    console = Console(width=80)
    with console.capture() as shown:
        console.print(summary(slow()))
    assert "…" not in shown.get()
    assert "123457" in shown.get()


def slow():
    """A run whose latencies are minutes long."""
    result = cached(0)
    records = [
        msgspec.structs.replace(one, token_times=(123.4567, 345.6), ended=350.0)
        for one in result.records
    ]
    return msgspec.structs.replace(result, records=tuple(records))


def test_importing_the_command_line_is_light_and_httptools_is_optional():
    program = """
import sys
import twolane.cli.bench.main as cli
assert not {"httptools", "numpy", "torch"} & set(sys.modules)
sys.modules["httptools"] = None
from typer.testing import CliRunner
done = CliRunner().invoke(cli.app, ["serve"])
assert done.exit_code == 1, done.output
print(done.output)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "twolane: bench needs httptools: pip install 'twolane[bench]'"
