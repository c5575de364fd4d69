"""Server-sent events, as WHATWG's HTML standard (section 9.2.6) reads them."""

import re

import msgspec

_LINE_END = re.compile(rb"\r\n|\n|\r")


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event: its `event:` field, or "message", and its `data:` lines joined by newlines."""

    type: str
    data: str


class SSEParser:
    """Parses a byte stream into events, however it was cut.

    Events do not depend on the cuts, and each is returned by the `feed` that brings the end of
    its blank line. Comments and unknown fields are skipped, events without data dropped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._skip_newline = False
        self._started = False
        self._type = ""
        self._data: list[str] = []
        self._held = 0

    @property
    def held(self) -> int:
        """Number of bytes and characters of the event that is not yet complete."""
        return len(self._rest) + self._held

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that these bytes complete."""
        if _is_one_event(data) and not (self._rest or self._type or self._data):
            self._started, self._skip_newline = True, False
            return [Event("message", data[6:-2].decode("utf-8", "replace"))]
        return self._feed_lines(data)

    def _feed_lines(self, data: bytes) -> list[Event]:
        if self._skip_newline and data:
            data = data.removeprefix(b"\n")
            self._skip_newline = False
        buffer = self._rest + data
        events, start = [], 0
        for end in _LINE_END.finditer(buffer, len(self._rest)):
            event = self._line(buffer[start : end.start()])
            start = end.end()
            if event is not None:
                events.append(event)
        # A carriage return at the end of the bytes ends the line now; a newline may yet follow.
        self._skip_newline = self._skip_newline or (buffer.endswith(b"\r") and start == len(buffer))
        self._rest = buffer[start:]
        return events

    def close(self) -> list[Event]:
        """Return the last event if the stream ended before its blank line.

        The standard drops it; servers that forget the last newline after `[DONE]` exist.
        """
        events = [self._line(self._rest), self._dispatch()]
        self._rest = b""
        return [event for event in events if event is not None]

    def _line(self, line: bytes) -> Event | None:
        if not self._started:
            self._started = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._dispatch()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._held += len(line)
        elif name == "event":
            self._type = value
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._type or "message", "\n".join(self._data)) if self._data else None
        self._type, self._data, self._held = "", [], 0
        return event


def _is_one_event(data: bytes) -> bool:
    """Return whether the bytes are one line of data and a blank one, as is usual."""
    return (
        data.startswith(b"data: ")
        and data.endswith(b"\n\n")
        and data.find(b"\n") == len(data) - 2
        and b"\r" not in data
    )
