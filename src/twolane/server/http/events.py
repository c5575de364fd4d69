"""Server-sent events."""

from typing import Any

import msgspec

Json = dict[str, Any]
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
"""Characters that end a line for `str.splitlines`, by which some clients split a stream, and how
JSON escapes them. It escapes the others anyway."""


def event(body: Json) -> bytes:
    """Write a server-sent event."""
    data = msgspec.json.encode(body)
    for end, escape in LINE_ENDS.items():
        data = data.replace(end, escape)
    return b"data: " + data + b"\n\n"


def named_event(body: Json) -> bytes:
    """Write a server-sent event that is named after its type."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\n" + event(body)
