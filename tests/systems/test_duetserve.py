"""DuetServe: one test a statement of the paper."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.estimate import synthetic
from tests.systems.handmade import LAYERS, LEVELS, UNITS, decoding, view, waiting
from tests.systems.simulation import simulate, submit
from twolane.engine.config import EngineConfig
from twolane.engine.settings import level_shares
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.papers.attention_roofline import AttentionRoofline
from twolane.estimate.papers.sm_roofline import SmRoofline
from twolane.estimate.query import Corunner, Load, decode_step, hybrid_pass, prefill_slice
from twolane.slo import Slo
from twolane.systems.papers.duetserve import DuetServe, Side, best_split
from twolane.systems.plan import Chunk, DecodeSteps, Hybrid, Launch, Plan, PrefillSlice
from twolane.systems.registry import SYSTEMS, make_system
from twolane.systems.view import LaneView


@pytest.fixture(scope="module")
def roofline():
    return AttentionRoofline(synthetic.profile())


def algorithm_1(sides, bound, prefill_tokens, decode_tokens):
    """Lines 7 to 21 as they stand, over the levels on offer instead of range(2, S + 1, 2)."""
    best, chosen = 0.0, None
    for side in sides:
        t_d, t_p = side.decode_seconds, side.prefill_seconds
        if t_d > bound:
            continue
        for k in (int(t_p / t_d), int(t_p / t_d) + 1):
            if k < 1:
                continue
            throughput = (k * decode_tokens + prefill_tokens) / max(k * t_d, t_p)
            if throughput > best:
                best, chosen = throughput, (side, k)
    return chosen


seconds = st.floats(1e-3, 1.0)
sides = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8).map(
    lambda pairs: [Side(UNITS - 16 * i, 16 * i, *pair) for i, pair in enumerate(pairs, 1)]
)


@given(sides, seconds, st.integers(1, 8192), st.integers(1, 256))
def test_the_split_is_the_arg_max_of_algorithm_1(levels, bound, prefill_tokens, decode_tokens):
    """§4.2, Algorithm 1; where it finds none, the largest S_d."""
    found = best_split(levels[::-1], bound, prefill_tokens, decode_tokens)
    assert found[1] >= 1
    wanted = algorithm_1(levels, bound, prefill_tokens, decode_tokens)
    if wanted is None:
        wanted = algorithm_1(levels[-1:], 1e9, prefill_tokens, decode_tokens)
    assert found == wanted


def passes(roofline, tbt, **more):
    """A plan for two decoding requests and 6,000 tokens of prompts, and the pass's prediction."""
    slo = Slo(tbt=tbt)
    running = [decoding("a", 2000, slo=slo), decoding("b", 5000, slo=slo)]
    asked = view(roofline, decoding=running, waiting=[waiting("c", 4000), waiting("d", 2000)])
    plan, _ = DuetServe(**more).plan(asked, None)
    together = roofline.predict(hybrid_pass(Load([1, 1, 4000, 2000], [2000, 5000, 0, 0])), UNITS)
    return plan, together


def test_it_stays_aggregated_while_the_mixed_batch_keeps_the_bound(roofline):
    """§4, Algorithm 1, lines 2 to 4: t_mixed ≤ τ."""
    _, together = passes(roofline, 1.0)
    plan, _ = passes(roofline, together * 1.001)
    assert plan.launches == (Launch("device", UNITS, Hybrid()),)
    assert plan.admit == (Chunk("c", 4000), Chunk("d", 2000))
    assert f"{together * 1e3:.1f} ms" in plan.reason


def test_it_splits_as_algorithm_1_says_when_the_bound_would_be_missed(roofline):
    """Algorithm 1 with the attention-aware roofline of §4.1 over the levels on offer."""
    _, together = passes(roofline, 1.0)
    plan, _ = passes(roofline, together * 0.999)
    step, prompts = Load.decode([2000, 5000]), Load([4000, 2000], [0, 0])
    levels = [
        Side(
            p,
            d,
            roofline.predict(prefill_slice(prompts, LAYERS, finishes=True), p),
            roofline.predict(decode_step(step), d),
        )
        for p, d in LEVELS
        if p and d
    ]
    side, k = algorithm_1(levels, together * 0.999, 6000, 2)
    assert k > 1
    assert plan.launches == (
        Launch("decode", side.decode_units, DecodeSteps(k)),
        Launch("prefill", side.prefill_units, PrefillSlice(0, LAYERS)),
    )
    assert all(f"{s * 1e3:.1f} ms" in plan.reason for s in (together, side.decode_seconds))


