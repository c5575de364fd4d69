"""A forked program finds what an executed one does, and ends as it does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import zygote
from tests.server.serving import PATIENCE, alive, wait_for

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "tests.found", str(os.getpid())]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux")


@pytest.fixture
def forks(monkeypatch):
    """Return what turns forks on and off, for one test."""
    zygote.install()
    return lambda on: monkeypatch.setattr(zygote, "enabled", on)


def unlike(one, other):
    """Return what differs."""
    return {
        name: unlike(one[name], other[name])
        if isinstance(one.get(name), dict) and isinstance(other.get(name), dict)
        else (one.get(name), other.get(name))
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    }


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"start_new_session": True},
        {"process_group": 0, "umask": 0o77},
        {"env": {"TWOLANE_MODEL": "a b", "PYTEST_OTHER": "x", "COLUMNS": "60"}},
    ],
)
def test_a_forked_program_finds_what_an_executed_one_does(forks, how, tmp_path):
    """So does one that it forks itself."""
    results = []
    for forked in (False, True):
        forks(forked)
        with (tmp_path / "err").open("w") as errors:
            ran = subprocess.run(
                [*COMMAND, "child"],
                input="above\n",
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                pass_fds=[errors.fileno()],
                cwd=ROOT,
                **{**how, "env": {**zygote._environment, **how.get("env", {})}},
            )
        assert ran.returncode == 3
        assert not (tmp_path / "err").read_text()
        results.append(json.loads(ran.stdout))
    executed, forked = results
    for result in (executed, executed["child"]):
        assert result.pop("forked") is False
        assert result["child_of_parent"]
    for result in (forked, forked["child"]):
        assert result.pop("forked") is True
    below, above = forked.pop("child"), executed.pop("child")
    assert unlike(forked, executed) == unlike(below, above) == {}


@pytest.mark.parametrize(
    "how",
    [
        {"env": {**zygote._environment, "PYTHONHASHSEED": "1"}},
        {"env": {**zygote._environment, "OMP_NUM_THREADS": "7"}},
        {"preexec_fn": lambda: os.nice(1)},
        {"shell": True},
        {"close_fds": False},
    ],
)
def test_what_a_fork_cannot_do_alike_is_executed(forks, how):
    forks(True)
    command = " ".join(COMMAND) if "shell" in how else COMMAND
    ran = subprocess.run(command, input="\n", capture_output=True, text=True, cwd=ROOT, **how)
    assert ran.returncode == 3, ran.stderr
    assert not json.loads(ran.stdout)["forked"]


@pytest.mark.parametrize(
    "way", ["no code", "none", "a code", "a text", "a fault", "an interrupt", "nobody reads"]
)
def test_a_forked_program_ends_as_an_executed_one_does(forks, way):
    ends = []
    for forked in (False, True):
        forks(forked)
        command = [*COMMAND[:3], "ends", way if way != "nobody reads" else "none"]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=ROOT) as process:
            if way == "nobody reads":
                process.stdout.close()
            said = process.communicate(timeout=PATIENCE)
        ends.append((process.returncode, said[0], said[1].splitlines()[-1:]))
    assert ends[0] == ends[1]
    assert way == "nobody reads" or ends[0][1] == "of a thread\nat the exit\n"


def test_a_program_that_cannot_be_started_raises_as_before(forks, tmp_path):
    forks(True)
    with pytest.raises(FileNotFoundError):
        subprocess.run(COMMAND, cwd=tmp_path / "nowhere", check=False)


def test_a_killed_program_is_gone_and_so_is_its_zygote(forks):
    forks(True)
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, cwd=ROOT)
    below = [
        int(file.parent.name)
        for file in Path("/proc").glob("[0-9]*/stat")
        if file.read_text().rpartition(")")[2].split()[1] == str(process.pid)
    ]
    assert len(below) == 1
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_for(lambda: not alive(below[0]))
    process.stdin.close()
