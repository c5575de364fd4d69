"""The lanes of one GPU: streams chained by events, a launching thread, a watcher for each lane."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from queue import SimpleQueue

import torch

from twolane.devices import LANES, LaneName
from twolane.lanes.base import LaunchLog, OpenTickets, Ticket
from twolane.lanes.cuda.device_clock import DeviceClock, new_event
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.lanes.cuda.launch_thread import IdleWork, Launcher, Turn
from twolane.lanes.cuda.runner import CudaRunner, End, Queued
from twolane.lanes.work import (
    DropRecord,
    FillRecord,
    LaunchRecord,
    PieceRecord,
    PrefillWork,
    Record,
    TokenMask,
    Work,
    used_by,
)

PIECE_LAYERS = 4
"""Number of layers of a slice between two places where steps may pass, with several ranks."""


@dataclass(slots=True, eq=False)
class CudaTicket(Ticket):
    """A launch on a stream."""

    ended: torch.cuda.Event = field(default_factory=lambda: new_event(timing=True))
    """Event recorded after the launch."""
    stream: torch.cuda.Stream | None = None
    noted: threading.Event = field(default_factory=threading.Event)
    """Set when `end` is set."""

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.error, self.end = error, time.monotonic()
        self.noted.set()


@dataclass(frozen=True, slots=True)
class HalfLaunch:
    """A launch whose second half, from sampling on, waits for masks."""

    ticket: CudaTicket
    names: frozenset[str]
    begun: torch.cuda.Event
    end: End
    after: Sequence[CudaTicket]


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A launch or a drop that may have to wait until earlier launches have their masks."""

    names: frozenset[str]
    """Names that it uses (`used_by`), and its batch's."""
    run: Callable[[], None]
    ticket: CudaTicket | None = None
    after: Sequence[CudaTicket] = ()

    def follows(self, other: "HalfLaunch | _Deferred") -> bool:
        """Return whether it must come after `other`, which was called earlier."""
        return not self.names.isdisjoint(other.names) or other.ticket in self.after


@dataclass(frozen=True, slots=True)
class WatchedLaunch:
    """A queued launch that a watcher waits for."""

    ticket: CudaTicket
    begun: torch.cuda.Event
    queued: Queued
    after: Sequence[CudaTicket]
    """Tickets that it waits for on the device. The watcher reports nothing of it before their end
    is noted, because they may have earlier tokens of its requests, which another thread reports."""


