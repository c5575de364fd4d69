"""What is launched next, for a choice that stands."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.systems.handmade import LAYERS, UNITS, Asked, decoding, view, waiting
from twolane.devices import LANES
from twolane.engine.launch_costs import LaunchCosts
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.query import Load
from twolane.systems.auto.candidates import Candidate, Mode
from twolane.systems.auto.system import Auto
from twolane.systems.auto.target import TbtTarget
from twolane.systems.auto.turns import (
    MAX_STEPS,
    RELAUNCH_GAP_SECONDS,
    LastTurns,
    LaunchPlanner,
    Prompts,
    prefill_alone,
)
from twolane.systems.plan import Chunk, DecodeSteps, Hybrid, Launch, Plan, PrefillSlice
from twolane.systems.view import LaneView

LEAD = Auto().lead_seconds
TARGET = TbtTarget(bound=0.05, planned=0.05, latest=0.05)
SPATIAL = Candidate("spatial", (84, 48), 8, 0.001, 0, 0.02, 0.9, 0.9)
HYBRID = replace(SPATIAL, mode="hybrid", level=(UNITS, UNITS), tokens=500)
TEMPORAL = replace(SPATIAL, mode="temporal", level=(UNITS, UNITS))
STAGGERED = replace(SPATIAL, mode="staggered", beside=0.02, ahead=0.004)
NEXT = (Chunk("a", 2000),)
NOW = 1.0
NOTHING = LastTurns()


def prompts(first: int = 10) -> Prompts:
    """A batch of which these layers are launched."""
    return Prompts(Load([2000], [0]), first, NEXT, (2000,))


def launches(
    choice: Candidate | None,
    batch: Prompts | None,
    turn: LastTurns = NOTHING,
    *,
    step: float | None = 0.005,
    order: Sequence[Asked] = (),
    **more: Any,
) -> tuple[Plan, LastTurns]:
    """At time `NOW`, when the last token of the only request came, if nothing else is said."""
    rows = [decoding("d", 1000, last_token_at=NOW)]
    here = view(OnlineEstimator(), **{"now": NOW, "decoding": rows, **more})
    return LaunchPlanner(here, LEAD, order, batch, step, TARGET, choice, turn).plan()


def joining(lane: str) -> dict[str, Any]:
    """Nobody decodes yet, but one will behind a prompt in this lane."""
    return {"decoding": (), "joining": dict.fromkeys(LANES, ()) | {lane: [decoding("j", 1000)]}}


@pytest.mark.parametrize(
    ("step", "count"), [(2 * LEAD, 1), (LEAD / 3.5, 3), (LEAD / 99, MAX_STEPS), (None, 1)]
)
def test_as_many_steps_are_launched_as_last_for_the_lead(step: float | None, count: int) -> None:
    plan, _ = launches(HYBRID, None, step=step)
    assert plan.launches == (Launch("device", UNITS, DecodeSteps(count)),)
    busy = {"device": LaneView(1, UNITS, NOW + 2 * LEAD)}
    assert not launches(HYBRID, None, step=step, lanes=busy)[0].launches


@pytest.mark.parametrize("mode", ["spatial", "staggered"])
def test_steps_go_on_beside_the_last_slices(mode: Mode) -> None:
    lanes = {"prefill": LaneView(1, 84, NOW + LEAD / 2)}
    plan, _ = launches(replace(STAGGERED, mode=mode), None, lanes=lanes)
    assert plan.launches == (Launch("decode", 48, DecodeSteps(waits=True)),)
    lanes["decode"] = LaneView(1, 48, NOW + 2 * LEAD)
    assert not launches(replace(STAGGERED, mode=mode), None, lanes=lanes)[0].launches


@pytest.mark.parametrize("choice", [HYBRID, TEMPORAL])
def test_steps_wait_for_the_last_slices_as_long_as_the_bound_lets_them(choice: Candidate) -> None:
    latest = NOW + TARGET.latest - choice.gap - RELAUNCH_GAP_SECONDS

    def drain(until: float | None, now: float = NOW, **more: Any) -> Plan:
        lanes = {"prefill": LaneView(1, 90, until), **more.pop("lanes", {})}
        return launches(choice, None, now=now, lanes=lanes, **more)[0]

    step = Plan(launches=(Launch("decode", 48, DecodeSteps()),), reason="last slices")
    assert drain(latest - 0.001) == Plan(wake_at=pytest.approx(latest))
    assert drain(latest - 0.001, latest + 0.001) == step
    assert drain(latest + 0.001) == drain(None) == step
    assert drain(None, lanes={"decode": LaneView(1, 48, NOW + 2 * LEAD)}) == Plan()
    assert drain(None, **joining("prefill")) == Plan()


def test_a_pass_takes_its_tokens_from_the_prompts_in_their_order() -> None:
    a, b = waiting("a", 3000), waiting("b", 3000)
    plan, _ = launches(HYBRID, prompts(0), waiting=[a, b], order=[b, a])
    assert plan.launches == (Launch("device", UNITS, Hybrid()),)
    assert plan.admit == (Chunk("b", HYBRID.tokens),)
    assert plan.reason.startswith("hybrid: 500 tokens a pass, gap <= 20.0 of 50.0 ms")


def test_steps_go_before_a_pass_only_if_it_would_come_late_for_who_decodes() -> None:
    asked = {"waiting": [waiting("a", 900)], "order": [waiting("a", 900)]}
    slow = LaunchCosts(LAYERS)
    slow.note(Hybrid(), 0.033, 0.0)
    step = launches(HYBRID, prompts(0), launch_costs=slow, **asked)[0]
    assert step.launches == (Launch("device", UNITS, DecodeSteps(7)),)
    assert NOTHING.after(step) == LastTurns(steps_first=True) == NOTHING.after(step).after(Plan())
    first = launches(HYBRID, prompts(0), launch_costs=slow, **asked, **joining("device"))[0]
    assert first.launches == (Launch("device", UNITS, Hybrid()),)
    # Nor is one that is launched in time, though it breaks the bound.
    lanes = {"device": LaneView(1, UNITS, NOW + 0.034, 0.033)}
    long = replace(HYBRID, gap=2 * TARGET.latest)
    plan = launches(long, prompts(0), launch_costs=slow, lanes=lanes, **asked)[0]
    assert plan.launches == first.launches


def test_a_layer_is_launched_between_two_steps_though_it_is_too_long() -> None:
    long = replace(TEMPORAL, layers=1, layer=0.08, gap=0.085)
    plan, after = launches(long, prompts())
    works = (PrefillSlice(10, 11), DecodeSteps())
    assert plan.launches == tuple(Launch("device", UNITS, work) for work in works)
    assert (plan.admit, after.spent) == (NEXT, 0.08)
    assert plan.reason.startswith("temporal: 1 layers between steps")
    unknown = replace(long, layer=0.0, gap=math.inf)
    assert launches(unknown, prompts())[0].launches == plan.launches


def test_a_single_layer_may_follow_another_batch() -> None:
    some = replace(TEMPORAL, layers=1, layer=0.02, gap=0.025)
    plan, _ = launches(some, prompts(0), LastTurns(spent=0.02))
    assert [launch.work for launch in plan.launches] == [PrefillSlice(0, 1), DecodeSteps()]


@pytest.mark.parametrize(
    ("layers", "first", "last"),
    [(8, 23, 31), (8, 24, LAYERS), (8, 30, LAYERS), (5, 28, 33), (5, 29, LAYERS), (20, 0, 12)],
)
def test_what_is_less_than_half_a_slice_is_part_of_the_last(
    layers: int, first: int, last: int
) -> None:
    """No slice has more layers than the host launches at once."""
    here = {"launch_costs": LaunchCosts(12), "lanes": {"prefill": LaneView(1, 84, NOW + 0.004)}}
    plan, after = launches(replace(SPATIAL, layers=layers), prompts(first), **here)
    assert plan.launches[1:] == (Launch("prefill", 84, PrefillSlice(first, last)),)
    assert plan.admit == NEXT
    ends = NOW + 0.004 + (last - first) * SPATIAL.layer if last == LAYERS else -math.inf
    assert after.prompts_end == pytest.approx(ends)


def test_the_first_step_waits_for_prompts_however_late_they_end() -> None:
    late = LastTurns(prompts_end=NOW + 1.0)
    lanes = {"prefill": LaneView(1, 84, NOW + 1.0)}
    for who, waits in ((joining("prefill"), True), ({}, False)):
        plan, _ = launches(SPATIAL, None, late, lanes=lanes, **who)
        assert plan.launches == (Launch("decode", 48, DecodeSteps(waits=waits)),)


@pytest.mark.parametrize(("until", "count"), [(0.0104, 1), (0.0115, 2), (0.05, 8)])
def test_layers_run_beside_the_rest_of_a_step(until: float, count: int) -> None:
    lanes = {"decode": LaneView(1, 48, NOW + until), "prefill": LaneView(1, 84, NOW + 0.0095)}
    plan, _ = launches(STAGGERED, prompts(), lanes=lanes)
    assert plan.launches == (Launch("prefill", 84, PrefillSlice(10, 10 + count)),)


@pytest.mark.parametrize(
    ("since", "first", "layers"),
    [(0.0, 10, 7), (-0.022, 10, 1), (0.0, LAYERS - 3, 3), (None, 10, 7)],
)
def test_layers_run_alone_while_the_request_that_waits_longest_has_time(
    since: float | None, first: int, layers: int
) -> None:
    ends = [None] if since is None else [NOW + since, None, NOW + 0.001]
    rows = [decoding(f"{at}", 1000, last_token_at=at) for at in ends]
    plan, after = launches(STAGGERED, prompts(first), LastTurns(spent=0.004), decoding=rows)
    assert plan.launches == (Launch("device", UNITS, PrefillSlice(first, first + layers)),)
    assert plan.admit == NEXT
    assert plan.reason.startswith("staggered: all, then 84 + 48 units")
    assert after.spent == pytest.approx(0.004 + layers * STAGGERED.ahead)


def test_prompts_alone_wait_until_the_device_is_due() -> None:
    launch = Launch("device", UNITS, PrefillSlice(10, LAYERS))
    whole = Plan(admit=NEXT, launches=(launch,), reason="nothing decodes")
    for until, plan in ((LEAD / 2, whole), (2 * LEAD, Plan())):
        here = view(OnlineEstimator(), lanes={"device": LaneView(1, UNITS, until)})
        assert prefill_alone(here, prompts(), LEAD) == plan
