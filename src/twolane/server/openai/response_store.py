"""Responses in memory, for requests that go on with an earlier one."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

Json = dict[str, Any]


class StoredResponse(NamedTuple):
    """A response and the conversation up to its end, as JSON."""

    response: bytes
    turns: bytes

    @property
    def size(self) -> int:
        """What it takes of the store, in bytes."""
        return len(self.response) + len(self.turns)


class ResponseStore:
    """The latest responses, as many as fit.

    Args:
        max_bytes: number of bytes that they may take together; 0: none is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        """Number of bytes that are taken."""
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def add(self, response: Json, turns: Sequence[Json]) -> None:
        """Store a response, in place of the oldest ones; one that does not fit is not stored."""
        encode = msgspec.json.encode
        one = StoredResponse(encode(response), encode(turns))
        if one.size > self.max_bytes:
            return
        self._stored[response["id"]] = one
        self.bytes += one.size
        while self.bytes > self.max_bytes:
            self.remove(next(iter(self._stored)))

    def response(self, id: str) -> bytes | None:
        """Return a stored response; None: there is none of this id."""
        one = self._stored.get(id)
        return None if one is None else one.response

    def turns(self, id: str) -> list[Json] | None:
        """Return the messages up to a response's end; None: there is none of this id."""
        one = self._stored.get(id)
        if one is None:
            return None
        self._stored.move_to_end(id)  # who goes on with it once may do so again
        return msgspec.json.decode(one.turns, type=list[Json])

    def remove(self, id: str) -> bool:
        """Forget a response; return whether there was one of this id."""
        one = self._stored.pop(id, None)
        self.bytes -= 0 if one is None else one.size
        return one is not None
