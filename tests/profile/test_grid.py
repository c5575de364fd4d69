"""The plan: some of everything from the first round on, nothing that does not fit."""

import pytest

from tests.estimate.synthetic import LIMITS
from twolane.profile.grid import HYBRIDS_PER_ROUND, LaneCapacity, plan

SMALL = LaneCapacity(2, ((1, 1), (2, 0), (0, 2)), 3000, 16, 16, 512, 511)


@pytest.mark.parametrize("limits", [LIMITS, SMALL])
def test_points_fit_and_have_names_of_their_own(limits: LaneCapacity):
    points = plan(limits, seed=3, rounds=5)
    assert len({point.name for point in points}) == len(points)
    assert all(limits.fits(point.prompts, point.contexts) for point in points)
    assert points == plan(limits, seed=3, rounds=5)
    assert points != plan(limits, seed=4, rounds=5)


@pytest.mark.parametrize("limits", [LIMITS, SMALL])
def test_every_round_has_some_of_everything(limits: LaneCapacity):
    for number in range(4):
        points = [p for p in plan(limits, 0, 4) if p.name.startswith(f"{number}/")]
        solo = {(p.kind, p.prefill_units or p.decode_units) for p in points if p.kind}
        assert {("prefill", u) for u in limits.prefill_units} <= solo
        assert {("decode", u) for u in limits.decode_units} <= solo
        both = [p for p in points if p.kind is None]
        assert [(p.prefill_units, p.decode_units) for p in both] == limits.shared
        assert sum(p.kind == "hybrid" for p in points) == HYBRIDS_PER_ROUND


def test_each_point_of_a_round_is_another_batch():
    points = [p for p in plan(LIMITS, 0, 4) if not p.name.startswith("anchor")]
    assert len({(p.prompts, p.contexts) for p in points}) == len(points)


def test_held_out_points_are_a_fifth_and_no_anchors():
    points = plan(LIMITS, 0, 60)
    assert not any(p.held_out for p in points if p.name.startswith("anchor"))
    rest = [p for p in points if not p.name.startswith("anchor")]
    assert sum(p.held_out for p in rest) / len(rest) == pytest.approx(0.2, abs=0.05)


def test_the_rounds_do_not_depend_on_how_many_there_are():
    """A plan that is cut off and taken up again is the same plan."""
    names = [point.name for point in plan(LIMITS, 0, 3)]
    assert [point.name for point in plan(LIMITS, 0, 6)][: len(names)] == names


@pytest.mark.parametrize("pool", [100_000, 384_000])
def test_a_small_pool_is_measured_to_its_end(pool: int):
    """Nothing should be extrapolated far beyond the largest step, of few rows and of many."""
    limits = LaneCapacity(132, ((100, 32), (132, 0), (0, 132)), pool, 32, 256, 40_960, 8192)
    steps = [p.contexts for p in plan(limits, 0, 0) if p.kind == "decode"]
    held = [sum(r * count for _, r, count in contexts) for contexts in steps]
    assert max(held) > 0.6 * pool
    assert max(contexts[0][2] for contexts in steps) > 100
    assert len({contexts[0] for contexts in steps}) == 10


@pytest.mark.parametrize("pool", [20_000, 384_000])
def test_small_passes_are_measured_beside_the_most_context(pool: int):
    """Otherwise, context's time would follow from passes whose prompts have long prefixes."""
    limits = LaneCapacity(132, ((100, 32), (132, 0), (0, 132)), pool, 32, 256, 40_960, 8192)
    points = plan(limits, 0, 0)
    most = max(sum(r * count for _, r, count in p.contexts) for p in points if p.kind == "decode")
    small = [p for p in points if p.kind == "hybrid" and p.prompts[0][0] <= 1024]
    fresh = [p for p in small if p.prompts[0][1] == 0]
    assert any(sum(r * count for _, r, count in p.contexts) >= most - 1024 for p in fresh)
