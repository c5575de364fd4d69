"""When lanes are due, as `auto` sees them."""

from tests.systems.handmade import view
from twolane.estimate.online import OnlineEstimator
from twolane.systems.auto.queues import queue
from twolane.systems.view import LaneView

FRESH = OnlineEstimator()


def test_a_lane_is_busy_until_the_whole_device_is_free() -> None:
    lanes = {
        "prefill": LaneView(queued=1, units=84, until=0.2),
        "device": LaneView(queued=1, units=132, until=0.3, launch_cost=0.004),
    }
    both = queue(view(FRESH, lanes=lanes), "prefill")
    assert (both.queued, both.until, both.launch_cost) == (2, 0.3, 0.004)


def test_an_end_that_nobody_knows_leaves_all_ends_unknown() -> None:
    lanes = {
        "prefill": LaneView(queued=1, units=84, until=0.2),
        "device": LaneView(queued=1, units=132),
    }
    assert queue(view(FRESH, lanes=lanes), "prefill").until is None
