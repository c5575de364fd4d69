"""Every benchmark runs: its help everywhere, a tiny size of it where it needs no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.engine.test_constraints import tokenizer
from tests.model.checkpoints import make_checkpoint
from twolane.results.provenance import Provenance

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
PAPERS = {"study", "device", "muxwise", "duetserve", "bullet", "drift", "page", "switches"}
MODULES = {"measured", "one_server", "searches", *PAPERS}
"""Files that only others import."""
HELPS = """
import contextlib, io, pathlib, runpy, sys
for script in sys.argv[1:]:
    said, sys.argv = io.StringIO(), [script, "--help"]
    sys.path[0] = str(pathlib.Path(script).parent)
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, script
    assert "usage" in said.getvalue(), script
    print(script)
"""
"""Asks all scripts for their help in one process, for most of them import the same libraries."""


CASES = """
import contextlib, importlib, io, sys
sys.path.insert(0, sys.argv[1])
import harness
for name in sys.argv[2:]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        harness.run(importlib.import_module(name.replace("-", "_")), name, ["--help"])
    assert "--out" in said.getvalue(), name
    print(name)
"""
"""Asks all cases for their help in one process."""


def python(*words, cwd, timeout=240):
    """Run Python; return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *map(str, words)]
    ended = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended.stdout


def run(script, *words, cwd):
    """Run a script as its docstring says; return what it prints."""
    return python(SCRIPTS / script, *words, cwd=cwd)


def saved(path):
    """A file of results; it has a record."""
    content = msgspec.json.decode(path.read_bytes())
    about = msgspec.convert(content["provenance"], Provenance)
    assert about.command.startswith("python ") and about.versions["twolane"]
    assert about.workload is not None
    return content


def test_every_benchmark_says_how_it_is_used(tmp_path):
    pytest.importorskip("triton")  # the kernels' scripts import it
    gpu = SCRIPTS / "gpu"
    scripts = [p for p in sorted(SCRIPTS.rglob("*.py")) if p.stem not in MODULES]
    scripts = [p for p in scripts if p.parent != gpu or p.stem == "__main__"]
    assert python("-c", HELPS, *scripts, cwd=tmp_path).split() == [str(p) for p in scripts]


def test_every_case_on_a_gpu_says_how_it_is_used(tmp_path):
    pytest.importorskip("triton")
    cases = re.findall(r"^  ([a-z-]+) ", run("gpu", cwd=tmp_path), flags=re.MULTILINE)
    modules = {name.replace("-", "_") for name in cases}
    own = {path.stem for path in (SCRIPTS / "gpu").glob("*.py")}
    assert own - modules == {"__main__", "harness", "rig"}
    assert modules < own
    said = python("-c", CASES, SCRIPTS / "gpu", *cases, cwd=tmp_path)
    assert said.split() == cases


def test_every_file_of_results_has_a_record():
    files = list(SCRIPTS.rglob("results/**/*.json"))
    assert len(files) > 100
    for path in files:
        msgspec.convert(msgspec.json.decode(path.read_bytes())["provenance"], Provenance)


def test_the_way_of_a_token_is_measured_without_an_engine(tmp_path):
    out = tmp_path / "delivery.json"
    few = ("--streams", 4, "--rounds", 1, "--step-ms", 4, "--playout-ms", 3, "--seconds", 1)
    run("delivery.py", *few, "--kind", "logprobs", "--beside", 1, "--out", out, cwd=tmp_path)
    [found] = saved(out)["runs"]
    assert found["tokens"] > 40
    assert 0 < found["api_cpu_us_per_token"] <= found["all_api_cpu_us_per_token"]
    assert 0 <= found["tbt_ms"]["p50"] <= found["tbt_ms"]["p99"]


