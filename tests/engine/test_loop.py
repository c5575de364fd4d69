"""The loop's order."""

from typing import Any

import msgspec
import pytest

from tests.engine.test_rules import Script, one_by_one, small_engine
from tests.sim.durations import FixedDurations
from tests.systems.simulation import LEVELS, UNITS, simulate, submit
from twolane.engine import engine as engine_module
from twolane.engine.engine import Engine
from twolane.engine.launches.reap import tokens_before
from twolane.engine.state import State
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.query import LaunchShape
from twolane.sim.lanes import SimLanes
from twolane.systems.base import System
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.registry import make_system
from twolane.systems.view import View


def test_tokens_are_sent_before_what_comes_next_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, kept = Engine.plan, []

    def watched(engine: Engine) -> Plan:
        kept.append(len(engine.state.outputs))
        return plan(engine)

    monkeypatch.setattr(Engine, "plan", watched)
    arrivals = [(0.0, submit("a", 20, 8)), (0.02, submit("b", 20, 8))]
    served = simulate(make_system("static-split", {}), arrivals)
    assert [len(times) for times in served.times.values()] == [8, 8]
    assert kept
    assert not any(kept)


def test_tokens_are_sent_before_the_estimator_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    reap, kept = Engine.reap, []
    engines = list[Engine]()

    def watched(engine: Engine) -> bool:
        engines[:] = [engine]
        return reap(engine)

    class Learner(OnlineEstimator):
        def observe(self, launch: LaunchShape, *took: Any) -> None:
            if launch.kind == "decode":
                kept.append(len(engines[0].state.outputs))
            super().observe(launch, *took)

    monkeypatch.setattr(Engine, "reap", watched)
    simulate(make_system("static-split", {}), [(0.0, submit("a", 20, 8))], estimator=Learner())
    assert kept == [0] * 7


PLANNING = 0.003
"""Seconds of a plan."""


def test_a_plan_waits_for_tokens_that_would_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes a while. Prompts come all the time, most of them just before a step ends; the
    tokens of a step are sent when it ends nevertheless."""
    late: dict[bool, float] = {}
    for awaited in (False, True):
        with monkeypatch.context() as patch:
            if not awaited:
                patch.setattr(engine_module, "tokens_before", lambda state, planning: None)
            late[awaited] = _mean_lateness()
    assert late[False] > 0.0005
    assert late[True] < 0.3 * late[False]


def _mean_lateness() -> float:
    """Return how much later than the device made them tokens are sent, in seconds."""
    lanes = SimLanes(UNITS, LEVELS, FixedDurations())

    class Planning(System):
        def plan(self, view: View, memory: None) -> tuple[Plan, None]:
            plan = two_ahead(view)
            lanes.advance(lanes.clock() + PLANNING)
            return plan, None

    arrivals = [(0.0, submit("early", 20, 60))]
    arrivals += [(0.1 + 0.0173 * i, submit(f"{i}", 5, 1)) for i in range(60)]
    served = simulate(Planning(), arrivals, lanes=lanes)
    made = [ran.end for ran in served.record.of("decode") if "early" in ran.requests]
    sent = served.times["early"][1:]
    return sum(b - a for a, b in zip(made, sent, strict=True)) / len(sent)


def test_a_plan_that_was_held_up_delays_later_ones_little(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = SimLanes(UNITS, LEVELS, FixedDurations())
    awaited = []

    class HeldUp(System):
        def plan(self, view: View, memory: None) -> tuple[Plan, None]:
            lanes.advance(lanes.clock() + (0.001 if awaited[1:] else 0.1))
            return two_ahead(view), None

    def watched(state: State, planning: float) -> float | None:
        awaited.append(planning)
        return tokens_before(state, planning)

    monkeypatch.setattr(engine_module, "tokens_before", watched)
    simulate(HeldUp(), [(0.0, submit("a", 20, 20))], lanes=lanes)
    assert awaited[:2] == [0.0, engine_module.LONGEST_PLANNING]
    assert awaited[-1] < awaited[1] < 0.1


def two_ahead(view: View) -> Plan:
    """Whole prompts as they come, and two decode steps in flight."""
    launches = list(one_by_one(view).launches)
    if view.decoding and view.lanes["decode"].queued == 1:
        launches.append(Launch("decode", UNITS, DecodeSteps()))
    return msgspec.structs.replace(one_by_one(view), launches=tuple(launches))


def test_tokens_that_are_found_together_keep_what_came_with_the_first() -> None:
    """The second two requests reuse a page of the first two's prompts, and are told so."""

    def decide(view: View) -> Plan:
        chunks = tuple(Chunk(request.id, request.new) for request in view.waiting)
        works = PrefillSlice(0, view.layers), DecodeSteps(2, waits=True)
        launches = tuple(Launch("decode", UNITS, work) for work in works)
        return Plan(admit=chunks, launches=launches) if chunks else Plan()

    engine = small_engine(system=Script(decide))
    lanes = engine.state.lanes
    assert isinstance(lanes, SimLanes)
    told = []
    for pair in (("a", "b"), ("c", "d")):
        prompts = zip(pair, ("a", "b"), strict=True)
        engine.take([msgspec.structs.replace(submit(of, 20, 3), id=id) for id, of in prompts])
        engine.carry_out(engine.plan())
        lanes.advance(lanes.clock() + 9.0)
        engine.reap()
        news = engine.outputs()
        assert news is not None
        told += [(output.id, len(output.tokens), output.cached) for output in news.outputs]
    assert told == [("a", 3, 0), ("b", 3, 0), ("c", 3, 16), ("d", 3, 16)]
