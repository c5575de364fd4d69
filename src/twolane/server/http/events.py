"""Server-sent events."""

import uuid
from collections.abc import Callable

import msgspec

from twolane.common.checked_json import Json

LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
"""Line ends that JSON does not escape but `str.splitlines`, with which some clients split streams,
knows, and their escapes."""


def encoded(value: object) -> bytes:
    """Encode a JSON value for a line of an event."""
    data = msgspec.json.encode(value)
    if not data.isascii():
        for end, escape in LINE_ENDS.items():
            data = data.replace(end, escape)
    return data


def event(body: Json) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + encoded(body) + b"\n\n"


class EventForm:
    """Events that differ in one text alone, of which the rest is encoded once.

    Args:
        make: makes an event with a text in it; the text must not change what else is in it.
    """

    def __init__(self, make: Callable[[str], bytes]) -> None:
        mark = uuid.uuid4().hex
        self._before, self._after = make(mark).split(f'"{mark}"'.encode())

    def event(self, text: str) -> bytes:
        """Return the event with a text."""
        return b"%b%b%b" % (self._before, encoded(text), self._after)


def named_event(body: Json) -> bytes:
    """Encode a server-sent event that is named after its type."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\n" + event(body)
