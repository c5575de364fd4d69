"""Drift: one test a statement of the paper."""

import itertools
import math
from dataclasses import replace

import pytest
from msgspec import structs

from tests.estimate import synthetic
from tests.sim.durations import FixedDurations
from tests.systems.handmade import LAYERS, UNITS, batch, decoding, view, waiting
from tests.systems.simulation import simulate, submit
from twolane.engine.config import EngineConfig
from twolane.engine.settings import level_shares
from twolane.estimate.papers.guard import ContentionGuard
from twolane.estimate.papers.solo_run import SoloRun
from twolane.estimate.query import Load, decode_step, prefill_slice
from twolane.lanes.settings import LaneSizes
from twolane.model.shapes import SHAPES
from twolane.sim.gpus import GPUS
from twolane.sim.machine import SimulatedMachine
from twolane.slo import Slo
from twolane.systems.common.multiplex import deadline
from twolane.systems.papers.drift import Drift
from twolane.systems.plan import Chunk, DecodeSteps, Launch, PrefillSlice
from twolane.systems.registry import make_system
from twolane.systems.view import LaneView

A100 = GPUS["a100-80gb"]


@pytest.fixture(scope="module")
def solo():
    return SoloRun(synthetic.profile())


STEP = Load.decode([4000] * 32)


def running(tbt):
    return [decoding(f"d{i}", 4000, slo=Slo(tbt=tbt)) for i in range(32)]


def levels(units, decode_units):
    return [(units - d, d) for d in decode_units] + [(units, 0), (0, units)]


@pytest.mark.parametrize(
    ("units", "offered", "groups", "shared"),
    [
        (108, (24, 28, 36, 48), 4, [(84, 24), (72, 36)]),
        (108, (24, 28, 36, 48), 3, [(80, 28)]),
        (108, (24, 28, 36, 48), 5, [(84, 24), (80, 28), (72, 36)]),
        (132, range(16, 117, 16), 4, [(100, 32), (84, 48)]),
        (132, range(16, 117, 16), 3, [(100, 32)]),
        (2, (1,), 4, [(1, 1)]),
    ],
)
def test_the_groups_are_the_papers_or_the_nearest_on_offer(solo, units, offered, groups, shared):
    """§4 and §5.3.2, of 108 SMs."""
    asked = view(solo, units=units, levels=levels(units, offered))
    assert Drift(groups=groups).levels(asked) == shared


@pytest.mark.parametrize(
    ("units", "step", "groups", "shares"),
    [
        (108, 2, 4, [24, 36]),
        (108, 2, 3, [28]),
        (108, 2, 5, [24, 28, 36]),
        (132, 8, 4, [32, 48]),
        (2, 2, 4, [2]),
    ],
)
def test_the_groups_are_offered_unless_others_are_listed(units, step, groups, shares):
    """§4 and §5.3.2, of 108 SMs."""
    config = EngineConfig(model="", system="drift", options={"groups": str(groups)})
    assert list(level_shares(config, units, step)) == shares
    assert level_shares(structs.replace(config, levels=(16, 40)), units, step) == (16, 40)


def test_on_its_own_gpu_drift_has_its_own_groups():
    config = EngineConfig(model="", system="drift")
    machine = SimulatedMachine(A100, SHAPES["llama-3.1-8b"], config)
    lanes = machine.start(LaneSizes(64, 16, 4, 64), lambda: None, lambda stage, share: None)
    assert lanes.levels == ((84, 24), (72, 36), (108, 0), (0, 108))


def test_there_are_three_to_five_groups():
    """§5.3.2."""
    with pytest.raises(ValueError, match="groups must be 3, 4 or 5, not 2"):
        make_system("drift", {"groups": "2"})