@pytest.mark.full
def test_the_lanes_of_a_cpu_are_measured(tmp_path):
    model, out = tmp_path / "tiny", tmp_path / "cpu.json"
    make_checkpoint("llama2", model)
    few = (
        "--seconds",
        0.5,
        "--rounds",
        1,
        "--prompt",
        100,
        "--every",
        0.2,
        "--output",
        6,
        "--idle",
        1,
    )
    run("cpu.py", "--model", model, *few, "--out", out, cwd=tmp_path)
    found = saved(out)
    assert len(found["figures"]) == 8
    assert all(value > 0 for value in found["measured"].values())


@pytest.mark.full
def test_what_grammars_cost_is_measured(tmp_path):
    model, out = tmp_path / "tiny", tmp_path / "constraints.json"
    make_checkpoint("llama2", model)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    where = ("--model", model, "--load-format", "auto", "--device", "cpu", "--vocab-size", 256)
    few = ("--rows", 4, "--constrained", 2, "--threads", 2, "--prompt", 20, "--tokens", 400)
    name = ("--tokenizer", tmp_path / "tokenizer.json", "--eos", 2)
    run("constraints.py", *where, *few, "--rounds", 1, *name, "--out", out, cwd=tmp_path)
    found = saved(out)
    some = found["gaps"]["2 constrained"]
    assert some.keys() == {"constrained", "free"}
    assert some["free"]["median_ms_over_none"] > 0
    assert found["masks"].keys() == {f"{rows} rows, 2 threads" for rows in (1, 16, 64)}


@pytest.mark.full
def test_the_papers_comparisons_run(tmp_path):
    names = ("bullet-fig22", "muxwise-fig6")
    few = ("--requests", 6, "--seeds", 1)
    said = run("papers/run.py", *names, *few, "--out", tmp_path, cwd=tmp_path)
    runs = saved(tmp_path / "bullet-fig22.json")["runs"]
    assert len(runs) == 8  # on both models of the A100
    assert {done["gpu"] for done in runs} == {"a100-80gb", "a100-80gb-split"}
    assert "Bullet Fig. 22" in said
    assert "505 ms" in said


def test_runs_on_servers_go_system_by_system(monkeypatch):
    """So that each server is started once, whatever the order of the loads."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "papers"))
    import run

    figure = run.EXPERIMENTS["duetserve-fig6"]
    patterns = ("code 16/s: *", "Mooncake 5/s: DuetServe")
    named = [name for name, _ in run.chosen(figure, patterns, served=True)]
    assert named[:3] == [
        "code 16/s: DuetServe",
        "Mooncake 5/s: DuetServe",
        "code 16/s: chunked 8192",
    ]
    assert len(named) == 4


@pytest.mark.parametrize(
    ("row", "ours", "status"),
    [
        ({"paper": 2.0}, {"": [1.7, 2.4, 2.6]}, "**reproduced**"),
        ({"paper": 2.0, "why": "it idles"}, {"": [1.2]}, "not: it idles"),
        ({"paper": 1.09, "why": "it idles"}, {"": [1.02]}, "not: it idles"),
        ({"paper": 0.94}, {"": [0.9]}, "**reproduced**"),
        ({"paper": 2.0}, {"whole": [6.0], "split": [1.4]}, "open: the two models of the A100"),
        ({"paper": 2.0, "why": "it idles"}, {"whole": [6.0], "split": [1.4]}, "not: it idles"),
        ({"paper": 2.0, "contradicts": "Little's law"}, {"": [2.0]}, "cannot be: Little's law"),
        ({"why": "no number"}, {"": [2.0]}, "no claim: no number"),
    ],
)
def test_a_claim_is_reproduced_or_has_a_reason(monkeypatch, row, ours, status):
    monkeypatch.syspath_prepend(str(SCRIPTS / "papers"))
    from run import Row, Value

    value = Value(Row(what="", figure="x", of=["a"], over=["b"], **row), ours, more=False)
    assert value.status.startswith(status)


def test_no_goodput_of_the_papers_studies_is_above_what_was_finished():
    for path in SCRIPTS.glob("results/papers/*.json"):
        for done in msgspec.json.decode(path.read_bytes())["runs"]:
            figures = done["figures"]
            if figures.get("goodput"):
                assert 0.95 * figures["goodput"] <= figures["finished"], (path, done["run"])
                assert done["requests"] >= 600


def test_only_the_chosen_runs_of_an_experiment_are_made_again(tmp_path, monkeypatch):
    """The others stay in its file, with the commit that they had."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "papers"))
    import run
    from study import Bench

    made = []
    monkeypatch.setattr(Bench, "figures", lambda _, one, gpu, seed: made.append(one.system) or {})
    command = ["run.py", "bullet-fig22", "--seeds", "1", "--out", str(tmp_path)]
    for more, again in (
        ([], 8),
        ([], 0),
        (["--fresh", "--runs", "*SM-108"], 4),
        (["--fresh"], 8),
    ):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        run.main()
        assert len(made) == again
        assert len(saved(tmp_path / "bullet-fig22.json")["runs"]) == 8
        made.clear()


