"""When an engine counts as hung."""

import pytest

from twolane.engine.messages import LaneWait
from twolane.frontend.liveness import PING_SECONDS, Liveness


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pass_seconds(alive: Liveness, clock: Clock, seconds: float) -> None:
    """Go on pinging for so long."""
    for _ in range(round(seconds / PING_SECONDS)):
        clock.now += PING_SECONDS
        alive.asked()


def test_silence_beyond_the_bound_is_a_problem_until_the_engine_speaks(clock: Clock) -> None:
    alive = Liveness(10.0, clock)
    alive.asked()
    pass_seconds(alive, clock, 10)
    assert alive.problem is None
    pass_seconds(alive, clock, 2)
    assert alive.problem == "the engine has made no turn for 12 s"
    alive.heard(None)
    assert alive.problem is None


def test_a_process_that_stood_still_itself_blames_nobody(clock: Clock) -> None:
    alive = Liveness(10.0, clock)
    alive.asked()
    clock.now += 60.0
    alive.asked()
    alive.heard([LaneWait("decode", 60.0, 0.1)])  # it may have stood still, too
    assert alive.problem is None
    for waited, late in ((69.0, False), (71.0, True)):
        pass_seconds(alive, clock, waited - (clock.now - 100.0))
        alive.heard([LaneWait("decode", waited, 0.1)])
        assert (alive.problem is not None) == late
    alive.heard([])
    pass_seconds(alive, clock, 12)
    assert alive.problem is not None


@pytest.mark.parametrize(
    ("seconds", "predicted", "hung"),
    [
        (9.0, 0.01, False),
        (11.0, 0.01, True),
        (49.0, 10.0, False),
        (51.0, 10.0, True),
        (59.0, None, False),
        (61.0, None, True),
    ],
)
def test_a_launch_has_the_bound_or_five_times_its_prediction(
    clock: Clock, seconds: float, predicted: float | None, hung: bool
) -> None:
    alive = Liveness(10.0, clock)
    alive.heard([LaneWait("prefill", 0.1, 0.1), LaneWait("decode", seconds, predicted)])
    assert (alive.problem is not None) == hung
    assert alive.longest_wait == seconds
    if hung:
        assert "the decode lane has finished nothing" in str(alive.problem)


def test_news_between_two_answers_do_not_hide_a_hung_lane(clock: Clock) -> None:
    alive = Liveness(10.0, clock)
    alive.heard([LaneWait("decode", 11.0, 0.1)])
    alive.heard(None)
    assert alive.problem is not None
    alive.heard([])
    assert alive.problem is None


def test_a_rank_that_is_silent_without_work_is_a_problem_but_no_hang(clock: Clock) -> None:
    alive = Liveness(10.0, clock)
    alive.heard([], [0.5, 11.0])
    assert alive.problem == "rank 2 has not answered for 11 s"
    assert alive.hung is None
    alive.heard([LaneWait("prefill", 11.0, 30.0)], [11.0, 11.0])
    assert alive.problem is None
    alive.heard([], [0.5, 0.5])
    assert alive.problem is None