def test_an_estimator_that_knows_contention_is_asked_with_it():
    """The roofline of the paper ignores the other lane; others (`--estimator`) need not."""
    knows = SmRoofline(synthetic.profile())
    plan, together = passes(knows, 0.030)
    assert together > 0.030
    decode, prefill = plan.launches
    beside = Corunner(Load([4000, 2000], [0, 0]), prefill.units)
    step = knows.predict(decode_step(Load.decode([2000, 5000])), decode.units, beside)
    assert step > knows.predict(decode_step(Load.decode([2000, 5000])), decode.units)
    assert f"in {step * 1e3:.1f} ms;" in plan.reason


def test_the_tightest_bound_of_the_running_requests_counts(roofline):
    running = [decoding("a", 2000, slo=Slo(tbt=10.0)), decoding("b", 2000, slo=Slo(tbt=0.001))]
    plan, _ = DuetServe().plan(view(roofline, decoding=running, waiting=[waiting("c", 4000)]), None)
    assert [launch.lane for launch in plan.launches] == ["decode", "prefill"]
    assert plan.launches[0].units == 80  # no level is feasible: the largest


def test_without_an_slo_the_bound_is_100_ms(roofline):
    """§3: a typical TBT SLO."""
    running, late = [decoding("a", 2000)], [waiting("c", 8000)]
    assert 0.1 < roofline.predict(hybrid_pass(Load([1, 8000], [2000, 0])), UNITS) < 1.0
    plan, _ = DuetServe().plan(view(roofline, decoding=running, waiting=late), None)
    assert plan.launches[0].lane == "decode"
    plan, _ = DuetServe(tbt_seconds=1.0).plan(view(roofline, decoding=running, waiting=late), None)
    assert plan.launches[0].lane == "device"


def test_decode_goes_first_and_chunks_fill_the_budget(roofline):
    """§4: ongoing decode requests first, then prompts, the last of them cut."""
    running = [decoding(f"d{i}", 100) for i in range(12)]
    asked = view(roofline, decoding=running, waiting=[waiting("a", 300), waiting("b", 300)])
    plan, _ = DuetServe(token_budget=512).plan(asked, None)
    assert plan.admit == (Chunk("a", 300), Chunk("b", 200))


@pytest.mark.parametrize("bound", [1e-4, 10.0])
def test_a_phase_that_is_alone_has_the_whole_device(roofline, bound):
    system = DuetServe(tbt_seconds=bound)
    plan, _ = system.plan(view(roofline, waiting=[waiting("a", 8000)]), None)
    assert plan.launches == (Launch("device", UNITS, Hybrid()),)
    plan, _ = system.plan(view(roofline, decoding=[decoding("d", 8000)]), None)
    assert plan.launches == (Launch("device", UNITS, DecodeSteps()),)


def test_both_sides_join_before_the_next_iteration(roofline):
    """§4.2: an iteration takes max(k t_d, t_p)."""
    running, late = [decoding("a", 2000)], [waiting("c", 8000)]
    for busy in ("prefill", "decode"):
        lanes = {busy: LaneView(1, 52, until=0.001)}
        asked = view(roofline, decoding=running, waiting=late, lanes=lanes)
        assert DuetServe().plan(asked, None) == (Plan(), None)


def test_a_split_waits_for_the_pass_under_way(roofline):
    """Or requests whose prompts end in it would miss the look-ahead steps."""
    lanes = {"device": LaneView(1, UNITS, until=0.001)}
    more = {"decoding": [decoding("a", 2000)], "lanes": lanes}
    asked = view(roofline, waiting=[waiting("c", 8000)], **more)
    assert DuetServe().plan(asked, None) == (Plan(), None)
    asked = view(roofline, waiting=[waiting("c", 100)], **more)
    assert DuetServe().plan(asked, None)[0].launches  # a pass is queued behind it


