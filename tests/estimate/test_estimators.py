"""The estimators on profiles of known formulas: they find them, keep the contract, and learn."""

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec
import numpy as np
import pytest

from tests.estimate import synthetic
from twolane.engine.config import EstimatorName
from twolane.estimate.calibrated.estimator import (
    CONTEXT_BITS,
    LAUNCH_EXCESS,
    MAX_CORRECTION,
    MAX_SLOW_EXCESS,
    MEAN_WEIGHT,
    Calibrated,
    _BoundModel,
    _quantile,
    _Query,
    _rounded,
)
from twolane.estimate.catalog import ESTIMATORS
from twolane.estimate.errors import prediction_seconds, table
from twolane.estimate.papers.attention_roofline import AttentionRoofline
from twolane.estimate.papers.guard import OWN_SAMPLES, ContentionGuard
from twolane.estimate.papers.operators import Shape
from twolane.estimate.papers.sm_roofline import SmRoofline, execution_states, inflection
from twolane.estimate.papers.solo_run import SoloRun
from twolane.estimate.papers.sweep import Curve
from twolane.estimate.profile import Interconnect, Probe, ProfileError, Sample
from twolane.estimate.query import Corunner, Load, decode_step, hybrid_pass, prefill_slice

NAMES = get_args(EstimatorName)
PROMPTS = Load([2000, 500], [0, 4000])
STEP = Load.decode([1500] * 40)
BESIDE = Corunner(PROMPTS, 84)
LEVELS = np.array([16, 32, 48, 80])
OTHERS = np.array([116, 100, 84, 52])


@pytest.fixture(scope="module")
def profile():
    return synthetic.profile(noise=0.02)


@pytest.fixture(scope="module")
def exact():
    return synthetic.profile()


def test_names_are_those_of_the_catalogue():
    assert set(NAMES) == set(ESTIMATORS)


def test_solo_run_finds_the_coefficients(exact):
    estimator = SoloRun(exact)
    for units in (52, 84, 100, 116, 132):
        seconds = estimator.predict(prefill_slice(PROMPTS, 5), units)
        assert seconds == pytest.approx(5 * synthetic.prefill_layer(PROMPTS, units), rel=1e-3)
    for units in (16, 48, 80, 132):
        seconds = estimator.predict(decode_step(STEP), units)
        assert seconds == pytest.approx(synthetic.decode_step(STEP, units), rel=1e-3)
    beside = Corunner(PROMPTS, 84)
    assert estimator.predict(decode_step(STEP), 48, beside) == estimator.predict(
        decode_step(STEP), 48
    )
    passed = Load([*PROMPTS.n, *STEP.n], [*PROMPTS.r, *STEP.r])
    both = 36 * synthetic.prefill_layer(PROMPTS, 132) + synthetic.decode_step(STEP, 132)
    assert estimator.predict(hybrid_pass(passed), 132) == pytest.approx(both, rel=1e-3)
    between = estimator.predict(prefill_slice(PROMPTS, 1), 92)  # no level has as many
    assert between == pytest.approx(synthetic.prefill_layer(PROMPTS, 92), rel=0.02)


