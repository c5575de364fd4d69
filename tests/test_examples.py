"""The examples run, and show what they say; `make package` runs them from the installed wheel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.serving import serving
from twolane.workload.spec import WorkloadSpec

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = "smollm2-135m-instruct"
FEW = WorkloadSpec(dataset="azure-conv", num_prompts=12, request_rate=20.0)


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program is run from the examples' folder."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))


def ran(name: str, **variables: str) -> str:
    """What an example prints."""
    ended = subprocess.run(
        [sys.executable, name],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("system", ["auto", "earliest_deadline.EarliestDeadline"])
def test_systems_are_compared_also_one_out_of_tree(system: str) -> None:
    import compare_systems

    name, ttft, tbt, met = compare_systems.run(system, FEW).split()
    assert name == system
    assert 0 < float(tbt) < 1000 * compare_systems.BOUNDS["tbt"] < float(ttft)
    assert met == "100.0%"


def test_a_figure_has_a_point_for_each_system_and_rate(monkeypatch, tmp_path: Path) -> None:
    import paper_figure

    monkeypatch.setattr(paper_figure, "RATES", (4.0, 16.0))
    found = list(paper_figure.points(requests=15))
    assert [point[:2] for point in found] == [
        (system, rate) for system in paper_figure.SYSTEMS for rate in paper_figure.RATES
    ]
    slow, fast = found[0], found[1]
    assert slow.tbt < fast.tbt
    assert slow.throughput < fast.throughput
    paper_figure.draw(found, str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.full
def test_a_batch_has_a_line_for_each_prompt() -> None:
    lines = [json.loads(line) for line in ran("offline_batch.py").splitlines()]
    assert len(lines) == 5
    assert {line["answer"] for line in lines} <= {"positive", "negative", "neutral"}
    assert lines[0]["answer"] == "positive"


@pytest.mark.full
def test_an_agent_runs_what_the_model_calls() -> None:
    with serving(MODEL, "--kv-tokens", "20000") as served:
        said = ran("agent.py", OPENAI_BASE_URL=f"{served.base}/v1")
    assert "tool: weather({'city': 'Paris'}) -> {" in said
    assert said.splitlines()[-1].startswith(("model: ", "</tool_response>"))
