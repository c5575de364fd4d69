"""Every benchmark runs: its help everywhere, a tiny size of it where it needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from twolane.results.provenance import Provenance

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
MODULES = {"measured", "gpus", "common"}
"""Files that only others import."""
HELPS = [p for p in sorted(SCRIPTS.rglob("*.py")) if p.stem not in MODULES]


def run(script, *words, cwd, timeout=240):
    """Run a script as its docstring says; return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TWOLANE_CACHE": str(cwd / "cache")}
    command = [sys.executable, str(SCRIPTS / script), *map(str, words)]
    ended = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended.stdout


def saved(path):
    """A file of results; it has a record."""
    content = msgspec.json.decode(path.read_bytes())
    about = msgspec.convert(content["provenance"], Provenance)
    assert about.command.startswith("python ") and about.versions["twolane"]
    return content


@pytest.mark.parametrize("script", HELPS, ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_every_benchmark_says_how_it_is_used(script, tmp_path):
    if script.parent.name == "kernels":
        pytest.importorskip("triton")
    assert "usage" in run(script, "--help", cwd=tmp_path)


def test_the_way_of_a_token_is_measured_without_an_engine(tmp_path):
    out = tmp_path / "delivery.json"
    few = ("--rate", 40, "--prompts", 6, "--rounds", 1, "--step-ms", 2, "--playout-ms", 2)
    run("delivery.py", *few, "--out", out, cwd=tmp_path)
    [found] = saved(out)["runs"]
    assert found["tokens"] > 6
    assert found["tbt_ms"]["p50"] == pytest.approx(2.0, rel=0.5)