def test_the_tables_read_a_recipes_rows(tmp_path, monkeypatch):
    """Each engine of a part has a row in the table of its recipe."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import tables
    from recipe import Row
    from searches import Found

    def write(recipe, card, engines):
        rows = [
            Row(engine, turn, Found(engine, 0.012, [rate, rate]), rate)
            for turn, (engine, rate) in enumerate(engines.items())
        ]
        about = {"commit": "0" * 40, "date": "2026-11-29T10:00:00+00:00"}
        rest = {"num_prompts": 700, "dataset": "azure-conv"}
        content = {
            "provenance": {**about, "workload": {"model": "qwen3-8b", "rest": rest}},
            "part": "qwen3-8b-azure-conv",
            "card": card,
            "rows": rows,
        }
        path = tmp_path / recipe / card / "qwen3-8b-azure-conv.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(msgspec.json.encode(content))

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    write("one-card", "h200", {"auto": 12.0, "muxwise": 11.0})
    write("two-gpus", "simulated-h200", {"auto over two ranks": 40.0, "1P1D": 20.0})
    assert [row[2:6] for row in tables.one_card()] == [
        ["`auto`", "12.0 (12.0 to 12.0)", "2", "1.00"],
        ["`muxwise`", "11.0 (11.0 to 11.0)", "2", "0.92"],
    ]
    assert [row[:4] for row in tables.two_gpus()] == [
        ["12", "auto over two ranks", "40.0", "1.00"],
        ["12", "1P1D", "20.0", "0.50"],
    ]


def test_engines_are_compared_as_they_are_without_a_buffer_and_with_the_same(tmp_path, monkeypatch):
    """An engine that plans for a buffer counts only in the runs with that buffer."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import tables

    def run(engine, rate, raw, shown, seed=0):
        return {
            "engine": engine, "dataset": "azure-conv", "bound_ms": 21, "seed": seed, "rate": rate,
            "raw_holds": raw, "shown_holds": shown,
        }  # fmt: skip

    runs = [
        run("vllm 384", 17.0, True, True),
        run("vllm 384", 17.51, False, True),
        run("vllm 384", 16.0, False, False, seed=1),
        run("auto client", 21.0, False, True),
        run("auto client", 22.0, False, False),
        run("auto none", 19.0, True, False),
        run("auto", 20.0, True, False),
        run("chunked 512", 18.0, False, True),
    ]
    about = {"commit": "0" * 40, "date": "2026-11-29T10:00:00+00:00", "workload": {}}
    (tmp_path / "equal-treatment").mkdir()
    path = tmp_path / "equal-treatment" / "21ms-h200.json"
    path.write_bytes(msgspec.json.encode({"provenance": about, "runs": runs}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert [row[2:6] for row in tables.equal()] == [
        ["`auto`", ">= 20.0, -", ">= 19.0, -", "21.0, -"],
        ["`chunked 512`", "-", "< 18.0, -", ">= 18.0, -"],
        ["`vllm 384`", "17.0, < 16.0", "17.0, < 16.0", ">= 17.5, < 16.0"],
    ]
    path.write_bytes(msgspec.json.encode({"provenance": about, "runs": [*runs[:2], *runs[3:]]}))
    assert [row[1] for row in tables._beside()] == ["**1.12** (1.12)"]  # shown, no rate of it fails
    runs = [*runs[:2], *runs[3:], run("vllm 384", 18.54, False, False)]
    path.write_bytes(msgspec.json.encode({"provenance": about, "runs": runs}))
    assert [row[1] for row in tables._beside()] == ["**1.12** (1.12)", "**1.17** (1.17)"]  # to 18.0
    other = run("vllm 512", 19.0, False, True, seed=1)  # nothing says what it holds in pattern 0
    short = {**run("auto client", 23.0, True, True), "judged_seconds": 4.0}
    path.write_bytes(msgspec.json.encode({"provenance": about, "runs": [*runs, other, short]}))
    assert [row[1] for row in tables._beside()] == ["**1.12** (1.12)"]
    assert "23.0" not in str([*tables.equal()])
    about["workload"] = {"model": "qwen3-8b", "quantization": "fp8"}
    path.write_bytes(msgspec.json.encode({"provenance": about, "runs": runs}))
    assert {row[0] for row in tables.equal()} == {"8B FP8 conversations"}


@pytest.mark.full
def test_the_device_model_is_fitted_to_profiles(tmp_path):
    run("fit_device.py", "--out", tmp_path / "device.json", cwd=tmp_path)
    assert len(saved(tmp_path / "device.json")["parameters"]) > 20
    with pytest.raises(AssertionError, match="no profile of a100-80gb ships"):
        run("fit_device.py", "--card", "a100-80gb", cwd=tmp_path)


@pytest.mark.full
def test_what_sharing_a_device_costs_is_measured(tmp_path):
    few = ("--prompts", 6, "--systems", "muxwise", "--batches", "1 x 2,048")
    out = tmp_path / "sharing.json"
    run("sharing.py", "--simulate", "h200", *few, "--out", out, cwd=tmp_path)
    found = saved(out)
    assert 0 < found["sharing"]["muxwise"]["utilisation"] < 1.2
    assert 0 <= found["sharing"]["muxwise"]["idle with work"] < 1
    assert -0.1 < found["slicing"]["1 x 2,048"]["cost"] < 1


@pytest.mark.full
def test_routers_are_compared_in_simulation(tmp_path):
    out = tmp_path / "fleet.json"
    words = ("--dataset", "toolagent", "--replicas", 2, "--requests", 12, "--guess", 2)
    routers = ("--router", "predicted", "round-robin")
    run("fleet.py", *words, *routers, "--runs", tmp_path / "runs", "--out", out, cwd=tmp_path)
    (found,) = saved(out)["comparisons"]
    assert set(found["goodput"]) == {"predicted", "round-robin"}
    assert found["ratio"]["round-robin"] > 0


def test_decisions_are_timed(tmp_path):
    out = tmp_path / "decisions.json"
    run("fleet.py", "--decide", "--replicas", 2, "--rounds", 4, "--out", out, cwd=tmp_path)
    (found,) = saved(out)["decisions"]
    assert 0 < found["decide_p50"] <= found["decide_p90"]


@pytest.mark.full
def test_no_router_holds_more_than_all_servers_as_one(tmp_path):
    out = tmp_path / "bound.json"
    words = ("--dataset", "conversation", "--replicas", 2, "--requests", 60, "--seeds", 1)
    run("fleet_bound.py", *words, "--out", out, cwd=tmp_path)
    found = saved(out)["goodput"]["conversation"]
    assert 15 < found["round-robin"][0] <= found["pooled"][0]
    assert found["exact"][0] <= found["pooled"][0]
