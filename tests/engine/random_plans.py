"""A system that plans at random, within the law."""

import random
from dataclasses import dataclass

from twolane.devices import LANES, LaneName
from twolane.systems.base import System
from twolane.systems.plan import Chunk, DecodeSteps, Hybrid, Launch, Plan, PrefillSlice, Work
from twolane.systems.view import View


@dataclass(frozen=True)
class RandomPlans(System):
    """Its memory is a random state, so that it is as pure as any other system."""

    seed: int
    max_queued: int = 3

    def start(self) -> int:
        return self.seed

    def plan(self, view: View, memory: int) -> tuple[Plan, int]:
        rng = random.Random(memory)
        preempt = view.batch is not None and view.parked is None and rng.random() < 0.3
        open_batch = None if preempt else view.batch
        parked = view.batch if preempt else view.parked
        chunks: tuple[Chunk, ...] = ()
        resume = False
        if open_batch is None:
            chunks = self._chunks(view, rng) if rng.random() < 0.6 else ()
            resume = not chunks and parked is not None and rng.random() < 0.5
        if resume:
            open_batch = parked
        first = open_batch.layers_launched if open_batch else 0
        has_batch = bool(chunks or open_batch)
        launches = tuple(self._launches(view, rng, first if has_batch else None))
        plan = Plan(
            preempt=preempt, admit=chunks, resume=resume, launches=launches, reason="random"
        )
        return plan, rng.getrandbits(32)

    def _chunks(self, view: View, rng: random.Random) -> tuple[Chunk, ...]:
        pages = view.free_pages + view.reclaimable_pages
        slots = view.free_slots
        chunks = []
        for request in rng.sample(list(view.waiting), len(view.waiting)):
            pages -= request.page_cost
            slots -= not request.started
            if (not request.started and (pages < 0 or slots < 0)) or len(chunks) == 4:
                break
            n = request.new if rng.random() < 0.6 else rng.randint(1, request.new)
            chunks.append(Chunk(request.id, n))
        return tuple(chunks)

    def _launches(self, view: View, rng: random.Random, first: int | None) -> list[Launch]:
        """`first`: the open batch's next layer, None without one."""
        launches: list[Launch] = []
        for _ in range(rng.choice((0, 1, 1, 2))):
            kinds = ["decode"]
            if first is not None and first < view.layers:
                kinds += ["slice", "slice"] + (["hybrid"] if first == 0 else [])
            kind = rng.choice(kinds)
            lane = rng.choice(LANES)
            if view.lanes[lane].queued + len(launches) >= self.max_queued:
                continue
            work: Work
            if kind == "decode":
                work = DecodeSteps(rng.randint(1, 4), rng.random() < 0.3)
            elif kind == "hybrid":
                work, first = Hybrid(), None
            else:
                assert first is not None
                last = rng.randint(first + 1, view.layers)
                work, first = PrefillSlice(first, last), last
            launches.append(Launch(lane, self._units(view, rng, lane), work))
        return launches

    def _units(self, view: View, rng: random.Random, lane: LaneName) -> int:
        side = 1 if lane == "decode" else 0
        return rng.choice([level[side] for level in view.levels if level[side]])
