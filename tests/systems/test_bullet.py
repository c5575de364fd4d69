"""Bullet: one test a statement of the paper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.estimate import synthetic
from tests.systems.handmade import (
    LAYERS,
    LEVELS,
    UNITS,
    Asked,
    batch,
    decoding,
    view,
    waiting,
)
from tests.systems.simulation import UNITS as SIM_UNITS
from tests.systems.simulation import simulate, submit
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.papers.sm_roofline import SmRoofline
from twolane.estimate.query import Corunner, Load, decode_step, prefill_slice
from twolane.slo import Slo
from twolane.systems.papers.bullet import (
    MAX_PREDICTED,
    MIN_GROWTH,
    Bullet,
    BulletMemory,
    percentile,
    provision,
    reorder,
)
from twolane.systems.plan import Chunk, DecodeSteps, Launch, PrefillSlice
from twolane.systems.registry import SYSTEMS, make_system
from twolane.systems.view import LaneView

SPLITS = sorted((level for level in LEVELS if all(level)), key=lambda level: level[1])


@pytest.fixture(scope="module")
def roofline():
    return SmRoofline(synthetic.profile())


def running(count: int = 64, **more) -> list[Asked]:
    return [decoding(f"d{i}", 2000, **more) for i in range(count)]


def units(plan) -> dict[str, int]:
    return {launch.lane: launch.units for launch in plan.launches}


@pytest.mark.parametrize("q", [0.0, 37.5, 90.0, 100.0])
def test_percentiles_are_those_of_numpy(q):
    values = np.random.default_rng(0).random((3, 11))
    for count in (1, 2, 11):
        some = values[:, :count]
        assert percentile(some, q) == pytest.approx(np.percentile(some, q, axis=1))


# The order of waiting requests


queues = st.lists(
    st.tuples(st.sampled_from("ab"), st.floats(0.01, 2.0), st.floats(0.05, 6.0)),
    min_size=1,
    max_size=12,
).map(lambda rows: sorted(rows, key=lambda row: row[0]))


def ends(order, seconds):
    return dict(zip(order, np.cumsum([seconds[i] for i in order]), strict=True))


@given(queues)
def test_reordering_harms_no_ttft_slo_and_starves_nobody(rows):
    """§3.3.2: reordered when that does not violate TTFT SLOs for pending requests. Nobody becomes
    late, nobody who is late is served later, and priorities stand."""
    groups, seconds, due = zip(*rows, strict=True)
    order = reorder(groups, seconds, due, 0.0)
    assert sorted(order) == list(range(len(rows)))
    assert [groups[i] for i in order] == list(groups)
    before, after = ends(range(len(rows)), seconds), ends(order, seconds)
    for i, bound in enumerate(due):
        assert after[i] <= max(bound, before[i]) + 1e-9


@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=12))
def test_waiting_requests_are_sorted_by_predicted_latency(seconds):
    """§3.3.2, Algorithm 1, line 5."""
    order = reorder([0] * len(seconds), seconds, [1e9] * len(seconds), 0.0)
    assert order == sorted(range(len(seconds)), key=seconds.__getitem__)


def test_one_suffering_request_keeps_the_order():
    long_then_short, due = [2.0, 1.0], [2.5, 9.0]
    assert reorder([0, 0], long_then_short, due, 0.0) == [0, 1]
    assert reorder([0, 0], long_then_short, [3.5, 9.0], 0.0) == [1, 0]
    assert reorder([0, 0, 0], [2.0, 1.0, 0.5], [0.1, 9.0, 9.0], 0.0) == [0, 2, 1]


def test_the_shortest_prompts_go_first(roofline):
    """Predicted latency, not tokens: a long prompt that is in the cache is short."""
    line = [waiting("long", 1800), waiting("cached", 40, reused=1500), waiting("mid", 600)]
    plan, _ = Bullet(max_batch_tokens=1000).plan(view(roofline, waiting=line), BulletMemory())
    assert plan.admit == (Chunk("cached", 40), Chunk("mid", 600))
    plan, _ = Bullet(schedule=False).plan(view(roofline, waiting=line), BulletMemory())
    assert plan.admit[0] == Chunk("long", 1800)


def test_the_normalised_ttft_slo_goes_with_the_prompt(roofline):
    """Table 4: 3 ms for each prompt token, unless the request has a TTFT SLO."""
    alone = roofline.predict(prefill_slice(Load([2000], [0]), LAYERS, finishes=True), UNITS)
    quick, just = waiting("quick", 64), alone + 0.001
    for slow, first in (
        (waiting("slow", 2000), "quick"),
        (waiting("slow", 2000, arrival=just - 6.0), "slow"),  # its 6 s are nearly over
        (waiting("slow", 2000, deadline=just), "slow"),
        (waiting("slow", 2000, arrival=just - 6.0, deadline=9.0), "quick"),
    ):
        asked = view(roofline, waiting=[slow, quick])
        plan, _ = Bullet(max_batch_tokens=100).plan(asked, BulletMemory())
        assert plan.admit[0].request == first


def test_nobody_passes_a_request_that_waits_for_memory(roofline):
    line = [waiting("large", 900, page_cost=50), waiting("small", 30, page_cost=2)]
    plan, _ = Bullet().plan(view(roofline, waiting=line, free_pages=40), BulletMemory())
    assert not plan.admit


def test_where_the_shortest_does_not_fit_prompts_go_in_order_of_arrival(roofline):
    line = [waiting("long", 900, page_cost=2), waiting("short", 30, page_cost=50)]
    for pages, admitted in ((40, ["long"]), (60, ["short", "long"])):
        plan, _ = Bullet().plan(view(roofline, waiting=line, free_pages=pages), BulletMemory())
        assert [chunk.request for chunk in plan.admit] == admitted


@pytest.mark.parametrize("count", [10, MAX_PREDICTED, MAX_PREDICTED + 1, MAX_PREDICTED + 36])
def test_a_batch_may_have_more_requests_than_are_predicted(roofline, count):
    """A batch of short prompts is filled up to its tokens, whoever waits after it; those beyond the
    first ones come as they are."""
    line = [waiting(f"p{i}", 10, deadline=60.0) for i in range(MAX_PREDICTED + 40)]
    asked = view(roofline, waiting=line, decoding=running())
    system = Bullet(max_batch_tokens=10 * count, by_intensity=False)
    plan, _ = system.plan(asked, BulletMemory())
    assert plan.admit == tuple(Chunk(request.id, 10) for request in line[:count])
    assert set(units(plan)) == {"decode", "prefill"}


def test_a_batch_ends_where_its_arithmetic_intensity_has_its_limit(roofline):
    """§3.3.2: many short prompts together make a matrix product worth its weights, and from some
    number on another one brings nothing; on fewer SMs that is sooner."""
    line = [waiting(f"p{i}", 32, deadline=60.0) for i in range(64)]
    by_tokens, by_intensity = Bullet(by_intensity=False), Bullet()

    def count(system, memory, **more):
        return len(system.plan(view(roofline, waiting=line, **more), memory)[0].admit)

    assert count(by_tokens, BulletMemory()) == 64
    alone = count(by_intensity, BulletMemory())
    few = BulletMemory(level=SPLITS[-1])
    beside = count(by_intensity, few, decoding=running(4))
    assert 1 < beside < alone < 64


def test_the_request_that_reaches_the_limit_is_in_the_batch(roofline):
    """Algorithm 1, lines 12 and 13: append while the intensity is below its peak."""
    line = [waiting(f"p{i}", 32, deadline=60.0) for i in range(64)]
    plan, _ = Bullet().plan(view(roofline, waiting=line), BulletMemory())

    def rate(count):
        whole = prefill_slice(Load([32] * count, [0] * count), LAYERS, finishes=True)
        return 32 * count / roofline.predict(whole, UNITS)

    count = len(plan.admit)
    grown = [rate(n) / rate(n - 1) - 1 for n in range(2, count + 1)]
    assert grown[-1] < MIN_GROWTH <= min(grown[:-1])


# The units


shares = st.lists(st.floats(0.1, 3.0), min_size=4, max_size=4)


@given(shares, shares, st.integers(0, 3))
def test_provisioning_is_that_of_algorithm_1(ttft, tpot, current):
    """Lines 14 to 19. TPOT falls and TTFT rises with decode's units."""
    ttft, tpot = np.sort(ttft), np.sort(tpot)[::-1]
    chosen = provision(ttft, tpot, current)
    if tpot[current] <= 1:  # the minimum that keeps the SLO (§3.3.1)
        assert tpot[chosen] <= 1
        assert chosen == 0 or tpot[chosen - 1] > 1
    elif ttft[current] <= 1:  # prefill gives units up, but not its own SLO if that does not help
        assert chosen >= current
        assert tpot[chosen] <= 1 or (tpot[-1] > 1 and ttft[chosen] <= 1)
        assert tpot[chosen - 1] > 1 or chosen == 0
    else:  # balanced
        worst = np.maximum(ttft, tpot)
        assert worst[chosen] == worst.min()