@pytest.mark.parametrize(("factor", "decode_units"), [(0.8, 48), (1.01, 48), (1.51, 32), (9, 32)])
def test_decode_gets_the_fewest_units_that_keep_its_slo(solo, factor, decode_units):
    """§3.5: just enough for decode, the rest for prefill; where no group is enough, the largest."""
    tbt = factor * solo.predict(decode_step(STEP), 48)
    asked = view(solo, decoding=running(tbt), waiting=[waiting("p", 2000)])
    plan, _ = Drift().plan(asked, frozenset())
    assert [launch.units for launch in plan.launches] == [decode_units, UNITS - decode_units]
    assert f"({UNITS - decode_units}, {decode_units}): step" in plan.reason
    assert f"of {tbt * 1e3:g} ms" in plan.reason


def test_decode_keeps_to_its_units_while_the_last_block_of_prefill_runs(solo):
    asked = {"decoding": running(1.01 * solo.predict(decode_step(STEP), 32))}
    ending = batch(waiting("p", 2000), layers=LAYERS)
    lanes = {"prefill": LaneView(1, 100, 0.02)}
    for more, units in (({"launched_batches": [ending], "lanes": lanes}, 32), ({}, UNITS)):
        plan, _ = Drift().plan(view(solo, **asked, **more), frozenset())
        assert plan.launches == (Launch("decode", units, DecodeSteps()),)


def test_the_decode_graph_is_launched_first_and_blocks_last_as_long(solo):
    """§3.3: enough blocks to occupy prefill's units until the step ends."""
    asked = view(solo, decoding=running(0.05), waiting=[waiting("p", 2000)])
    plan, _ = Drift().plan(asked, frozenset())
    whole = solo.predict(prefill_slice(Load([2000], [0]), LAYERS, finishes=True), 100)
    blocks = math.ceil(solo.predict(decode_step(STEP), 32) * LAYERS / whole)
    assert 1 < blocks < LAYERS
    assert plan.admit == (Chunk("p", 2000),)
    assert plan.launches == (
        Launch("decode", 32, DecodeSteps()),
        Launch("prefill", 100, PrefillSlice(0, blocks)),
    )


def test_contention_is_left_out_of_account(solo):
    """§3.4: predictors trained on solo runs, whatever the estimator knows of the other lane."""
    guard = ContentionGuard(synthetic.profile())
    tbt = 1.01 * solo.predict(decode_step(STEP), 32)
    asked = view(guard, decoding=running(tbt), waiting=[waiting("p", 8000)])
    plan, _ = Drift().plan(asked, frozenset())
    assert plan.launches[0].units == 32


def test_blocks_go_to_all_units_when_decode_has_ended(solo):
    """§3.3: later blocks run in a new green context just after the end of decode."""
    opened = batch(waiting("p", 8000), layers=5)
    plan, _ = Drift().plan(view(solo, batch=opened), frozenset())
    (launch,) = plan.launches
    assert launch.units == UNITS
    assert launch.work.first == 5
    seconds = solo.predict(prefill_slice(Load([8000], [0]), launch.work.last - 5), UNITS)
    assert seconds == pytest.approx(Drift().slice_seconds, rel=0.2)  # it may still be preempted


def test_one_second_for_1k_new_tokens(solo):
    """§5.1: a request's TTFT SLO, unless it has one of its own."""
    request = waiting("p", 2048, arrival=3.0)
    assert deadline(request, request.new) == pytest.approx(5.0)
    assert deadline(replace(request, deadline=4.5), request.new) == 4.5


def preempting(solo, system, *, slack, new_deadline=1e9, parked=None, spent=frozenset()):
    """A long batch is open, its deadline `slack` seconds after both would be done by prediction."""
    rest = solo.predict(prefill_slice(Load([8000], [0]), LAYERS - 10, finishes=True), UNITS)
    first = solo.predict(prefill_slice(Load([500], [0]), LAYERS, finishes=True), UNITS)
    long = waiting("long", 8000, deadline=rest + first + slack)
    short = waiting("short", 500, deadline=new_deadline)
    asked = view(solo, batch=batch(long, layers=10), waiting=[short], parked=parked)
    return system.plan(asked, spent)