class CudaLanes:
    """Green-context lanes over one model.

    Launches of a lane run in order, whatever their levels: each waits, on the device, for the one
    before it. One thread launches (`launch_thread.py`): that takes milliseconds, in which the
    engine delivers tokens.

    Args:
        runner: queues the work.
        partitions: the levels and their streams.
        launcher: Launcher on the thread that captured the runner's graphs.
        notify: called from a lane's thread whenever a ticket has results.
        log: The launch log that the other ranks replay; None: there is one rank.
    """

    def __init__(
        self,
        runner: CudaRunner,
        partitions: GreenContexts,
        launcher: Launcher,
        notify: Callable[[], None],
        log: LaunchLog | None = None,
    ) -> None:
        self.runner = runner
        self._partitions, self._launcher, self._notify = partitions, launcher, notify
        self._launch_log = log
        if log is not None:
            log.watch(self)
        self._spent = 0.0
        """Seconds of the host in all launches so far."""
        self._last: dict[str, CudaTicket] = {}
        """The last launch that used each name of `used_by`."""
        self._open: OpenTickets[CudaTicket] = OpenTickets()
        self._halves: dict[int, HalfLaunch] = {}
        """Launches whose second half waits for masks, by number."""
        self._masks: dict[int, Sequence[TokenMask]] = {}
        """Masks that were set before their launch was queued, by number."""
        self._deferred: list[_Deferred] = []
        """Launches and drops that must come after `_halves`, in the order of the calls."""
        self._watchers = {lane: _Watcher(lane, partitions.device, notify) for lane in LANES}
        self.units = partitions.units
        self.levels: Sequence[tuple[int, int]] = partitions.offered

    clock = staticmethod(time.monotonic)

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """See `Lanes.launch`."""
        before = self._open.pending(after)
        ticket = self._open.add(CudaTicket(lane, units))
        record = LaunchRecord(lane, units, work, tuple(after), ticket.number)
        launch = partial(self._launch, ticket, record, before)
        self._launcher.submit(launch, _turn(lane, work, before))
        return ticket

    def set_masks(self, number: int, masks: Sequence[TokenMask]) -> None:
        """See `Lanes.set_masks`; the other ranks do not sample."""
        self._launcher.submit(partial(self._set_masks, number, masks), "step")

    def do_when_idle(self, pieces: Iterator[Callable[[], None]]) -> None:
        """Run these pieces one after the other on the launching thread, each while no launch is
        under way: one that comes meanwhile waits for the end of a piece."""
        if first := next(pieces, None):
            work = IdleWork(self._launcher, self._open.waiting, chain([first], pieces))
            threading.Thread(target=work.run, name="idle", daemon=True).start()

    def rest(self, seconds: float) -> None:
        """See `MachineLanes.rest`."""
        time.sleep(seconds)

    def fill_kv(self) -> None:
        """See `MachineLanes.fill_kv`."""
        self._log(FillRecord())
        self.runner.kv.fill()

    def drop(self, batch: int) -> None:
        """See `Lanes.drop`; launches that are queued on the device hold what they read."""
        self._launcher.submit(partial(self._drop, batch), "slice")

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """See `Lanes.load_adapter`; all ranks have read it when this returns."""
        torch.cuda.set_device(self._partitions.device)
        self.runner.load_adapter(slot, path, digest)
        if self._launch_log is not None:
            self._launch_log.load_adapter(slot, path, digest)

    def drop_adapter(self, slot: int) -> None:
        """See `Lanes.drop_adapter`: it stays until another comes."""

    def silences(self) -> Sequence[float]:
        """See `Lanes.silences`."""
        return () if self._launch_log is None else self._launch_log.silences

    def check(self) -> None:
        """See `Lanes.check`."""
        if self._launch_log is not None:
            self._launch_log.check()

    def waiting(self) -> Sequence[Ticket]:
        """See `OpenLaunches.waiting`."""
        return self._open.waiting()

    def synchronize(self) -> None:
        """Wait until the device has finished all launches."""
        self.idle().result()

    def idle(self) -> "Future[None]":
        """Return a future that is done when the device has finished all launches."""
        return self._launcher.thread.submit(torch.cuda.synchronize)

    def _launch(
        self, ticket: CudaTicket, record: LaunchRecord, after: Sequence[CudaTicket]
    ) -> None:
        queue = partial(self._queue, ticket, record, after)
        names = _names(record.lane, record.work)
        self._run_or_defer(_Deferred(names, partial(self._timed, ticket, queue), ticket, after))
        self._end_ready()

    def _run_or_defer(self, asked: _Deferred) -> None:
        """Run a launch or a drop, or defer it if it must come after a launch that waits for masks.

        Such a launch has not recorded the event that others wait for on the device.
        """
        earlier: list[HalfLaunch | _Deferred] = [*self._halves.values(), *self._deferred]
        if any(asked.follows(other) for other in earlier):
            self._deferred.append(asked)
        else:
            asked.run()

    def _set_masks(self, number: int, masks: Sequence[TokenMask]) -> None:
        self._masks[number] = masks
        self._end_ready()

    def _end_ready(self) -> None:
        """Queue the second halves of launches whose masks are set, and what was deferred for
        them."""
        while ready := self._ready():
            for number in ready:
                half, masks = self._halves.pop(number), self._masks.pop(number)
                self._timed(half.ticket, partial(self._end, half, masks))
            waiting, self._deferred = self._deferred, []
            for asked in waiting:
                self._run_or_defer(asked)

    def _ready(self) -> Collection[int]:
        """Return the numbers of launches whose masks are set."""
        return self._halves.keys() & self._masks.keys()

    def _timed(self, ticket: CudaTicket, queue: Callable[[], WatchedLaunch | None]) -> None:
        """Queue a launch or its second half, note the host's seconds, and watch it once it is
        whole."""
        asked, spent = self.clock(), self._spent
        try:
            watched = queue()
        except BaseException as error:  # the engine raises it on its own thread
            ticket.fail(error)
            self._notify()
            return
        ticket.queued_at = self.clock()
        took = ticket.queued_at - asked - (self._spent - spent)
        ticket.host_seconds += took
        self._spent += took
        if watched is not None:
            self._watchers[ticket.lane].queue.put(watched)

    def _end(self, half: HalfLaunch, masks: Sequence[TokenMask]) -> WatchedLaunch:
        ticket, stream = half.ticket, half.ticket.stream
        self.runner.constrain(masks)
        with torch.cuda.stream(stream), torch.inference_mode():
            queued = Queued(half.end())
            ticket.ended.record(stream)
        return WatchedLaunch(ticket, half.begun, queued, half.after)

    def _queue(
        self, ticket: CudaTicket, record: LaunchRecord, after: Sequence[CudaTicket]
    ) -> WatchedLaunch | None:
        """Queue a launch; return None if its second half waits for masks."""
        work = record.work
        ticket.stream = stream = self._partitions.stream(ticket.lane, ticket.units)
        with torch.cuda.stream(stream), torch.inference_mode():
            used = used_by(ticket.lane, work)
            before = self._predecessors(used, stream, after)
            for other in before:
                stream.wait_event(other.ended)
            begun = new_event(timing=True)
            begun.record(stream)
            between = self._between_layers() if is_slice(ticket.lane, work) else None
            self._log(record)
            queued = self.runner.run(work, ticket.lane, ticket.units, between)
            if queued.end is not None:
                self._halves[ticket.number] = HalfLaunch(
                    ticket, _names(ticket.lane, work), begun, queued.end, before
                )
            else:
                ticket.ended.record(stream)
        self._last.update(dict.fromkeys(used, ticket))
        return None if queued.end is not None else WatchedLaunch(ticket, begun, queued, before)

    def _drop(self, batch: int) -> None:
        self._run_or_defer(_Deferred(frozenset((_name(batch),)), partial(self._drop_now, batch)))

    def _drop_now(self, batch: int) -> None:
        self._log(DropRecord(batch))
        self.runner.drop(batch)

    def _log(self, record: Record) -> None:
        """Log a record for the other ranks."""
        if self._launch_log is not None:
            self._launch_log.log(record)

    def _between_layers(self) -> Callable[[], None]:
        """Return what a slice calls before each of its layers, to let decode steps pass.

        With other ranks, steps pass between pieces of some layers, and each piece is logged after
        them.
        """
        if self._launch_log is None:
            return self._launcher.between
        calls = count()

        def between() -> None:
            if next(calls) % PIECE_LAYERS == 0:
                self._launcher.between()
                self._log(PieceRecord(PIECE_LAYERS))

        return between

    def close(self, timeout: float = 1.0) -> None:
        """End the threads after what is queued, and the other ranks; wait for each for `timeout`
        seconds at most."""
        self._launcher.thread.shutdown()
        for watcher in self._watchers.values():
            watcher.queue.put(None)
        for watcher in self._watchers.values():
            watcher.thread.join(timeout)
        if self._launch_log is not None:
            self._launch_log.close(timeout)

    def _predecessors(
        self, used: Sequence[str], stream: torch.cuda.Stream, after: Sequence[CudaTicket]
    ) -> list[CudaTicket]:
        """Return the tickets that must end first and that the stream itself does not order."""
        last = [self._last[name] for name in used if name in self._last]
        return [t for t in (*last, *after) if not t.done and t.stream is not stream]


