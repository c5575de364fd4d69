"""Server-sent events, as programs split them into lines."""

import json

import pytest

from twolane.server.http.events import event, named_event

TEXT = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0xA0, 0x2027, 0x2028, 0x2029, 0x202A, 0x1F600)))


@pytest.mark.parametrize(("written", "lines"), [(event, 1), (named_event, 2)])
def test_an_event_is_as_many_lines_for_those_that_split_texts(written, lines):
    body = {"type": "x", "delta": {TEXT: TEXT}}
    said = written(body).decode().splitlines()
    assert said[lines:] == [""]
    assert json.loads(said[lines - 1].removeprefix("data: ")) == body
