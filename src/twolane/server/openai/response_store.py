"""Responses in memory, for requests that continue an earlier one."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

Json = dict[str, Any]
ITEM_BYTES = 300
"""Bytes of the index per item."""


class StoredResponse(NamedTuple):
    """A response and the conversation up to its end, as JSON."""

    response: bytes
    turns: bytes
    items: tuple[str, ...]
    """Ids of its output items."""

    @property
    def size(self) -> int:
        """Bytes that it takes in the store."""
        return len(self.response) + len(self.turns) + ITEM_BYTES * len(self.items)


class ResponseStore:
    """The latest responses, as many as fit into `max_bytes`.

    Args:
        max_bytes: number of bytes that they may take together; 0: none is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        """Number of bytes in use."""
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._holders: dict[str, str] = {}
        """Id of the response that each item belongs to, by item id."""

    def add(self, response: Json, turns: Sequence[Json]) -> None:
        """Store a response and evict the oldest ones; one that does not fit is not stored."""
        encode = msgspec.json.encode
        items = tuple(item["id"] for item in response["output"])
        one = StoredResponse(encode(response), encode(turns), items)
        if one.size > self.max_bytes:
            return
        self._stored[response["id"]] = one
        self._holders |= dict.fromkeys(items, response["id"])
        self.bytes += one.size
        while self.bytes > self.max_bytes:
            self.remove(next(iter(self._stored)))

    def response(self, id: str) -> bytes | None:
        """Return a stored response; None: there is none of this id."""
        one = self._stored.get(id)
        return None if one is None else one.response

    def finder(self) -> Callable[[str], Json | None]:
        """Return a function that finds items of stored responses by id, for one request.

        It reads each response once: a request may refer to very many items.
        """
        read: dict[str, dict[str, Json]] = {}

        def find(id: str) -> Json | None:
            holder = self._holders.get(id)
            if holder is None:
                return None
            if holder not in read:
                self._stored.move_to_end(holder)
                output = msgspec.json.decode(self._stored[holder].response)["output"]
                read[holder] = {item["id"]: item for item in output}
            return read[holder][id]

        return find

    def turns(self, id: str) -> list[Json] | None:
        """Return the messages up to a response's end; None: there is none of this id."""
        one = self._stored.get(id)
        if one is None:
            return None
        self._stored.move_to_end(id)  # who goes on with it once may do so again
        return msgspec.json.decode(one.turns, type=list[Json])

    def remove(self, id: str) -> bool:
        """Delete a response; return whether it was stored."""
        one = self._stored.pop(id, None)
        if one is None:
            return False
        for item in one.items:
            del self._holders[item]
        self.bytes -= one.size
        return True