@pytest.mark.parametrize("tpot", [0.013, 0.018, 0.026, 0.05])
def test_decode_gets_the_fewest_units_that_keep_its_slo(roofline, tpot):
    """§3.3.1, with the SM-scaling roofline and the contention of §3.2.3."""
    prompts, step = Load([4000], [0]), Load.decode([2000] * 64)
    wanted = next(
        (p, d)
        for p, d in SPLITS
        if roofline.predict(decode_step(step), d, Corunner(prompts, p)) <= tpot
    )
    asked = view(roofline, decoding=running(slo=Slo(tpot=tpot)), batch=batch(waiting("p", 4000)))
    plan, memory = Bullet().plan(asked, BulletMemory(level=(52, 80)))
    assert units(plan) == {"prefill": wanted[0], "decode": wanted[1]}
    predicted = roofline.predict(decode_step(step), wanted[1], Corunner(prompts, wanted[0]))
    assert f"step {predicted * 1e3:.1f} ms" in plan.reason
    assert memory.level == wanted


def test_tpot_counts_the_tokens_so_far(roofline):
    """§3.3.1: P90 of TPOT, in which past tokens count: slack lets decode have fewer units."""
    late, early = {"first_token_at": -2.0}, {"first_token_at": -0.1}
    for history, expected in ((late, 80), (early, 16)):
        requests = running(generated=50, slo=Slo(tpot=0.020), **history)
        asked = view(roofline, decoding=requests, batch=batch(waiting("p", 4000)))
        assert units(Bullet().plan(asked, BulletMemory())[0])["decode"] == expected


