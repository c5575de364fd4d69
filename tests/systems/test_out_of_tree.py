"""A system outside of the package, by its path, wherever a system can be named."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.serving import serving, write_tiny_model
from tests.systems.names import EXAMPLE
from tests.systems.simulation import simulate, submit
from twolane import LLM, SamplingParams
from twolane.systems.base import System
from twolane.systems.registry import make_system

ROOT = Path(__file__).parents[2]
MINE = "policies.deadlines.EarliestDeadline"
"""The example, in a folder from which it is not installed."""
WORKLOAD = ("--random-input-len", "200", "--random-output-len", "6", "--num-prompts", "8")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a policy of its own."""
    (tmp_path / "policies").mkdir()
    shutil.copy(ROOT / "examples/earliest_deadline.py", tmp_path / "policies/deadlines.py")
    (tmp_path / "policies/broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    path = [*sys.path]
    yield tmp_path
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "policies"]:
        del sys.modules[name]


def twolane(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as the installed script does, which does not import from the directory."""
    command = [sys.executable, "-P", "-m", "twolane", *words]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


class Planless(System, msgspec.Struct, frozen=True):
    """It lacks a plan."""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere", "'nowhere' is unknown; there are: prefill-first"),
        ("nowhere.Policy", "importing nowhere failed: ModuleNotFoundError: No module named"),
        ("policies.missing.Policy", "importing policies.missing failed: ModuleNotFoundError"),
        ("policies.broken.Policy", "importing policies.broken failed: ZeroDivisionError"),
        ("policies.deadlines.Policy", "module policies.deadlines has no Policy"),
        ("policies.deadlines.LEAD", "is not a subclass of twolane.systems.base.System and msg"),
        ("twolane.slo.Slo", "is not a subclass of twolane.systems.base.System and msgspec.Struct"),
        (f"{__name__}.Planless", "has no method `plan`"),
    ],
)
def test_what_a_path_does_not_name_is_said(project: Path, name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^system ") as refused:
        make_system(name)
    assert problem in str(refused.value)


def test_settings_come_by_option_and_are_refused_by_name(project: Path) -> None:
    assert "token_budget=64" in repr(make_system(MINE, {"token_budget": "64"}))
    for options, problem in (
        ({"budget": "1"}, "'budget' is not one of system policies.deadlines.EarliestDeadline; it"),
        ({"token_budget": "0"}, "token_budget must be at least 1"),
    ):
        with pytest.raises(ValueError, match=problem):
            make_system(MINE, options)


def test_the_example_serves_the_prompt_that_is_due_first() -> None:
    """A short prompt that arrives later is due sooner than a long one; a priority comes first."""
    arrivals = [(0.0, submit("busy", 900, 2)), (0.001, submit("long", 900, 2))]
    arrivals += [(0.002, submit("short", 90, 2)), (0.003, submit("urgent", 900, 2, priority=-1))]
    sim = simulate(make_system(EXAMPLE, {"token_budget": "100"}), arrivals)
    assert sorted(sim.times, key=lambda name: sim.times[name][0]) == [
        *("urgent", "short", "busy", "long")
    ]


def test_doctor_shows_its_settings(project: Path) -> None:
    said = twolane("doctor", "--system", MINE, cwd=project)
    assert said.returncode == 0, said.stderr
    assert "Chunked prefill in the order in which first tokens are due." in said.stdout
    assert "token_budget=256  Number of tokens in a forward pass" in said.stdout
    wrong = twolane("doctor", "--system", "policies.broken.Policy", cwd=project)
    assert (wrong.returncode, wrong.stderr.startswith("twolane: --system 'pol")) == (2, True)


def test_it_is_simulated(project: Path) -> None:
    words = ("simulate", "llama-3.1-8b", "--gpu", "h200", "--system", MINE, *WORKLOAD)
    out = project / "result.json"
    ran = twolane(
        *(*words, "--option", "token_budget=64", "--request-rate", "20"),
        *("--result-file", str(out)),
        cwd=project,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["completed"] == 8
    assert found["simulated"]["system"] == MINE
    assert found["simulated"]["estimator"] == "calibrated"


@pytest.mark.full
def test_a_search_for_goodput_compares_it(project: Path) -> None:
    ran = twolane(
        *("bench", "goodput", "--simulate", "h200", "--model", "llama-3.1-8b", *WORKLOAD),
        *("--system", f"{MINE}:token_budget=256/512", "--system", "chunked"),
        *("--goodput", "ttft:1000", "tbt:50", "--start-rate", "20", "--tolerance", "0.3"),
        *("--brief", "--out", "found"),
        cwd=project,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads((project / "found/summary.json").read_text())["goodput"]
    assert set(found) == {f"{MINE}:token_budget=256", f"{MINE}:token_budget=512", "chunked"}
    assert all(one["median"] > 0 for one in found.values())
    wrong = twolane(
        *("bench", "goodput", "--simulate", "h200", "--model", "llama-3.1-8b", *WORKLOAD),
        *("--system", "policies.Nothing", "--goodput", "ttft:1000", "--brief", "--out", "none"),
        cwd=project,
    )
    assert (wrong.returncode, "--system 'policies.Nothing'" in wrong.stderr) == (2, True)


def test_it_serves(project: Path) -> None:
    model, trace = str(write_tiny_model(project / "tiny")), project / "trace.json"
    words = ("--load-format", "dummy", "--kv-tokens", "20000", "--trace", str(trace))
    with serving(model, *words, "--system", MINE) as served:
        body = {"prompt": [5] * 300, "max_tokens": 4, "ignore_eos": True}
        request = urllib.request.Request(
            f"{served.base}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
    assert MINE in trace.read_text()


@pytest.mark.full
def test_an_llm_takes_it(project: Path) -> None:
    model = str(write_tiny_model(project / "tiny"))
    words = {"load_format": "dummy", "kv_tokens": 20_000, "device": "cpu"}
    with LLM(model, system=MINE, options={"token_budget": "32"}, **words) as llm:
        [answer] = llm.generate(
            [[5] * 100], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        )
    assert len(answer.token_ids) == 4
    with pytest.raises(ValueError, match=r"system 'policies\.broken\.Policy'"):
        LLM(model, system="policies.broken.Policy", **words)