def _names(lane: LaneName, work: Work) -> frozenset[str]:
    """Return what a launch uses, and its batch."""
    batch = (_name(work.batch),) if isinstance(work, PrefillWork) else ()
    return frozenset((*used_by(lane, work), *batch))


def _name(batch: int) -> str:
    return f"batch {batch}"


def is_slice(lane: LaneName, work: Work) -> bool:
    """Return whether a launch is a prefill slice beside the decode lane."""
    return used_by(lane, work) == ("prefill",)


def _turn(lane: LaneName, work: Work, after: Sequence[Ticket]) -> Turn:
    """Return the place of a launch; one that waits on the device for another must come after it."""
    if is_slice(lane, work):
        return "slice"
    return "step" if lane == "decode" and all(other.queued_at for other in after) else "in order"


class _Watcher:
    """A thread that waits for a lane's events in order and fills in its tickets.

    It spins in the driver, without Python's lock, for as long as its lane has work: a thread put
    to sleep would see the end of a step a quarter of a millisecond late.
    """

    def __init__(self, lane: LaneName, device: int, notify: Callable[[], None]) -> None:
        self.queue: SimpleQueue[WatchedLaunch | None] = SimpleQueue()
        self._device = device
        self._notify = notify
        self._clock = DeviceClock()
        self.thread = threading.Thread(target=self._watch, name=f"watch-{lane}", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        torch.cuda.set_device(self._device)
        while (watched := self.queue.get()) is not None:
            ticket = watched.ticket
            try:
                self._follow(watched)
            except BaseException as error:  # the engine raises it on its own thread
                ticket.fail(error)
            else:
                ticket.noted.set()
            del watched, ticket  # what the launch kept is free now, not when the next one comes
            self._notify()

    def _follow(self, watched: WatchedLaunch) -> None:
        ticket = watched.ticket
        for other in watched.after:
            other.noted.wait()
        watched.begun.synchronize()
        ticket.start = self._clock.seen(watched.begun)
        for step in watched.queued.steps:
            step.done.synchronize()
            at = self._clock.seen(step.done)
            ticket.add(step.collect(), at)
            self._notify()
        ticket.ended.synchronize()
        ticket.start, ticket.end = self._clock.both(watched.begun, ticket.ended)
