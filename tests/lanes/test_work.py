"""What launches exclude each other, by what they use of a device."""

import pytest

from twolane.devices import LANES, LaneName
from twolane.lanes.work import DecodeWork, HybridWork, PrefillWork, Work, used_by

PREFILL, STEPS, HYBRID = PrefillWork(0, (), 0, 1, True), DecodeWork((), 1), HybridWork((), ())


def exclude(one: tuple[LaneName, Work], other: tuple[LaneName, Work]) -> bool:
    return not set(used_by(*one)).isdisjoint(used_by(*other))


@pytest.mark.parametrize("work", [PREFILL, STEPS, HYBRID])
def test_the_whole_device_excludes_everything(work: Work) -> None:
    for lane in LANES:
        for other in (PREFILL, STEPS, HYBRID):
            assert exclude(("device", work), (lane, other))


def test_slices_exclude_what_is_in_their_lane_alone() -> None:
    for work in (PREFILL, STEPS, HYBRID):
        assert not exclude(("prefill", PREFILL), ("decode", work))
        assert exclude(("prefill", PREFILL), ("prefill", work))


def test_steps_exclude_each_other_in_whatever_lane() -> None:
    assert exclude(("prefill", STEPS), ("decode", STEPS))
    assert exclude(("prefill", HYBRID), ("decode", STEPS))


def test_steps_in_another_lane_use_the_channel_of_decode() -> None:
    assert exclude(("prefill", STEPS), ("decode", PREFILL))
    assert not exclude(("prefill", HYBRID), ("decode", PREFILL))
