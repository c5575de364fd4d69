"""Random schedules with delays on either stream; and without each guard, which must show.

Every run is a process of its own (`isolation.py`): a CUDA error ends one for good.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.guards import GUARDS

PROCESSES = 8
SCHEDULES, FULL_SCHEDULES = 500, 5000
BUDGET_SECONDS = 60.0
"""In which the lack of a guard must show."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model and the catalogue; the first process makes them."""
    path = tmp_path_factory.mktemp("isolation")
    run(path, "--seeds", "0:1")
    return path


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.gpu.isolation", "--folder", str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Its report; it must have ended as it should."""
    out, log = process.communicate()
    assert process.returncode == 0, f"{out[-3000:]}\n{log[-3000:]}"
    return json.loads(out.splitlines()[-1])


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    return result(start(folder, *arguments))


def seeds(count: int) -> Sequence[str]:
    """Shares of the schedules, one a process."""
    each = -(-count // PROCESSES)
    return [f"{first}:{min(first + each, count)}" for first in range(0, count, each)]


@pytest.mark.timeout(900)
def test_random_schedules(folder: Path, request: pytest.FixtureRequest) -> None:
    count = FULL_SCHEDULES if request.config.getoption("--full") else SCHEDULES
    processes = [start(folder, "--seeds", share) for share in seeds(count)]
    reports = [result(process) for process in processes]
    assert sum(report["schedules"] for report in reports) == count
    total = {key: sum(r["total"].get(key, 0) for r in reports) for key in reports[0]["total"]}
    print(total)
    for what in ("merged", "side by side", "preempted batches", "aborted in flight", "delays"):
        assert total[what] > count, what
    for what in ("memory preemptions", "prefix hits"):
        assert total[what] > count / 2, what
    compiled = [form for report in reports for form in report["compiled"]]
    assert not compiled, f"compiled after the start: {compiled}"


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_the_schedules_fail(guard: str, folder: Path) -> None:
    run(folder, "--seeds", "0:5000", "--budget", str(BUDGET_SECONDS), "--without", guard)