@pytest.mark.parametrize("name", ["solo-run", "calibrated"])
def test_fewer_units_than_were_measured_take_longer(exact, name):
    """A profile may be of another partition of the device: a lane of few units is not as fast as
    the smallest one that was measured."""
    measured = [each for each in exact.samples if each.units >= 48]
    partial = msgspec.structs.replace(exact, samples=measured)
    estimator = ESTIMATORS[name](partial)
    step = estimator.predict(decode_step(STEP), 16)
    assert step == pytest.approx(synthetic.decode_step(STEP, 16), rel=0.1)
    few = [each for each in exact.samples if each.kind != "prefill" or each.units >= 84]
    estimator = ESTIMATORS[name](msgspec.structs.replace(exact, samples=few))
    piece = estimator.predict(prefill_slice(PROMPTS, 5), 52)
    assert piece == pytest.approx(5 * synthetic.prefill_layer(PROMPTS, 52), rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_all_levels_at_once_are_answered_as_one_by_one(profile, name):
    estimator = ESTIMATORS[name](profile)
    for bound in (False, True):
        together = estimator.predict(
            decode_step(STEP), LEVELS, Corunner(PROMPTS, OTHERS), bound=bound
        )
        pairs = zip(LEVELS.tolist(), OTHERS.tolist(), strict=True)
        single = [
            estimator.predict(decode_step(STEP), d, Corunner(PROMPTS, p), bound=bound)
            for d, p in pairs
        ]
        assert together.tolist() == pytest.approx(single)
        pairs = zip(LEVELS.tolist(), OTHERS.tolist(), strict=True)
        together = estimator.predict(
            prefill_slice(PROMPTS, 3), OTHERS, Corunner(STEP, LEVELS), bound=bound
        )
        single = [
            estimator.predict(prefill_slice(PROMPTS, 3), p, Corunner(STEP, d), bound=bound)
            for d, p in pairs
        ]
        assert together.tolist() == pytest.approx(single)
        assert (
            estimator.predict(hybrid_pass(Load([1, 1, 900], [500, 800, 0])), 132, bound=bound) > 0
        )


@pytest.mark.parametrize("name", NAMES)
def test_three_times_the_layers_take_about_three_times_as_long(profile, name):
    estimator = ESTIMATORS[name](profile)
    some, more = (estimator.predict(prefill_slice(PROMPTS, n), 132) for n in (4, 12))
    assert more == pytest.approx(3 * some, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_without_samples_is_refused(profile, name):
    with pytest.raises(ProfileError, match="measure for longer"):
        ESTIMATORS[name](msgspec.structs.replace(profile, samples=[]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["prefill", "decode", "hybrid"])
def test_a_profile_that_was_cut_off_is_refused_or_good_for_every_launch(name, kind):
    """Else the engine would end at the first launch of a kind that was not measured yet. Only the
    roofline of DuetServe does without hybrid passes."""
    cut_off = synthetic.profile(rounds=1)
    cut_off.samples = [sample for sample in cut_off.samples if sample.kind != kind]
    if name in ("attention-roofline", "serving-roofline") and kind == "hybrid":
        assert ESTIMATORS[name](cut_off).predict(hybrid_pass(Load([1, 900], [500, 0])), 132) > 0
    else:
        with pytest.raises(ProfileError, match="measure for longer"):
            ESTIMATORS[name](cut_off)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_without_lanes_side_by_side_is_good_for_launches_that_are(name):
    alone = synthetic.profile(rounds=1)
    alone.samples = [sample for sample in alone.samples if sample.beside is None]
    estimator = ESTIMATORS[name](alone)
    for launch, other in ((decode_step(STEP), PROMPTS), (prefill_slice(PROMPTS, 3), STEP)):
        before = estimator.predict(launch, 40, Corunner(other, 84))
        estimator.observe(launch, 40, 1.1 * before, Corunner(other, 84))
        assert estimator.predict(launch, 40, Corunner(other, 84)) > 0


def test_the_cost_of_a_prediction_is_told_where_there_is_something_to_ask():
    """Of every estimator or, of a profile without both lanes at work, of none."""
    both = synthetic.profile(rounds=1)
    costs = prediction_seconds(both)
    assert set(costs) == set(NAMES)
    assert all(cost > 0 for pair in costs.values() for cost in pair)
    both.samples = [sample for sample in both.samples if sample.beside is None]
    assert prediction_seconds(both) == {}


def test_calibrated_knows_contention_and_covers_it(profile):
    rows = {(row.estimator, row.case): row for row in table(profile)}
    for case in ("solo prefill", "solo decode", "co-run decode", "co-run prefill"):
        row = rows["calibrated", case]
        assert row.samples >= 8
        assert row.mean < 0.06, case
        assert row.covered >= 0.93, case  # one of sixteen may be missed
        assert row.excess < 0.25, case
    assert rows["solo-run", "co-run decode"].mean > 2 * rows["calibrated", "co-run decode"].mean


def test_calibrated_answers_for_similar_steps_from_memory(profile):
    """The processes are asked once about as much context; what was asked before changes no
    answer."""
    asked = Calibrated(profile)
    for context in range(60_000, 62_000, 40):
        step = Load.decode([context, *[0] * 39])
        for beside in (Corunner(Load([300], [0]), 84), Corunner(PROMPTS, 84)):
            seconds = asked.predict(decode_step(step), 48, beside)
            anew = _Query(decode_step(step), [48], beside)
            base, missed = asked._base.seconds(anew)[0], asked._missed(anew)[0]
            assert seconds == pytest.approx(base * np.exp(missed), rel=1e-12)
    assert len(asked._answers) < 9
    assert seconds == Calibrated(profile).predict(decode_step(step), 48, beside)


def test_calibrated_follows_what_it_sees_slowly(profile):
    estimator = Calibrated(profile)
    before, both = (estimator.predict(decode_step(STEP), 48, other) for other in (None, BESIDE))
    for _ in range(100):
        estimator.observe(decode_step(STEP), 48, before * 1.1)
    assert estimator.predict(decode_step(STEP), 48) == pytest.approx(before * 1.1, rel=0.02)
    assert estimator.predict(decode_step(STEP), 48, BESIDE) == pytest.approx(both * 1.1, rel=0.02)
    for _ in range(1000):
        estimator.observe(decode_step(STEP), 48, before * 10)
    assert estimator.predict(decode_step(STEP), 48) <= before * np.exp(0.21)


def test_calibrated_promises_a_p99_of_what_it_sees(profile):
    """Steps of one configuration differ less than the profile's do from their predictions."""
    estimator = Calibrated(profile)

    def predicted():
        return [estimator.predict(decode_step(STEP), 48, bound=bound) for bound in (False, True)]

    mean, before = predicted()
    above = []
    for seconds in mean * np.exp(np.random.default_rng(0).normal(0, 0.005, 20_000)):
        above.append(seconds > predicted()[1])
        estimator.observe(decode_step(STEP), 48, seconds)
    _, after = predicted()
    assert np.mean(above[2000:]) == pytest.approx(0.01, abs=0.003)
    assert mean < after < (mean + before) / 2
    for _ in range(1000):
        estimator.observe(decode_step(STEP), 48, 10 * mean)
    estimator.observe(decode_step(STEP), 48, predicted()[0])
    slow, most = predicted()
    assert most / slow == pytest.approx(before / mean), "not above the profile's"


def test_bounds_are_longer_while_the_device_is_slow(profile):
    """Of all launches, from the second in a row that makes tokens and took too long to one that
    did not: a single one says nothing."""
    estimator = Calibrated(profile)

    def bounds():
        step = estimator.predict(decode_step(STEP), 48, Corunner(PROMPTS, 84), bound=True)
        return step, estimator.predict(hybrid_pass(STEP), 132, bound=True)

    usual, mean = bounds(), estimator.predict(decode_step(STEP), 48)
    slow, stalled = 1.25 * np.exp(-LAUNCH_EXCESS), np.exp(MAX_SLOW_EXCESS - LAUNCH_EXCESS)
    for times, longer in (
        *((1.25, 1.0), (1.25, slow), (2.0, stalled), (1.09, 1.0)),
        *((2.0, 1.0), (1.25, slow), (40.0, 1.0), (1.25, 1.0), (1.25, slow)),
    ):
        estimator.observe(decode_step(STEP), 48, times * mean)
        assert bounds() == pytest.approx([longer * bound for bound in usual]), times
        estimator._seen = 0  # nothing of it is learnt
        assert estimator.predict(decode_step(STEP), 48) == mean
    estimator.observe(prefill_slice(PROMPTS, 4), 84, 0.001)
    assert bounds() == pytest.approx([slow * bound for bound in usual]), "slices say nothing"


def test_the_guard_covers_what_was_seen_and_is_raised_by_more(profile):
    guard = ContentionGuard(profile)
    for sample in profile.training("decode", beside=True):
        bound = guard.predict(decode_step(sample.load), sample.units, sample.corunner, bound=True)
        assert bound >= max(sample.seconds) * (1 - 1e-9)
    beside = Corunner(PROMPTS, 84)
    solo, before = (
        guard.predict(decode_step(STEP), 48),
        guard.predict(decode_step(STEP), 48, beside, bound=True),
    )
    guard.observe(decode_step(STEP), 48, 3 * solo, beside)
    assert guard.predict(decode_step(STEP), 48, beside, bound=True) == pytest.approx(3 * solo)
    assert before < 3 * solo
    assert (
        guard.predict(decode_step(STEP), 48, bound=True) == solo
    )  # nothing beside: nothing to guard


def test_a_borrowed_cell_covers_what_it_did_not_see(profile):
    (row,) = [r for r in table(profile) if (r.estimator, r.case) == ("guard", "co-run decode")]
    assert row.samples >= 15
    assert row.covered >= 1 - 1.5 / row.samples  # one may be above
    assert row.excess < 0.15


def test_a_borrowed_cell_falls_when_it_has_enough_of_its_own(profile):
    guard = ContentionGuard(profile)
    far = Load.decode([60_000] * 3)  # further than anything measured
    beside = Corunner(Load([200_000], [0]), 84)
    solo, borrowed = (
        guard.predict(decode_step(far), 48),
        guard.predict(decode_step(far), 48, beside, bound=True),
    )
    assert borrowed > solo
    for _ in range(OWN_SAMPLES - 1):
        guard.observe(decode_step(far), 48, 1.01 * solo, beside)
    assert guard.predict(decode_step(far), 48, beside, bound=True) == borrowed
    guard.observe(decode_step(far), 48, 1.01 * solo, beside)
    assert guard.predict(decode_step(far), 48, beside, bound=True) == pytest.approx(1.01 * solo)


def test_a_cell_that_was_profiled_does_not_fall(profile):
    guard = ContentionGuard(profile)
    sample = profile.training("decode", beside=True)[0]
    beside = sample.corunner
    before = guard.predict(decode_step(sample.load), sample.units, beside, bound=True)
    for _ in range(2 * OWN_SAMPLES):
        guard.observe(decode_step(sample.load), sample.units, 0.5 * before, beside)
    assert guard.predict(decode_step(sample.load), sample.units, beside, bound=True) == before


def test_inflection_of_a_curve_of_that_form():
    units = np.array([0.0, 16, 32, 48, 64, 132])
    peak, knee = inflection(Curve(units, 4e12 * np.minimum(1.0, units / 40)))
    assert peak == 4e12
    assert knee == pytest.approx(40, abs=0.5)


def test_sm_roofline_meets_its_samples_and_learns_from_launches(profile):
    estimator = SmRoofline(profile)
    sample = profile.training("decode", beside=True)[3]
    predicted = estimator.predict(decode_step(sample.load), sample.units, sample.corunner)
    assert predicted == pytest.approx(sample.median, rel=0.03)
    before = estimator.predict(decode_step(STEP), 40)
    for _ in range(3):
        estimator.observe(decode_step(STEP), 40, 2 * before)
    assert estimator.predict(decode_step(STEP), 40) == pytest.approx(2 * before, rel=0.02)
    for _ in range(200):  # older launches leave
        estimator.observe(decode_step(STEP), 40, before)
    assert estimator.predict(decode_step(STEP), 40) == pytest.approx(before, rel=0.02)


def test_sm_roofline_knows_what_runs_beside_a_launch():
    """Bullet's execution state (§3.2.1) has the load of the other lane, too."""
    states = [
        execution_states(STEP, (48,), Corunner(Load([new], [0]), 84))[0] for new in (64, 8192)
    ]
    assert states[0] != states[1]
    assert len(states[0]) == len(states[1]) == 8


def test_attention_roofline_is_its_formula(profile):
    """DuetServe §4.1 by hand, where everything is bound by compute."""
    estimator = AttentionRoofline(profile)
    rate = float(estimator._sweep.flop_rate.at(132.0))
    d, m, q = 4096, 12_288, 4096
    linears = 2 * 8192 * (d * (q + 2 * 1024) + q * d + 2 * d * m + m * d)
    attention = 4 * 32 * 8192**2 * 128 + 2 * 32 * 8192**2
    seconds = estimator.predict(prefill_slice(Load([8192], [0]), 1), 132)
    assert seconds == pytest.approx((linears + attention) / rate, rel=0.05)


def test_the_papers_sweep_has_copies_and_products() -> None:
    """A copy reaches less than decode on few units, so predictions for decode are longer."""
    made = synthetic.profile(rounds=1)
    serving = AttentionRoofline(made)
    made.probes = [Probe(units, 1e12 * units, 2e10 * units) for units in (16, 66, 132)]
    paper, option = AttentionRoofline(made), AttentionRoofline(made, serving=True)
    step = decode_step(Load.decode([2048] * 64))
    assert option.predict(step, 16) == serving.predict(step, 16)
    assert paper.predict(step, 16) == pytest.approx(2 * paper.predict(step, 32))
    assert paper.predict(step, 16) > 2 * serving.predict(step, 16)


def test_probes_set_the_roofs() -> None:
    """t = max(F / Π(S), B / HBM(S)): a step waits for bytes, a large slice for arithmetic."""
    step, slice_ = decode_step(Load.decode([2048] * 4)), prefill_slice(Load([8192], [0]), 1)

    def predicted(flop_rate: float, byte_rate: float) -> tuple[float | None, ...]:
        made = synthetic.profile(rounds=0)
        made.probes = [Probe(units, flop_rate * units, byte_rate) for units in (66, 132)]
        return tuple(AttentionRoofline(made).predict(launch, 66) for launch in (step, slice_))

    step_seconds, slice_seconds = predicted(5e12, 3e12)
    assert predicted(5e12, 1.5e12) == pytest.approx((2 * step_seconds, slice_seconds), rel=0.05)
    assert predicted(10e12, 3e12) == pytest.approx((step_seconds, slice_seconds / 2), rel=0.05)


def test_bullets_network_has_a_knee() -> None:
    """W_p (§3.2.2): all-reduces take as long on 32 units as on all, and twice as long on 16."""
    made = synthetic.profile(rounds=1)
    made.key = msgspec.structs.replace(made.key, tensor_parallel=4)
    estimator = SmRoofline(made)
    whole, knee, half = (estimator._network(64, units) for units in (132, 32, 16))
    assert whole == knee == pytest.approx(half / 2)
    assert whole == pytest.approx(2 * 1.5 * 64 * 4096 * 2 / 450e9)


def test_lanes_of_several_ranks_contend_for_the_link() -> None:
    """By the bytes that each would sum in a second, alone; one rank sums nothing."""
    made, step = synthetic.profile(rounds=2), decode_step(Load.decode([2048] * 8))
    beside = _Query(step, (66,), Corunner(Load([1000], [0]), 66))
    states, bases = [], []
    for ranks in (1, 2):
        made.key = msgspec.structs.replace(made.key, tensor_parallel=ranks)
        bases.append(Calibrated(made)._models["decode", True].base)
        states.append(bases[-1].states(beside)[0])
    seconds = bases[1].seconds(_Query(step, (66,)))[0]
    shape = synthetic.SHAPE
    assert len(states[1]) == len(states[0]) + 2
    summed = 2 * shape.layers * 8 * shape.hidden_size * 2
    assert states[1][5] == pytest.approx(summed / seconds, rel=0.01)


def test_narrow_weights_are_fewer_bytes_to_read() -> None:
    plain, narrow = Shape(synthetic.SHAPE, 2), Shape(synthetic.SHAPE, 2, weight_itemsize=1.0)
    saved = plain.layer(7, 7, 90, 700)[0] - narrow.layer(7, 7, 90, 700)[0]
    assert saved == sum(plain.linears(7).bytes) - sum(narrow.linears(7).bytes)
    assert saved == sum(plain.linears(1).flops) / 2  # a byte for each weight, whatever the rows
    assert plain.layer(7, 7, 90, 700)[1] == narrow.layer(7, 7, 90, 700)[1]
    assert plain.classifier(7) == narrow.classifier(7)


def test_tensor_parallelism_shares_the_work_and_adds_the_ring():
    whole, half = Shape(synthetic.SHAPE, 2), Shape(synthetic.SHAPE, 2, 2)
    assert sum(half.linears(512).flops) == pytest.approx(sum(whole.linears(512).flops) / 2)
    assert half.together(STEP).bytes[0] == pytest.approx(whole.together(STEP).bytes[0] / 2)
    made = synthetic.profile(rounds=1)
    made.key = msgspec.structs.replace(made.key, tensor_parallel=2)
    slow = AttentionRoofline(made, Interconnect(bytes_per_second=1e9))
    fast = AttentionRoofline(made, Interconnect(bytes_per_second=1e15, startup_seconds=0.0))
    transfer = 2 * 2 * (2 - 1) * 1000 * 4096 * 2 / (2 * 1e9) + 2 * 2 * 3e-6
    difference = slow.predict(prefill_slice(Load([1000], [0]), 1), 132) - fast.predict(
        prefill_slice(Load([1000], [0]), 1), 132
    )
    assert difference == pytest.approx(transfer, rel=1e-3)


@pytest.mark.parametrize("drawn", [True, False])
def test_a_bound_is_of_configurations_that_were_left_out(drawn: bool) -> None:
    """Each once; anchors are not, beyond which nothing is predicted, where there is another."""
    every = synthetic.profile().training("decode", beside=False)
    samples = [sample for sample in every if drawn or sample.anchors]
    judged: list[str] = []

    class Fitted:
        def __init__(self, seen: Sequence[Sample]) -> None:
            self.seen = {sample.configuration for sample in seen}

        def predicted(self, sample: Sample) -> float:
            assert sample.configuration not in self.seen
            judged.append(sample.configuration)
            return float(np.log(sample.median))

    model: Any = Fitted(())
    promise = _BoundModel(model, lambda seen, _: cast("Any", Fitted(seen)), samples)
    assert promise.quantile == pytest.approx(0.0)
    left = [sample.configuration for sample in samples if not (drawn and sample.anchors)]
    assert 1 < len(left) <= len(samples)
    assert sorted(judged) == sorted(left)


def test_one_sample_in_a_hundred_is_above_the_bound_however_many_launches_it_has() -> None:
    missed = [np.array([i / 100]) for i in range(100)]
    assert _quantile(missed, 100) == 0.98
    assert _quantile([np.full(4, 9.0), *missed[1:]], 100) == 0.99
    assert _quantile([np.full(4, -9.0), *missed[1:]], 100) == 0.98
    assert _quantile([], 0) == 0.0
    few = [np.array([0.1, 0.1, 9.0]), np.array([-0.1])]
    assert _quantile(few, 2) == pytest.approx(6.9646 * 0.1, rel=1e-4)  # Student's, of medians


def test_a_correction_follows_what_is_missed_up_to_a_bound() -> None:
    """Of one configuration, none can be left out to be judged."""
    one = synthetic.profile(rounds=1).training("decode", beside=False)[:1]
    for sign in (1.0, -1.0):
        promise = _BoundModel(cast("Any", None), cast("Any", None), one)
        for _ in range(2):
            promise.learn(sign * 0.5)
        assert promise.correction == pytest.approx(sign * 2 * MEAN_WEIGHT * 0.5)
        for _ in range(99):
            promise.learn(sign * 5.0)
        assert promise.correction == sign * MAX_CORRECTION


def test_contexts_are_asked_for_by_their_leading_bits() -> None:
    for tokens in range(0, 70_000, 37):
        rounded = _rounded(tokens)
        assert abs(rounded - tokens) <= tokens / (1 << CONTEXT_BITS)
        assert len(f"{rounded:b}".rstrip("0")) <= CONTEXT_BITS
