"""Masks that follow a launch: nothing is sampled before, and what comes behind it stays there."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from tests.engine.world import make_runner
from tests.kernels.emulated import Event, Partitions, _on
from tests.lanes.scripted import PATIENCE
from twolane.devices import LANES
from twolane.lanes.base import Ticket
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cuda import device_clock
from twolane.lanes.cuda import lanes as cuda_lanes
from twolane.lanes.cuda.launch_thread import Launcher
from twolane.lanes.cuda.runner import Queued
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Sampling,
    SlotUpdate,
    TokenMask,
    Work,
    decode,
    encode,
    pack,
    used_by,
)
from twolane.lanes.work import LaunchRecord as Launched
from twolane.sampling import SamplingParams

PROMPT = (5, 6, 7)


def only(slot: int, token: int) -> TokenMask:
    """A mask that leaves one token."""
    return TokenMask(slot, (1 << token).to_bytes(64, "little"))


def slot_of(slot: int) -> SlotUpdate:
    sampling = Sampling(SamplingParams(temperature=0.0), 0, len(PROMPT), ())
    return SlotUpdate(slot, 0, (2 * slot, 2 * slot + 1), sampling)


def works(layers: int) -> list[Work]:
    """A prompt, a step of it, and a pass of a step and another prompt: each waits for a mask."""
    chunk = PromptChunk(pack(PROMPT))
    rows = [PromptRow(slot, 0, len(PROMPT), samples=True) for slot in (0, 1)]
    return [
        PrefillWork(0, (rows[0],), 0, layers, True, (chunk,), (slot_of(0),), late=(0,)),
        DecodeWork((DecodeRow(0, 3, 1),), 1, late=(0,)),
        HybridWork((DecodeRow(0, 4, 1),), (rows[1],), (chunk,), (slot_of(1),), late=(0, 1)),
    ]


def test_on_a_cpu_the_sampler_waits_for_the_masks() -> None:
    runner, news = make_runner(pages=8, slots=2), threading.Condition()
    before = set(threading.enumerate())

    def notify() -> None:
        with news:
            news.notify_all()

    lanes = CpuLanes(runner, (0,), notify)

    def run(work: Work, masks: Sequence[TokenMask]) -> list[int]:
        sent = decode(encode(Launched("device", 1, work)))
        assert isinstance(sent, Launched)
        ticket = lanes.launch("device", 1, sent.work, ())
        assert not ticket.done and not ticket.steps
        lanes.set_masks(ticket.number, masks)
        with news:
            assert news.wait_for(lambda: ticket.done, PATIENCE)
        ticket.check()
        return [sampled.token for sampled in ticket.steps[0].sampled]

    prompt, step, both = works(runner._decoder.spec.layers)
    assert run(prompt, [only(0, 11)]) == [11]
    assert run(step, [only(0, 12)]) == [12]
    assert run(both, [only(1, 14), only(0, 13)]) == [13, 14]
    again = DecodeWork((DecodeRow(0, 5, 1), DecodeRow(1, 3, 1)), 1, late=(0, 1))
    assert run(again, [only(1, 15)])[1] == 15  # the other's request has left: no mask comes
    free = DecodeWork((DecodeRow(0, 6, 1),), 1)
    last = lanes.launch("device", 1, free, ())
    with news:
        assert news.wait_for(lambda: last.done, PATIENCE)
    assert last.steps[0].sampled
    lanes.launch("device", 1, DecodeWork((DecodeRow(0, 7, 1),), 1, late=(0,)), ())
    lanes.close(PATIENCE)  # masks that nobody will tell any more hold up no thread
    assert not set(threading.enumerate()) - before


class Halves:
    """A runner that notes which launches begin and end, in order."""

    def __init__(self) -> None:
        self.order: list[tuple[str, Work | int]] = []
        self.masks: dict[int, bytes] = {}

    def constrain(self, masks: Sequence[TokenMask]) -> None:
        self.masks.update((mask.slot, mask.allowed) for mask in masks)

    def run(self, work: Work, *_: object) -> Queued:
        self.order.append(("begin", work))

        def end() -> tuple[()]:
            assert set(work.late) <= self.masks.keys()
            for slot in work.late:
                del self.masks[slot]
            self.order.append(("end", work))
            return ()

        return Queued((), end=end) if work.late else Queued(end())

    def drop(self, batch: int) -> None:
        self.order.append(("end", batch))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def event(*, timing: bool = False) -> Event:
        return Event()

    monkeypatch.setattr(cuda_lanes, "new_event", event)
    monkeypatch.setattr(device_clock, "new_event", event)
    monkeypatch.setattr(torch.cuda, "stream", _on)
    monkeypatch.setattr(torch.cuda, "set_device", lambda *_: None)
    yield


def some_work(chance: random.Random, number: int) -> tuple[Any, Work]:
    lane, late = chance.choice(LANES), (number,) if chance.random() < 0.5 else ()
    kind = chance.randrange(4)
    if kind == 0:
        return lane, HybridWork((), (), late=late)
    if kind == 1 or lane == "decode":
        return lane, DecodeWork((), 1, late=late)
    return lane, PrefillWork(number, (), 0, 1, True, late=late)


@pytest.mark.parametrize("seed", range(20))
def test_on_a_gpu_launches_that_exclude_each_other_keep_their_order(cuda: None, seed: int) -> None:
    """Masks come in any order, also for launches that have not begun."""
    chance, runner = random.Random(seed), Halves()
    with ThreadPoolExecutor(1) as thread:
        launcher = Launcher(thread)
        make = cast("Callable[..., cuda_lanes.CudaLanes]", cuda_lanes.CudaLanes)
        lanes = make(runner, Partitions(), launcher, lambda: None)
        asked: list[tuple[Any, Work, Ticket]] = []
        waiting: list[tuple[Ticket, Work]] = []
        for number in range(30):
            lane, work = some_work(chance, number)
            units = 3 if lane == "device" else chance.choice((1, 3))
            after = [t.number for _, _, t in asked if chance.random() < 0.1]
            ticket = lanes.launch(lane, units, work, after)
            asked.append((lane, work, ticket))
            if isinstance(work, PrefillWork) and chance.random() < 0.3:
                lanes.drop(work.batch)
            waiting += [(ticket, work)] if work.late else []
            if waiting and chance.random() < 0.4:
                allow(lanes, *waiting.pop(chance.randrange(len(waiting))))
        while waiting:
            allow(lanes, *waiting.pop(chance.randrange(len(waiting))))
        thread.submit(lambda: None).result()
        lanes.close(PATIENCE)
    check(runner.order, asked)


def allow(lanes: Any, ticket: Ticket, work: Work) -> None:
    lanes.set_masks(ticket.number, [TokenMask(slot, b"") for slot in work.late])


def check(order: list[tuple[str, Any]], asked: list[tuple[Any, Work, Ticket]]) -> None:
    """Each launch has ended, without an error, before another begins that excludes it."""
    places = {(what, id(work)): place for place, (what, work) in enumerate(order)}
    for _, _, ticket in asked:
        ticket.check()
        assert ticket.done
    for i, (lane, work, _) in enumerate(asked):
        for other_lane, other, _ in asked[i + 1 :]:
            if set(used_by(lane, work)) & set(used_by(other_lane, other)):
                assert places["end", id(work)] < places["begin", id(other)]