def test_static_splits_do_not_adapt(roofline):
    """Figure 9: a fixed allocation between the phases, k as before."""
    plan, together = passes(roofline, 10.0, decode_units=50)
    assert together < 10.0
    assert [(one.lane, one.units) for one in plan.launches] == [("decode", 48), ("prefill", 84)]


def test_iterations_in_simulation():
    """§4.3: k look-ahead steps beside one batch, decode launched first, then the gang joins; with
    the online estimator, which learns what a launch takes by launching it."""
    arrivals = [(0.0, submit("a", 40, 60)), (0.4, submit("b", 600, 4)), (1.2, submit("c", 600, 4))]
    sim = simulate(make_system("duetserve", {"tbt_seconds": "0.03"}), arrivals)
    chunks = sim.record.of("prefill")
    assert chunks
    for chunk in chunks:
        beside = [d for d in sim.record.of("decode") if d.overlaps(chunk)]
        assert len(beside) == 1
        assert beside[0].start <= chunk.start
    ends = [max(c.end, d.end) for c in chunks for d in sim.record.of("decode") if d.overlaps(c)]
    starts = sorted(ran.start for ran in sim.record.launches)
    assert all(any(start >= end for start in starts) for end in ends[:-1])
    inside = [
        ran
        for ran, (c, end) in itertools.product(sim.record.launches, zip(chunks, ends, strict=True))
        if c.start < ran.start < end
    ]
    assert not inside
    assert [len(sim.times[name]) for name in "abc"] == [60, 4, 4]


def test_without_predictions_the_first_passes_are_small():
    plan, _ = DuetServe().plan(view(OnlineEstimator(), waiting=[waiting("a", 8000)]), None)
    assert plan.admit == (Chunk("a", 256),)


def test_one_level_is_enough_and_none_stays_aggregated(roofline):
    """Two CPU cores offer (1, 1); a device without levels never splits."""
    more = {"decoding": [decoding("a", 100)], "waiting": [waiting("b", 500)]}
    system = DuetServe(tbt_seconds=1e-4)
    plan, _ = system.plan(view(roofline, levels=((1, 1), (2, 0), (0, 2)), units=2, **more), None)
    assert [launch.units for launch in plan.launches] == [1, 1]
    plan, _ = system.plan(view(roofline, levels=((132, 0), (0, 132)), **more), None)
    assert [launch.lane for launch in plan.launches] == ["device"]


def test_it_predicts_with_the_attention_aware_roofline():
    assert SYSTEMS["duetserve"].estimator == "attention-roofline"


def test_without_predictions_of_a_side_few_units_are_not_thought_enough():
    """Or prefill would get the fewest units for as long as nothing was measured on them."""
    online = OnlineEstimator()
    online.observe(hybrid_pass(Load([4000], [0])), UNITS, 0.2)
    online.observe(decode_step(Load.decode([2000])), UNITS, 0.010)
    asked = view(online, decoding=[decoding("a", 2000)], waiting=[waiting("c", 4000)])
    plan, _ = DuetServe().plan(asked, None)
    assert [(one.lane, one.units) for one in plan.launches] == [("decode", 16), ("prefill", 116)]
    assert plan.launches[0].work == DecodeSteps(2)  # 228 ms / 82.5 ms


@pytest.mark.parametrize(("units", "step", "last"), [(132, 2, 130), (132, 16, 112), (108, 2, 106)])
def test_every_share_that_leaves_one_to_prefill_is_searched(units, step, last):
    """Algorithm 1, line 8: S_d = 2, 4, ..., S."""
    config = EngineConfig(model="", system="duetserve")
    assert level_shares(config, units, step) == tuple(range(step, last + 1, step))
    assert level_shares(EngineConfig(model="", system="muxwise"), units, step) is None
    assert level_shares(EngineConfig(model=""), units, step) is None