def test_a_gap_between_tokens_counts_from_the_last_token_or_the_end_of_the_step_in_flight(roofline):
    asked = {"decoding": running(slo=Slo(tbt=0.05), last_token_at=-0.03)}
    asked["batch"] = batch(waiting("p", 4000))
    for lanes, expected in (({}, 32), ({"decode": LaneView(1, 16, 0.001)}, 16)):
        _, memory = Bullet().plan(view(roofline, lanes=lanes, **asked), BulletMemory())
        assert memory.level[1] == expected


def test_prefill_runs_a_fixed_number_of_layers_a_step(roofline):
    """§3.3.1; the last step has those that are left. Without decode, too."""
    for requests in ([], running()):
        asked = view(roofline, decoding=requests, batch=batch(waiting("p", 4000), layers=8))
        plan, _ = Bullet(step_layers=5).plan(asked, BulletMemory())
        assert plan.launches[-1].work == PrefillSlice(8, 13)
    asked = view(roofline, batch=batch(waiting("p", 4000), layers=34))
    assert Bullet().plan(asked, BulletMemory())[0].launches[-1].work == PrefillSlice(34, LAYERS)


def test_units_are_given_anew_at_every_step_of_prefill(roofline):
    """§3.3.2: the level follows the state, not the one before it."""
    asked = {"batch": batch(waiting("p", 4000), layers=8)}
    level = None
    for tpot, fewest in ((0.050, 16), (0.013, 48), (0.050, 16)):
        requests = running(slo=Slo(tpot=tpot))
        plan, memory = Bullet().plan(
            view(roofline, decoding=requests, **asked), BulletMemory(level=level)
        )
        assert units(plan)["decode"] == fewest
        level = memory.level


# Decode standing still, and the hand-over


def test_decode_stands_still_when_prefill_is_late_and_tpot_has_slack(roofline):
    """§3.3.2: in extreme cases decode is suspended if the TPOT SLO is still met; prefill has the
    whole device meanwhile (Figure 20)."""
    late = batch(waiting("p", 4000, arrival=-60.0), layers=8)
    slack = running(generated=50, first_token_at=-0.5)
    plan, memory = Bullet().plan(view(roofline, decoding=slack, batch=late), BulletMemory())
    assert units(plan) == {"prefill": UNITS}
    assert memory.paused
    lanes = {"prefill": LaneView(1, UNITS, until=0.02)}  # its step runs: decode still waits
    asked = view(roofline, decoding=slack, batch=late, lanes=lanes)
    assert not Bullet().plan(asked, memory)[0].launches
    asked = view(roofline, decoding=slack)  # nothing is left to wait for
    assert units(Bullet().plan(asked, memory)[0]) == {"decode": UNITS}


