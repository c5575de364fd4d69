"""Server-sent events."""

from typing import Any

import msgspec

Json = dict[str, Any]


def named_event(body: Json) -> bytes:
    """Write a server-sent event that is named after its type."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
