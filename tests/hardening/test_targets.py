"""Whatever reads foreign data refuses what is wrong with it, and is not hurt by anything."""

import subprocess
import sys

import pytest

from .fuzzing import TARGETS

COUNTS = {"templates": 60, "tokenizers": 60, "gguf": 150}
"""Inputs of each target; others are quicker and get more."""
MORE = 600


def fuzz(names, begin, count):
    """Run inputs in a process of its own, which a fault of a native library may end."""
    command = [sys.executable, "-m", "tests.hardening.fuzzing", *names]
    numbers = ["--begin", str(begin), "--count", str(count)]
    run = subprocess.run([*command, *numbers], capture_output=True)
    out = run.stdout.decode()
    assert run.returncode == 0, f"exit {run.returncode}\n{out}\n{run.stderr.decode()[-2000:]}"
    assert out.count("'taken': ") == len(names)  # the fuzz gets past the first check
    print(out)


@pytest.mark.parametrize("count", sorted({*COUNTS.values(), MORE}))
def test_targets_take_or_refuse_whatever_comes(count):
    fuzz([name for name in TARGETS if COUNTS.get(name, MORE) == count], 0, count)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_or_refuses_many_inputs(name):
    fuzz([name], 1000, 50 * COUNTS.get(name, MORE))