def test_decode_goes_on_when_prefill_is_in_time_or_tpot_has_no_slack(roofline):
    slack = running(generated=50, first_token_at=-0.5)
    in_time = batch(waiting("p", 4000), layers=8)
    late = batch(waiting("p", 4000, arrival=-60.0), layers=8)
    tight = running(generated=50, first_token_at=-7.475)  # of 7.5 s for 50 tokens
    gap = running(generated=50, first_token_at=-0.5, slo=Slo(tbt=0.02))
    for requests, prompts in ((slack, in_time), (tight, late), (gap, late)):
        plan, _ = Bullet().plan(view(roofline, decoding=requests, batch=prompts), BulletMemory())
        assert set(units(plan)) == {"decode", "prefill"}
    plan, _ = Bullet(schedule=False).plan(
        view(roofline, decoding=slack, batch=late), BulletMemory()
    )
    assert set(units(plan)) == {"decode", "prefill"}


def test_decode_takes_over_while_the_last_step_of_prefill_runs(roofline):
    """§3.3.1: more SMs for decode as the final layers approach completion, partly shared."""
    ending = {"launched_batches": [batch(waiting("p", 4000), layers=LAYERS)]}
    lanes = {"prefill": LaneView(1, 116, until=0.02)}
    asked = view(roofline, decoding=running(), lanes=lanes, **ending)
    memory = BulletMemory(level=(116, 16))
    assert Bullet().plan(asked, memory)[0].launches == (Launch("decode", UNITS, DecodeSteps()),)
    more = view(roofline, decoding=running(), lanes=lanes, waiting=[waiting("q", 900)], **ending)
    assert Bullet().plan(more, memory)[0].launches[0].units == 16  # no transition: more comes


def test_a_phase_that_is_alone_has_the_whole_device(roofline):
    asked = view(roofline, decoding=running())
    assert units(Bullet().plan(asked, BulletMemory(level=(116, 16)))[0]) == {"decode": UNITS}
    asked = view(roofline, waiting=[waiting("p", 900)])
    assert units(Bullet().plan(asked, BulletMemory(level=(116, 16)))[0]) == {"prefill": UNITS}


# The ablations


def test_naive_has_neither_partitions_nor_scheduling(roofline):
    """§4.5: concurrent execution without provisioning or scheduling; with the scheduler only, both
    lanes have all units, too."""
    asked = view(roofline, decoding=running(), batch=batch(waiting("p", 4000)))
    for schedule in ("true", "false"):
        system = make_system("bullet", {"partition": "false", "schedule": schedule})
        assert units(system.plan(asked, system.start())[0]) == {"prefill": UNITS, "decode": UNITS}


def test_fixed_units_for_prefill_leave_decode_all(roofline):
    """§4.4: fixed SM configurations for prefill, decode uses all SMs."""
    asked = view(roofline, decoding=running(), batch=batch(waiting("p", 4000)))
    plan, _ = Bullet(prefill_units=90).plan(asked, BulletMemory())
    assert units(plan) == {"prefill": 84, "decode": UNITS}


# In simulation


def test_lanes_overlap_and_go_on_by_themselves():
    """§3.3.1: prefill step by step, decode by itself beside it, nobody waits for the other; with
    the online estimator."""
    arrivals = [(0.0, submit("a", 100, 40)), (0.3, submit("b", 800, 3)), (0.31, submit("c", 80, 3))]
    sim = simulate(make_system("bullet", {"step_layers": "2"}), arrivals)
    prefill, decode = sim.record.of("prefill"), sim.record.of("decode")
    assert {ran.name for ran in prefill} == {f"layers {i}:{i + 2}" for i in range(0, 8, 2)}
    beside = [(p, d) for p in prefill for d in decode if p.overlaps(d)]
    assert beside
    assert any(d.units + p.units == SIM_UNITS for p, d in beside)
    gaps = np.diff(sim.times["a"])
    assert gaps.max() < 0.150
    assert [len(sim.times[name]) for name in "abc"] == [40, 3, 3]


def test_without_predictions_nothing_is_reordered_or_paused():
    asked = view(
        OnlineEstimator(), decoding=running(2), waiting=[waiting("l", 900), waiting("s", 9)]
    )
    plan, memory = Bullet(max_batch_tokens=100).plan(asked, BulletMemory())
    assert plan.admit == (Chunk("l", 900),)
    assert not memory.paused
    assert units(plan) == {"prefill": 52, "decode": 80}


def test_it_predicts_with_the_sm_scaling_roofline():
    assert SYSTEMS["bullet"].estimator == "sm-roofline"
