"""The replicas of a fleet: started, polled, replaced, drained and scaled."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from twolane.common.checked_json import UNREADABLE
from twolane.fleet.broadcast import Broadcast
from twolane.fleet.hosts import Hosts, ReplicaAddress
from twolane.fleet.options import FleetOptions
from twolane.fleet.process import StartError
from twolane.fleet.scale import Trend, wanted
from twolane.router.state import ReplicaState, read_state
from twolane.router.table import Table
from twolane.server.http.gate import OPERATOR_HEADER

log = logging.getLogger("twolane.fleet")

END_SECONDS = 10.0
"""Seconds that a replica may take to end, besides those for its open answers."""
RETRY_SECONDS = 5.0
"""Seconds before a failed start is tried again."""
Phase = Literal["starting", "serving", "out", "draining"]


@dataclass(eq=False)
class Member:
    """A replica of the pool."""

    name: str
    address: ReplicaAddress | None = None
    phase: Phase = "starting"
    """Phase of its life; a replica that is `out` does not report its state and gets no requests."""
    reported_at: float = 0.0
    """Time of its latest reported state, on the pool's clock."""
    version: int = -1
    """Version of the replica's digest that the table has, or -1 without one."""
    state: ReplicaState = field(default_factory=lambda: ReplicaState(ready=False))
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the replica counts as lost, which ends its open answers."""
    open: int = 0
    """Number of requests that the ingress sent and that have not ended."""
    served: int = 0
    """Number of requests that the ingress sent."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request is open."""
    adapters: dict[str, bytes] = field(default_factory=dict)
    """Bodies of the requests that loaded its adapters, by adapter name."""
    stopped: bool = False
    """Whether it was told to end, so that its silence is no failure."""

    @property
    def url(self) -> str:
        """URL of a replica that has started."""
        assert self.address is not None
        return self.address.url

    def enter(self) -> None:
        """Count a request that is sent to the replica."""
        self.open += 1
        self.served += 1
        self.idle.clear()

    def leave(self) -> None:
        """Count the end of a request."""
        self.open -= 1
        if not self.open:
            self.idle.set()


