"""The trace's file when it can no longer be written."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from twolane.engine.trace import FileTrace

ROOM = 4096


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond `ROOM` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_the_trace_ends_and_its_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    trace = FileTrace(path, began=0.0)
    with full_disk():
        for at in range(100):
            trace.launch("decode", "step", at, at + 1.0, units=2)
        assert trace.silent
    trace.launch("decode", "step", 100.0, 101.0, units=2)  # there is room again
    trace.close()
    steps = [event["ts"] for event in json.loads(path.read_text()) if event["ph"] == "X"]
    assert steps == [at * 1e6 for at in range(len(steps))]
    assert 10 < len(steps) < 100
    said = [each.getMessage() for each in caplog.records if each.name == "twolane.trace"]
    assert said == [f"--trace {path} stops here: File too large"]


def test_a_trace_that_cannot_begin_is_refused() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        FileTrace("/dev/full", began=0.0)
