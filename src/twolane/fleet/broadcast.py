"""Requests that are broadcast to every replica: loading and unloading adapters, emptying prefix
caches.

What is loaded is remembered, so that a replica that starts later, or was silent meanwhile, is told
before it gets requests.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import msgspec

from twolane.common.checked_json import UNREADABLE
from twolane.fleet.lost import ReplicaLost, unless_lost

log = logging.getLogger("twolane.fleet")

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BROADCAST_PATHS = frozenset((LOAD, UNLOAD, "/reset_prefix_cache"))
"""Paths of requests that are broadcast."""
LOST = 503
"""Status that stands for a missing answer of a replica."""
LOCKED_SECONDS = 300.0
"""Seconds within which a replica must have made a change that blocks other changes; else it counts
as lost."""


class Changed(Protocol):
    """The part of a replica that `Broadcast` uses."""

    name: str
    adapters: dict[str, bytes]
    """Bodies of the requests that loaded its adapters, by adapter name."""
    lost: asyncio.Event
    """Set when the replica is lost."""

    @property
    def url(self) -> str:
        """URL of the replica."""


class Reply(msgspec.Struct, frozen=True):
    """A replica's answer to a change."""

    status: int
    body: bytes = b""


class _Adapter(msgspec.Struct):
    lora_name: str = ""


@dataclass(eq=False)
class Broadcast:
    """Makes changes at all replicas, one change after the other."""

    session: aiohttp.ClientSession
    """HTTP client for requests to replicas."""
    headers: Mapping[str, str]
    """Headers that authorise the fleet at a replica."""
    members: Callable[[], Sequence[Changed]]
    """Returns the replicas that take requests."""

    def __post_init__(self) -> None:
        self._lock = asyncio.Lock()
        self.adapters: dict[str, bytes] = {}
        """Adapters that every replica should have, as in `Changed.adapters`."""

    async def make(self, path: str, body: bytes, headers: Mapping[str, str]) -> Mapping[str, Reply]:
        """Make a change at all serving replicas; return their answers by replica name.

        An adapter that one of them cannot load is unloaded by the others. A replica that gave no
        answer has the status `LOST`; it has to be brought up to date before it gets requests.
        """
        if path == UNLOAD:
            return await self._unload_all(body, headers)
        if path != LOAD:
            return await self._ask_all(self.members(), path, body, headers, None)
        async with self._lock:  # whoever is brought up to date meanwhile is a member behind it
            members = self.members()
            replies = await self._ask_all(members, path, body, headers, LOCKED_SECONDS)
            loaded = [each for each in members if replies[each.name].status == 200]
            if any(each.status not in (200, LOST) for each in replies.values()):
                await asyncio.gather(*[self._unload(each, _name(body), headers) for each in loaded])
            elif loaded:
                self.adapters[_name(body)] = body
            return replies

    async def _unload_all(self, body: bytes, headers: Mapping[str, str]) -> Mapping[str, Reply]:
        """Unload without waiting for other changes: replicas answer when the last request with the
        adapter ends."""
        name = _name(body)
        loaded = self.adapters.pop(name, None)
        replies = await self._ask_all(self.members(), UNLOAD, body, headers, None)
        if loaded is not None and not any(each.status == 200 for each in replies.values()):
            self.adapters.setdefault(name, loaded)
        return replies

    async def _ask_all(
        self,
        members: Sequence[Changed],
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        within: float | None,
    ) -> Mapping[str, Reply]:
        asking = [self._ask(each, path, body, headers, within) for each in members]
        replies = await asyncio.gather(*asking)
        return dict(zip([each.name for each in members], replies, strict=True))

    async def bring_up_to_date(self, member: Changed) -> None:
        """Load and unload adapters at a replica until it has all changes, including those made
        meanwhile."""
        async with self._lock:
            refused: set[str] = set()
            while (missed := self._missed(member, refused)) is not None:
                if missed in member.adapters:
                    await self._unload(member, missed, self.headers)
                    continue
                reply = await self._ask(
                    member, LOAD, self.adapters[missed], self.headers, LOCKED_SECONDS
                )
                if reply.status != 200:
                    refused.add(missed)
                    problem = reply.body.decode(errors="replace")
                    log.error("%s could not load adapter %r: %s", member.name, missed, problem)

    def _missed(self, member: Changed, refused: Container[str]) -> str | None:
        """Return the name of an adapter that a replica must unload, if it has it, or else load;
        None: none."""
        for name, body in member.adapters.items():
            if self.adapters.get(name) != body:
                return name
        return next(
            (name for name in self.adapters if name not in member.adapters and name not in refused),
            None,
        )

    async def _unload(self, member: Changed, name: str, headers: Mapping[str, str]) -> None:
        body = msgspec.json.encode(_Adapter(name))
        await self._ask(member, UNLOAD, body, headers, LOCKED_SECONDS)
        member.adapters.pop(name, None)

    async def _ask(
        self,
        member: Changed,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        within: float | None,
    ) -> Reply:
        headers = {"Content-Type": "application/json", **headers}
        posted = self._post(member.url + path, body, headers)
        try:
            async with asyncio.timeout(within):
                reply = await unless_lost(member.lost, posted)
        except (ReplicaLost, TimeoutError) as error:
            return Reply(LOST, str(error).encode())
        if reply.status == 200 and path == LOAD:
            member.adapters[_name(body)] = body
        elif path == UNLOAD and reply.status in (200, 404):
            member.adapters.pop(_name(body), None)
        return reply

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        async with self.session.post(url, data=body, headers=headers) as answer:
            return Reply(answer.status, await answer.read())


def _name(body: bytes) -> str:
    """Return the adapter's name in a request's body; empty: the body is invalid, and replicas
    refuse it."""
    with suppress(*UNREADABLE):
        return msgspec.json.decode(body, type=_Adapter).lora_name
    return ""
