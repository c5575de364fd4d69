"""Responses in memory, for requests that continue an earlier one."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from twolane.common.checked_json import Json


class ListedItem(NamedTuple):
    """An item as a list shows it. It is kept encoded: a list may have very many, of which a page
    shows few."""

    id: str
    fields: bytes
    """The other fields, as an object in JSON."""

    @classmethod
    def of(cls, item: Json) -> "ListedItem":
        """Return an item in this form; its id is taken out of `item`."""
        id: str = item.pop("id")
        return cls(id, msgspec.json.encode(item))

    @property
    def json(self) -> msgspec.Raw:
        """The whole item in JSON."""
        return msgspec.Raw(b'{"id":' + msgspec.json.encode(self.id) + b"," + self.fields[1:])


class StoredConversation(NamedTuple):
    """What a request has before its own items."""

    turns: list[Json]
    """Its messages."""
    items: tuple[ListedItem, ...]
    """Its items."""


NOTHING_BEFORE = StoredConversation([], ())


class StoredResponse(NamedTuple):
    """A response and the conversation up to its end, as JSON."""

    response: bytes
    turns: bytes
    inputs: tuple[ListedItem, ...]
    """The items that it was made from."""
    items: tuple[str, ...]
    """Ids of its output items."""

    @property
    def size(self) -> int:
        """Bytes that it takes in the store."""
        inputs = sum(len(item.fields) for item in self.inputs)
        # Bytes of the index per item.
        index = 300 * (len(self.items) + len(self.inputs))
        return len(self.response) + len(self.turns) + inputs + index


class _Output(msgspec.Struct):
    """The output of a response."""

    output: list[Json]


class OwnResponses:
    """The stored responses of one owner."""

    def __init__(self, store: "ResponseStore") -> None:
        self.max_bytes = store.max_bytes
        """Number of bytes that the responses of all owners may take together."""
        self.bytes = 0
        """Number of bytes in use."""
        self._store = store
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._holders: dict[str, str] = {}
        """Id of the response that each item belongs to, by item id."""

    def add(self, response: Json, turns: Sequence[Json], inputs: tuple[ListedItem, ...]) -> None:
        """Store a response and evict the oldest ones; one that does not fit is not stored.

        Args:
            response: the response, whole.
            turns: the messages up to its end.
            inputs: the items that it was made from.
        """
        encode = msgspec.json.encode
        items = tuple(item["id"] for item in response["output"])
        one = StoredResponse(encode(response), encode(turns), inputs, items)
        if one.size > self.max_bytes:
            return
        self._stored[response["id"]] = one
        self._holders |= dict.fromkeys(items, response["id"])
        self.bytes += one.size
        self._store.make_room()

    def response(self, id: str) -> bytes | None:
        """Return a stored response; None: there is none of this id."""
        one = self._stored.get(id)
        return None if one is None else one.response

    def inputs(self, id: str) -> list[ListedItem] | None:
        """Return the items that a response was made from, oldest first and each with an id of its
        own; None: there is no response of this id."""
        one = self._stored.get(id)
        if one is None:
            return None
        named: dict[str, ListedItem] = {}
        for place, item in enumerate(one.inputs):
            id = item.id
            while id in named:  # a client may send an item twice, and pages go on after an id
                id = f"{id}_{place}"
            named[id] = item._replace(id=id)
        return [*named.values()]

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

    def conversation(self, id: str) -> StoredConversation | None:
        """Return the conversation up to a response's end; None: there is none of this id."""
        one = self._stored.get(id)
        if one is None:
            return None
        self._stored.move_to_end(id)  # who goes on with it once may do so again
        output = msgspec.json.decode(one.response, type=_Output).output
        turns = msgspec.json.decode(one.turns, type=list[Json])
        return StoredConversation(turns, (*one.inputs, *map(ListedItem.of, output)))

    def remove(self, id: str) -> bool:
        """Delete a response; return whether it was stored."""
        one = self._stored.pop(id, None)
        if one is None:
            return False
        for item in one.items:
            del self._holders[item]
        self.bytes -= one.size
        return True

    def remove_oldest(self) -> None:
        """Delete the response that was stored or continued longest ago."""
        self.remove(next(iter(self._stored)))


class ResponseStore:
    """The latest responses, as many as fit into `max_bytes`.

    Args:
        max_bytes: number of bytes that they may take together; 0: none is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._owners: dict[int | None, OwnResponses] = {}

    def of(self, owner: int | None) -> OwnResponses:
        """Return the responses of an API key, which no other key can see.

        Args:
            owner: index of the key; None: the server has no keys, and all clients are one owner.
        """
        if owner not in self._owners:
            self._owners[owner] = OwnResponses(self)
        return self._owners[owner]

    @property
    def bytes(self) -> int:
        """Number of bytes in use."""
        return sum(own.bytes for own in self._owners.values())

    def make_room(self) -> None:
        """Evict responses of the owner who has most until all fit: who stores very many evicts only
        their own."""
        while self.bytes > self.max_bytes:
            max(self._owners.values(), key=lambda own: own.bytes).remove_oldest()