class Pool:
    """Keeps the wanted number of replicas running and the router's table up to date.

    Args:
        hosts: The hosts that run the replicas.
        options: Options of the fleet.
        session: HTTP client for requests to replicas.
        keys: API keys that the replicas accept; none: they want none.
        operator_key: Key of the operator, which the replicas have, too.
        refuse_late: Whether requests are refused that no replica can answer in time.
    """

    def __init__(
        self,
        hosts: Hosts,
        options: FleetOptions,
        session: aiohttp.ClientSession,
        keys: Sequence[str] = (),
        *,
        operator_key: str,
        refuse_late: bool = True,
    ) -> None:
        self.options = options
        self.members: dict[str, Member] = {}
        self.table = Table(refuse_late=refuse_late)
        self.clock = time.monotonic
        self._hosts = hosts
        self._session = session
        self.keys = keys
        self.operator = {OPERATOR_HEADER: operator_key}
        """Headers with which a replica does what the operator asks."""
        self.broadcast = Broadcast(session, self.operator, lambda: self.serving)
        self._serial = 0
        self._target = options.replicas
        self._successors = 0
        """Number of starting replicas whose predecessor still serves."""
        self._trend = Trend()
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        """Whether all replicas are being stopped."""
        self.started = asyncio.Event()
        """Set when the first replica serves."""
        self.failure: str | None = None
        """Why the first start failed."""

    @property
    def serving(self) -> list[Member]:
        """The replicas that take requests."""
        return [each for each in self.members.values() if each.phase == "serving"]

    @property
    def present(self) -> list[Member]:
        """The replicas that are not being stopped."""
        return [each for each in self.members.values() if each.phase != "draining"]

    async def run(self) -> None:
        """Start the replicas, then scale until the pool closes."""
        for _ in range(self._target):
            self._start()
        while not self.closing:
            await asyncio.sleep(self.options.probe_seconds)
            self._scale()

    async def close(self) -> None:
        """Stop all replicas; open answers have `drain_seconds` to end."""
        self.closing = True
        await asyncio.gather(*(self._end(each) for each in list(self.members.values())))
        for task in self._tasks:
            task.cancel()
        await self._hosts.close()

    async def restart(self) -> bool:
        """Replace all replicas one by one; each is stopped when its successor serves.

        A successor that cannot start ends it: whether all were replaced.
        """
        for old in self.present:
            if old.name not in self.members or old.phase == "draining":
                continue
            self._successors += 1
            try:
                new = self._start()
                while new.phase == "starting" and new.name in self.members:
                    await asyncio.sleep(self.options.probe_seconds)
                if new.name not in self.members:
                    return False
                old.phase = "draining"
            finally:
                self._successors -= 1
            await self._end(old)
        return True

    def _start(self) -> Member:
        self._serial += 1
        member = Member(f"replica-{self._serial}")
        member.idle.set()
        self.members[member.name] = member
        self._spawn(self._bring_up(member))
        return member

    async def _bring_up(self, member: Member) -> None:
        try:
            member.address = await self._hosts.start(member.name)
        except (StartError, OSError) as error:  # such as no memory for one more process
            if self.closing:
                return
            log.error("%s: %s", member.name, error)
            self.failure = str(error)
            await asyncio.sleep(RETRY_SECONDS if self.started.is_set() else 0.0)
            self.members.pop(member.name, None)
            self.started.set()
            return
        log.info("%s serves at %s (process %d)", member.name, *member.address)
        member.reported_at = self.clock()
        await self._watch(member)

    async def _watch(self, member: Member) -> None:
        """Poll a replica's state until it is removed."""
        while member.name in self.members and not self.closing:
            asked_at = self.clock()
            answer = await self._ask(member)
            if member.stopped or member.name not in self.members:
                return
            if answer is not None:
                if member.phase in ("starting", "out"):
                    member.lost.clear()
                    await self.broadcast.bring_up_to_date(member)
                self._reported(member, answer, asked_at)
            elif await self._missed_report(member):
                return
            await asyncio.sleep(self.options.probe_seconds)

    async def _ask(self, member: Member) -> ReplicaState | None:
        try:
            async with (
                asyncio.timeout(self.options.probe_timeout),
                self._session.get(
                    f"{member.url}/fleet/state?known={member.version}", headers=self.operator
                ) as answer,
            ):
                if answer.status != 200:
                    return None
                return read_state(await answer.read())
        except (aiohttp.ClientError, OSError, *UNREADABLE):
            return None

    def _reported(self, member: Member, state: ReplicaState, asked_at: float) -> None:
        member.reported_at, member.state = asked_at, state
        if state.digest is not None:
            member.version = state.digest.version
        if member.phase in ("starting", "out"):
            log.info("%s accepts requests", member.name)
            member.phase = "serving"
            self.started.set()
        if member.phase == "serving":
            self.table.publish(member.name, state, asked_at)

    async def _missed_report(self, member: Member) -> bool:
        """Handle a missed report: send the replica nothing; return whether it has been given up."""
        silent = self.clock() - member.reported_at
        if member.phase == "serving":
            log.warning("%s does not report its state and gets no requests", member.name)
        self.exclude(member)
        alive = await self._hosts.alive(member.name)
        if alive and silent < self.options.silent_seconds:
            return False
        member.lost.set()
        if alive and silent < self.options.replace_seconds:
            return False
        problem = f"has not reported its state for {silent:.0f} s" if alive else "has died"
        log.error("%s %s", member.name, problem)
        self.members.pop(member.name, None)
        await self._hosts.stop(member.name, 0.0)
        return True

    def exclude(self, member: Member) -> None:
        """Send a replica nothing until it reports its state again and has all changes."""
        if member.phase == "serving":
            member.phase, member.version = "out", -1
        self.table.remove(member.name)

    def _scale(self) -> None:
        """Start missing replicas, and drain one that is superfluous."""
        states = [each.state for each in self.serving]
        present = len(self.present) - self._successors
        if present >= self._target:
            self._target, self._trend = wanted(
                states, present, self.clock(), self._trend, self.options
            )
        for _ in range(self._target - present):
            self._start()
        if present > self._target and (serving := self.serving):
            log.info("scaling down from %d replicas to %d", present, self._target)
            least = min(serving, key=lambda each: (each.open, -int(each.name.split("-")[1])))
            least.phase = "draining"
            self._spawn(self._end(least))

    async def _end(self, member: Member) -> None:
        """Drain a replica and stop it."""
        member.phase = "draining"
        self.table.remove(member.name)
        try:
            async with asyncio.timeout(self.options.drain_seconds):
                await member.idle.wait()
        except TimeoutError:
            log.warning("%s is stopped with %d open requests", member.name, member.open)
        member.stopped = True
        await self._hosts.stop(member.name, self.options.drain_seconds + END_SECONDS)
        member.lost.set()
        self.members.pop(member.name, None)
        log.info("%s has been stopped", member.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("watching a replica failed", exc_info=error)
