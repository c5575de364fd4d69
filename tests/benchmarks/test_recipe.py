"""Recipes of searches: every one is whole, and a small size of each way of searching runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.benchmarks.test_scripts import ROOT, SCRIPTS, run, saved
from tests.server.serving import write_tiny_model

RECIPES = sorted((SCRIPTS / "recipes").glob("*.toml"))
BRIEF = ("brief=true", "seeds=1", "num_prompts=8")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import recipe

    return recipe


def rows(path: Path) -> list[dict]:
    return saved(path)["rows"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_part_of_a_recipe_is_a_search(recipe, path: Path) -> None:
    asked = msgspec.toml.decode(path.read_bytes(), type=recipe.Recipe)
    for name in asked.parts:
        part = recipe.part_of(asked, name, SimpleNamespace(set={}, engines=None))
        for engine in part.engines:
            task = recipe.Task(asked, name, part, engine, "h200", Path("work"))
            assert task.systems
            assert {*task.target} <= {"serve", "command", "sweep", "model"}
            search = task.search()
            if not part.saturated:
                search.check()
            assert search.workload.num_prompts >= 600, name
    assert len(asked.parts) > 0


def test_an_unknown_setting_is_refused_by_name(recipe) -> None:
    asked = msgspec.toml.decode(RECIPES[0].read_bytes(), type=recipe.Recipe)
    with pytest.raises(SystemExit, match="unknown settings colour"):
        name = next(iter(asked.parts))
        recipe.part_of(asked, name, SimpleNamespace(set={"colour": 1}, engines=None))
    with pytest.raises(SystemExit, match="not simulated: max_loras"):
        recipe.simulated({"max_loras": 3})


def test_ratios_are_to_the_first_engine_however_often_it_ran(recipe) -> None:
    def row(engine: str, turn: int, tbt: float, *rates: float):
        found = recipe.Found(engine, tbt, [*rates])
        return recipe.Row(engine, turn, found, found.median)

    turns = [row("auto", 0, 0.02, 10.0), row("chunked", 1, 0.02, 6.0), row("chunked", 1, 0.02, 4.0)]
    assert recipe.ratios([*turns, row("auto", 2, 0.02, 14.0)]) == {"chunked at 20 ms": 0.5}
    assert recipe.ratios([*turns[:2], row("drift", 2, 0.02)]) == {"chunked at 20 ms": 0.6}


@pytest.mark.full
def test_systems_are_compared_in_simulation_and_drawn(tmp_path: Path) -> None:
    few = ("--set", *BRIEF, "tbt=[21, 50]", "--work", "work", "--out", tmp_path)
    engines = ("--engines", "auto", "chunked:token_budget=256/512", "prefill-first|two-stream")
    part = "qwen3-8b-azure-code-21ms"
    run("recipe.py", "one-card", part, "--simulate", "h100", *engines, *few, cwd=tmp_path)
    found = rows(tmp_path / f"simulated-h100/{part}.json")
    assert len(found) == 2 * 5
    assert {row["engine"] for row in found} == {*engines[1:]}
    assert all(row["rate"] >= 0 for row in found)
    figure = tmp_path / "figure.png"
    drawn = ("one-card", "--simulate", "h100", "--out", tmp_path, "--figure", figure)
    run("recipe.py", *drawn, cwd=tmp_path)
    assert figure.stat().st_size > 10_000


def test_a_card_is_emulated_by_its_profile(tmp_path: Path) -> None:
    few = ("--engines", "auto", "--set", *BRIEF, "start_rate=8", "tbt=[9]")
    part = "qwen3-8b-azure-conv-12ms"
    where = ("--work", "work", "--out", tmp_path)
    run("recipe.py", "one-card", part, "--emulate", *few, *where, cwd=tmp_path)
    assert rows(tmp_path / f"emulated-h200/{part}.json")[0]["found"]["system"] == "auto"


@pytest.mark.full
def test_gpus_for_each_phase_and_replicas_are_simulated(tmp_path: Path) -> None:
    few = ("--set", *BRIEF, "tbt=[40]", "--work", "work", "--out", tmp_path)
    engines = ("--engines", "1P1D", "two replicas of auto")
    run("recipe.py", "two-gpus", "--simulate", *engines, *few, cwd=tmp_path)
    one, two = rows(tmp_path / "simulated-h200/qwen3-8b-azure-conv.json")
    assert one["rate"] == one["found"]["goodput"][0] > 0
    assert two["rate"] == 2 * two["found"]["goodput"][0] > 0


def test_what_a_saturated_system_serves_is_a_point(tmp_path: Path) -> None:
    few = ("--engines", "chunked:token_budget=256", "--set", *BRIEF, "--out", tmp_path)
    run("recipe.py", "panels", "8b-toolagent-saturated", "--simulate", *few, cwd=tmp_path)
    [row] = rows(tmp_path / "simulated-h200/8b-toolagent-saturated.json")
    assert len(row["found"]["goodput"]) == 3
    assert all(0 < rate < 30 for rate in row["found"]["goodput"])


def served(tmp_path: Path) -> tuple[str, ...]:
    """Settings of a tiny model on this CPU, under bounds that hold however slow it is."""
    model = write_tiny_model(tmp_path / "tiny")
    flags = "--load-format dummy --device cpu --kv-tokens 20000 --max-model-len 4096"
    return (
        *("--set", f"model={model}", f"flags='{flags}'", "vocab_range='3:128'"),
        *("dataset='random'", "random_input_len=40", "random_output_len=6", "seeds=1"),
        *("num_prompts=8", "brief=true", "start_rate=50000", "first_step=2", "tbt=[60000]"),
        "goodput={ttft = 60000}",
    )


@pytest.mark.full
def test_systems_are_compared_on_servers_from_what_was_simulated(tmp_path: Path) -> None:
    """The first search says how far the simulation was off, and `auto` ends as it begins."""
    part, out = "qwen3-8b-azure-conv-12ms", tmp_path / "out"
    hint = {"engine": "chunked", "turn": 0, "rate": 40_000.0}
    hint["found"] = {"system": "chunked", "tbt": 60.0, "goodput": [40_000.0]}
    (out / "simulated-h200").mkdir(parents=True)
    (out / f"simulated-h200/{part}.json").write_text(json.dumps({"rows": [hint]}))
    engines = ("--engines", "static-split", "chunked", "static-split")
    words = (*engines, *served(tmp_path), "--work", "work", "--out", out)
    run("recipe.py", "one-card", part, *words, "--card", "h200", cwd=tmp_path)
    found = rows(out / f"h200/{part}.json")
    assert [row["engine"] for row in found] == ["static-split", "chunked", "static-split"]
    assert all(row["found"]["server"] for row in found)
    assert found[1]["found"]["runs"][0]["rate"] == pytest.approx(40_000.0)


def test_one_server_serves_every_bound(tmp_path: Path) -> None:
    own = 'one_server = {rows = 2, context = 64, prompt = 128}\nabout = "a"\n[search]\n[parts.a]\n'
    (tmp_path / "own.toml").write_text(own)
    words = (*served(tmp_path), "tbt=[60000, 70000]", "--work", "work", "--out", tmp_path)
    run("recipe.py", tmp_path / "own.toml", "--engines", "static-split", *words, cwd=tmp_path)
    found = rows(tmp_path / "h200/a.json")
    assert [row["found"]["tbt"] for row in found] == [60.0, 70.0]
    assert {*found[0]["speeds"]} == {
        *("start_seconds", "step_ms", "first_token_ms", "prefill_tokens_s")
    }
    assert len(list((tmp_path / "work").rglob("server.log"))) == 1


@pytest.mark.full
def test_a_search_that_is_interrupted_leaves_its_runs(tmp_path: Path) -> None:
    """Ctrl-C after the first run; the engines after it are neither searched nor compared."""
    words = ("--engines", "static-split", "chunked", *served(tmp_path), "--out", str(tmp_path))
    script = [sys.executable, "-u", str(SCRIPTS / "recipe.py"), "one-card"]
    command = [*script, "qwen3-8b-azure-conv-12ms", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert any(line.startswith("static-split at 60000 ms") for line in ran.stdout)
        ran.send_signal(signal.SIGINT)
        ran.communicate(timeout=240)
    assert ran.returncode == 0
    [row] = rows(tmp_path / "h200/qwen3-8b-azure-conv-12ms.json")
    assert row["found"]["goodput"] == []
    assert row["found"]["runs"]