def test_a_batch_preempts_if_both_fit_into_the_headroom(solo):
    """Algorithm 1, lines 13 to 17: T_PB + T_PBnew ≤ PB.SLO_headroom()."""
    plan, spent = preempting(solo, Drift(), slack=1e-6)
    assert plan.preempt
    assert plan.admit == (Chunk("short", 500),)
    assert plan.launches[0].work.first == 0
    assert spent == {"long"}


def test_otherwise_it_goes_back_to_the_queue(solo):
    """Algorithm 1, lines 18 to 20."""
    for system in (Drift(), Drift(preemption=False)):
        slack = -1e-6 if system.preemption else 1.0
        plan, spent = preempting(solo, system, slack=slack)
        assert not plan.preempt
        assert not plan.admit
        assert plan.launches[0].work.first == 10
        assert not spent


def test_a_batch_is_preempted_at_most_once(solo):
    """§3.5: the stack has one place, and whoever was on it is not preempted again."""
    parked = batch(waiting("other", 3000), layers=2)
    assert not preempting(solo, Drift(), slack=1.0, parked=parked)[0].preempt
    assert not preempting(solo, Drift(), slack=1.0, spent=frozenset({"long"}))[0].preempt


def test_the_preempted_batch_resumes_before_new_ones(solo):
    """Algorithm 1, lines 7 and 8."""
    parked = batch(waiting("long", 8000), layers=10)
    asked = view(solo, parked=parked, waiting=[waiting("next", 300)])
    plan, _ = Drift().plan(asked, frozenset({"long"}))
    assert plan.resume
    assert not plan.admit
    assert plan.launches[0].work.first == 10


def test_a_long_batch_lets_one_short_one_pass_and_ends_before_the_next():
    """§3.5 in a run: two short prompts come while a long one is in its layers."""
    arrivals = [(0.0, submit("long", 3000, 2))]
    arrivals += [(0.12, submit("s1", 40, 2)), (0.3, submit("s2", 40, 2))]
    durations = FixedDurations(prefill_layer=0.05)
    slo = Slo(ttft=2.0, tbt=0.1)
    sim = simulate(make_system("drift"), arrivals, durations=durations, slo=slo)
    order = [ran.requests[0] for ran in sim.record.of("prefill")]
    first, last = order.index("s1"), len(order) - 1 - order[::-1].index("s1")
    assert order[:first] == ["long"] * first
    assert order[first : last + 1] == ["s1"] * (last + 1 - first)
    assert sim.times["s1"][0] < sim.times["long"][0] < sim.times["s2"][0]


def test_a_finished_prefill_joins_decode_without_stopping_it():
    """§3.3, query-based synchronisation: decode goes on while the last blocks run."""
    arrivals = [(0.0, submit("a", 50, 60)), (0.3, submit("b", 300, 20))]
    sim = simulate(make_system("drift"), arrivals, slo=Slo(tbt=0.05))
    gaps = [b - a for a, b in itertools.pairwise(sim.times["a"])]
    assert max(gaps) == pytest.approx(0.020)
    assert any(set(ran.requests) == {"a", "b"} for ran in sim.record.of("decode"))


def test_between_two_steps_the_partition_stays(solo):
    """§3.5: the partition is decided with each decode step, so that groups do not overlap."""
    flying = {"decode": LaneView(1, 48, 0.020)}
    asked = view(solo, decoding=running(1.0), waiting=[waiting("p", 2000)], lanes=flying)
    plan, _ = Drift().plan(asked, frozenset())
    assert [(launch.lane, launch.units) for launch in plan.launches] == [("prefill", 84)]
    alone = {"decode": LaneView(1, UNITS, 0.020)}
    plan, _ = Drift().plan(structs.replace(asked, lanes=asked.lanes | alone), frozenset())
    assert not plan.launches
    assert not plan.admit
    assert plan.wake_at == pytest.approx(0.015)
