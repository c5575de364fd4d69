"""Server-sent events."""

import msgspec

from twolane.common.checked_json import Json

LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
"""Line ends that JSON does not escape but `str.splitlines`, with which some clients split streams,
knows, and their escapes."""


def event(body: Json) -> bytes:
    """Encode a server-sent event."""
    data = msgspec.json.encode(body)
    for end, escape in LINE_ENDS.items():
        data = data.replace(end, escape)
    return b"data: " + data + b"\n\n"


def named_event(body: Json) -> bytes:
    """Encode a server-sent event that is named after its type."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\n" + event(body)
