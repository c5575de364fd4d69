"""Requests that change every replica: adapters are loaded and unloaded, prefix caches are emptied.

What is loaded is remembered, so that a replica that starts later, or was silent meanwhile, is told
before it gets requests.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import aiohttp
import msgspec

from twolane.fleet.hosts import ReplicaAddress

log = logging.getLogger("twolane.fleet")

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
EVERYWHERE = frozenset((LOAD, UNLOAD, "/reset_prefix_cache"))
"""Paths of these requests."""
LOST = 503
"""Status that stands for the answer of a replica that gave none."""


class Changed(Protocol):
    """A replica, as far as changes are concerned."""

    name: str
    place: ReplicaAddress | None
    adapters: dict[str, bytes]
    """Bodies of the requests that loaded its adapters, by their names."""


class Reply(msgspec.Struct, frozen=True):
    """What a replica answered."""

    name: str
    """Name of the replica."""
    status: int
    body: bytes = b""


class _Adapter(msgspec.Struct):
    lora_name: str = ""


class Changes:
    """Makes changes at all replicas, one after the other.

    Args:
        session: for requests to replicas.
        headers: with which a replica lets the fleet in.
    """

    def __init__(self, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._session = session
        self._headers = headers
        self._lock = asyncio.Lock()
        self.adapters: dict[str, bytes] = {}
        """The adapters that every replica is to have, as `Changed.adapters`."""

    async def make(
        self, members: Sequence[Changed], path: str, body: bytes, headers: Mapping[str, str]
    ) -> Sequence[Reply]:
        """Make a change at these replicas, which are all that take requests.

        An adapter that one of them cannot load is unloaded by the others. A replica that gave no
        answer has the status `LOST`; it has to be brought up to date before it gets requests.
        """
        async with self._lock:
            asked = [self._ask(member, path, body, headers) for member in members]
            replies = await asyncio.gather(*asked)
            loaded = [each for each in replies if each.status == 200]
            refused = [each for each in replies if each.status not in (200, LOST)]
            if path == LOAD and not refused:
                self.adapters |= {_name(body): body} if loaded else {}
            elif path == LOAD:
                names = {each.name for each in loaded}
                undone = [member for member in members if member.name in names]
                await asyncio.gather(*[self._unload(each, _name(body), headers) for each in undone])
            elif path == UNLOAD and loaded:
                self.adapters.pop(_name(body), None)
            return replies

    async def bring_up_to_date(self, member: Changed) -> None:
        """Have a replica load and unload what it has missed."""
        async with self._lock:
            old = [
                name for name, body in member.adapters.items() if self.adapters.get(name) != body
            ]
            for name in old:
                await self._unload(member, name, self._headers)
            for name, body in self.adapters.items():
                if name not in member.adapters:
                    reply = await self._ask(member, LOAD, body, self._headers)
                    if reply.status != 200:
                        said = reply.body.decode(errors="replace")
                        log.error("%s does not have adapter %r: %s", member.name, name, said)

    async def _unload(self, member: Changed, name: str, headers: Mapping[str, str]) -> None:
        body = msgspec.json.encode(_Adapter(name))
        await self._ask(member, UNLOAD, body, headers)
        member.adapters.pop(name, None)

    async def _ask(
        self, member: Changed, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Reply:
        assert member.place is not None
        headers = {"Content-Type": "application/json", **headers}
        try:
            async with self._session.post(
                member.place.url + path, data=body, headers=headers
            ) as answer:
                said = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            return Reply(member.name, LOST, str(error).encode())
        if answer.status == 200 and path == LOAD:
            member.adapters[_name(body)] = body
        elif path == UNLOAD and answer.status in (200, 404):
            member.adapters.pop(_name(body), None)
        return Reply(member.name, answer.status, said)


def _name(body: bytes) -> str:
    """Name of the adapter in a request that a replica has served."""
    return msgspec.json.decode(body, type=_Adapter).lora_name
