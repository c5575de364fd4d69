"""How many replicas there should be."""

import pytest

from twolane.common.errors import FieldError
from twolane.engine.prompt_work import PromptPace, PromptWork
from twolane.fleet.options import FleetOptions
from twolane.fleet.scale import Trend, wanted
from twolane.router.state import ReplicaState

OPTIONS = FleetOptions(
    replicas=1,
    max_replicas=3,
    scale_up_queue=0.5,
    scale_up_open=4,
    scale_up_seconds=2,
    scale_down_seconds=10,
)
PACE = PromptPace(token=1e-3)
IDLE = ReplicaState(prompt_pace=PACE)
QUEUED = ReplicaState(prompt_pace=PACE, queued=PromptWork(3, 600, 0))
BUSY = ReplicaState(running=5)
CROWDED = ReplicaState(running=2, waiting=3)
LATE = ReplicaState(waiting=1, attainment=0.5)


def after(states, times, present=None, options=OPTIONS) -> list[int]:
    """What is wanted at each of these times, the load being the same."""
    trend, found = Trend(), []
    for now in times:
        count, trend = wanted(states, present or len(states), now, trend, options)
        found.append(count)
    return found


@pytest.mark.parametrize("state", [QUEUED, BUSY, CROWDED, LATE])
def test_a_load_that_stays_high_adds_one_replica(state) -> None:
    assert after([state], [0.0, 1.0, 2.0]) == [1, 1, 2]


def test_first_tokens_in_time_and_a_load_within_bounds_add_none() -> None:
    """19 of 20 are enough, and it does not matter how many were when nothing waits. Nor does a load
    that is as large as it may be."""
    full = ReplicaState(prompt_pace=PACE, running=4, queued=PromptWork(1, 500, 0))
    for state in (ReplicaState(waiting=1, attainment=0.95), ReplicaState(attainment=0.5), full):
        assert after([state], [0.0, 2.0]) == [1, 1]


def test_a_load_that_was_high_for_a_moment_adds_none() -> None:
    trend = Trend()
    for now, state in enumerate([QUEUED, QUEUED, IDLE, QUEUED, QUEUED]):
        count, trend = wanted([state], 1, float(now), trend, OPTIONS)
        assert count == 1


def test_there_are_never_more_than_the_most_nor_fewer_than_the_least() -> None:
    assert after([QUEUED] * 3, [0.0, 2.0, 4.0])[-1] == 3
    assert after([IDLE], [0.0, 10.0, 30.0])[-1] == 1
    assert after([], [0.0]) == [1]


def test_one_replica_less_when_the_others_suffice_for_long() -> None:
    assert after([IDLE, IDLE], [0.0, 9.0, 10.0]) == [2, 2, 1]
    one_busy = ReplicaState(running=3)
    assert after([one_busy, IDLE], [0.0, 10.0]) == [2, 2]  # it would be too much for one


def test_nothing_changes_while_a_replica_starts() -> None:
    assert after([QUEUED], [0.0, 2.0, 4.0], present=2) == [2, 2, 2]


def test_bounds_that_contradict_are_refused() -> None:
    with pytest.raises(FieldError, match="between min-replicas and max-replicas, not 2"):
        _ = FleetOptions(replicas=2, max_replicas=1).bounds
