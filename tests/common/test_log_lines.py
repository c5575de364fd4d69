"""A log whose reader stands still."""

import contextlib
import logging
import os
import select

import pytest

from twolane.common.log_lines import MAX_LINES, LineHandler, log_to
from twolane.server.run import announce


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def log(pipe, monkeypatch):
    """The log of a server, whose lines go into the pipe."""
    root = logging.getLogger()
    level = root.level
    monkeypatch.setattr(root, "handlers", [])
    log_to(pipe[1], "info", "engine: %(message)s")
    yield root
    root.setLevel(level)


def read(pipe):
    """Return all that is in the pipe now."""
    said = b""
    while select.select([pipe[0]], [], [], 0)[0]:
        said += os.read(pipe[0], 1 << 20)
    return said.decode()


def fill(pipe):
    os.set_blocking(pipe[1], False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe[1], b"\n" * 4096)
    os.set_blocking(pipe[1], True)


def test_lines_are_written_at_once(pipe, log):
    log.info("one")
    log.debug("no")
    half = logging.makeLogRecord({"msg": "\ud800"})
    log.handlers[0].handle(half)  # by it alone: pytest's reports cannot be sent with such a text
    assert read(pipe) == "engine: one\nengine: \\ud800\n"


def test_a_terminal_obeys_no_line(pipe, log):
    log.info("\x1b[2Ja\r\x9b1m\tb\n\x7f\u00fc")
    assert read(pipe) == "engine: \\x1b[2Ja\\x0d\\x9b1m\tb\n\\x7f\u00fc\n"


def test_no_line_waits_for_its_reader_and_none_is_torn(pipe, log):
    lines = [f"{i} {'x' * 6000}" for i in range(50)]  # more than the pipe holds
    for line in lines:
        log.info("%s", line)
    said = ""
    while more := read(pipe):
        said += more
        log.handlers[0].flush()
    assert said.splitlines() == [f"engine: {line}" for line in lines]


def test_lines_beyond_the_bound_are_counted(pipe, log):
    fill(pipe)
    for i in range(MAX_LINES + 7):
        log.info("%d", i)
    read(pipe)
    log.info("last")
    assert read(pipe).splitlines()[-3:] == [
        f"engine: {MAX_LINES - 1}",
        "7 lines of the log were lost: nobody has read it",
        "engine: last",
    ]


def test_a_reader_that_has_left_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    handler = LineHandler(writer)
    handler.handle(logging.makeLogRecord({"msg": "nobody"}))
    handler.close()
    os.close(writer)


def test_a_full_standard_output_is_told_to_the_log(pipe, monkeypatch, caplog):
    fill(pipe)
    with os.fdopen(os.dup(pipe[1]), "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", full)
        announce("here")
    assert "here (standard output: nobody reads it)" in caplog.text
