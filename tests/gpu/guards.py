"""What keeps the lanes apart, and how to take it away: the schedules must notice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from twolane.devices import LaneName
from twolane.engine.kv.manager import Allocation, KVCacheManager
from twolane.engine.launches import launch, reap
from twolane.lanes.base import Ticket
from twolane.lanes.cuda import lanes as lanes_module
from twolane.lanes.cuda.lanes import CudaLanes, CudaTicket
from twolane.lanes.cuda.runner import Queued
from twolane.lanes.cuda.slots import Slots
from twolane.lanes.work import Work


@dataclass(frozen=True)
class Guard:
    """One event, one deferral, or one piece of memory that is not shared."""

    rule: str
    remove: Callable[[CudaLanes], None]
    kernels: float = 0.02
    """Share of kernels that are delayed, to show that it is missing."""


def _forget_last(*names: str) -> Callable[[CudaLanes], None]:
    """Launches do not wait for the last one that used these."""

    def remove(lanes: CudaLanes) -> None:
        class Forgetful(dict[str, CudaTicket]):
            def __contains__(self, name: object) -> bool:
                return name not in names and super().__contains__(name)

        lanes._last = Forgetful()

    return remove


def _device_beside_the_lanes(lanes: CudaLanes) -> None:
    used = lanes_module.used_by

    def lonely(lane: LaneName, work: Work) -> Sequence[str]:
        return ("device",) if lane == "device" else used(lane, work)

    lanes_module.used_by = lonely


def _ignore_after(lanes: CudaLanes) -> None:
    before = lanes._predecessors
    lanes._predecessors = lambda used, stream, after: before(used, stream, ())


def _all_steps_first(lanes: CudaLanes) -> None:
    turn = lanes_module._turn
    lanes_module._turn = lambda lane, work, after: turn(lane, work, ())


def _keep_nothing(lanes: CudaLanes) -> None:
    prefill = lanes.runner._prefill
    lanes.runner._prefill = lambda work, place: Queued(prefill(work, place).steps)


def _share(what: str) -> Callable[[CudaLanes], None]:
    """Both lanes have the same."""

    def remove(lanes: CudaLanes) -> None:
        memory = lanes.runner._memory
        setattr(memory["decode"], what, getattr(memory["prefill"], what))

    return remove


def _read_at_once(lanes: CudaLanes) -> None:
    def follow(watcher: Any, watched: Any) -> None:
        ticket = watched.ticket
        ticket.start = watcher._clock.seen(_waited(watched.begun))
        for step in watched.queued.steps:
            ticket.add(step.collect(), ticket.start)
        ticket.end = max(watcher._clock.seen(_waited(ticket.ended)), ticket.start)

    lanes_module._Watcher._follow = follow


def _end_early(lanes: CudaLanes) -> None:
    def follow(watcher: Any, watched: Any) -> None:
        ticket = watched.ticket
        ticket.start = watcher._clock.seen(_waited(watched.begun))
        for step in watched.queued.steps:
            step.done.synchronize()
            ticket.add(step.collect(), ticket.start)
        ticket.end = ticket.start

    lanes_module._Watcher._follow = follow


def _note_at_once(lanes: CudaLanes) -> None:
    follow = lanes_module._Watcher._follow

    def hasty(watcher: Any, watched: Any) -> None:
        follow(watcher, replace(watched, after=()))

    lanes_module._Watcher._follow = hasty


def _waited(event: torch.cuda.Event) -> torch.cuda.Event:
    event.synchronize()
    return event


def _free_at_once(lanes: CudaLanes) -> None:
    free = KVCacheManager._free_if_idle

    def early(books: KVCacheManager, allocation: Allocation) -> None:
        allocation.in_flight, in_flight = 0, allocation.in_flight
        if allocation.given_up and allocation in books._allocations:
            free(books, allocation)
        allocation.in_flight = in_flight

    KVCacheManager._free_if_idle = early


def _deliver_anything(lanes: CudaLanes) -> None:
    reap._expected = lambda request, allocation: request.phase is not request.phase.FINISHED


def _forget_other_lanes(lanes: CudaLanes) -> None:
    def nothing(lane: LaneName, allocations: Any) -> list[Ticket]:
        return []

    launch._tickets_elsewhere = nothing


def _upload_elsewhere(lanes: CudaLanes) -> None:
    upload, side = Slots.upload, torch.cuda.Stream()

    def astray(known: Slots, slots: Any) -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            upload(known, slots)

    Slots.upload = astray


GUARDS: dict[str, Guard] = {
    "lane-order": Guard(
        "launches of a lane run in order, whatever their levels",
        _forget_last("prefill", "decode"),
    ),
    "steps": Guard("the decode steps' buffers belong to one launch", _forget_last("steps")),
    "device": Guard("the whole device excludes both lanes", _device_beside_the_lanes),
    "after": Guard("a launch waits, on the device, for what it is told to", _ignore_after),
    "turns": Guard("a step is launched behind what it waits for", _all_steps_first),
    "elsewhere": Guard("it is told of launches in other lanes", _forget_other_lanes),
    "kept": Guard("what a slice reads is held until it has ended", _keep_nothing),
    "activations": Guard("lanes share no activations", _share("activations"), 0.05),
    "sampler": Guard("lanes share no sampler", _share("sampler"), 0.1),
    "arrived": Guard("tokens are read when they have arrived", _read_at_once),
    "noted": Guard("a launch is seen after those that it waited for", _note_at_once),
    "ended": Guard("a launch has ended when its event has passed", _end_early),
    "freed": Guard("pages return when the last launch that names them ended", _free_at_once),
    "expected": Guard("results nobody waits for are dropped", _deliver_anything),
    "uploads": Guard("what changed is uploaded in the launch's stream", _upload_elsewhere),
}
