"""The work beside a launch, for its prediction, and the time for which each lane has worked."""

from twolane.devices import EXCLUSIVE, LaneName
from twolane.engine.messages import LaneWait
from twolane.engine.request import InFlightLaunch
from twolane.engine.state import State
from twolane.estimate.query import Corunner
from twolane.lanes.base import Ticket

OTHER: dict[LaneName, LaneName] = {"prefill": "decode", "decode": "prefill"}
"""The lane beside a lane; nothing runs beside the whole device."""


class PartialOverlap(Exception):
    """The other lane worked for a part of the time only: neither alone nor beside it."""


def corunner_now(state: State, lane: LaneName) -> Corunner | None:
    """Return the work that is running, or queued first, in the other lane."""
    other = OTHER.get(lane)
    for flight in state.in_flight:
        if flight.launch.lane == other and not flight.ticket.done:
            return Corunner(flight.shape.load, flight.launch.units)
    return None


def corunner_during(state: State, flight: InFlightLaunch) -> Corunner | None:
    """Return the work that ran beside a launch that has ended: of several, the longest.

    Raises:
        PartialOverlap: something did, but not all the while.
    """
    ticket, lane = flight.ticket, flight.launch.lane
    other = OTHER.get(lane)
    if other is None:
        return None
    assert ticket.start is not None
    finished = state.finished[other]
    while finished and _end(finished[0]) <= ticket.start:
        finished.popleft()  # launches of a lane run in order: no later one will need it
    candidates = [*finished, *(f for f in state.in_flight if f.launch.lane == other)]
    seconds = max(ticket.seconds, 1e-9)
    shares = [max(0.0, _overlap(each.ticket, ticket)) / seconds for each in candidates]
    covered = sum(shares)
    # Share up to which it counts as having been idle.
    if covered <= 0.02:
        return None
    # Share of a launch's time that the other lane must have worked to count as beside it.
    if covered < 0.95:
        raise PartialOverlap
    longest = candidates[max(range(len(shares)), key=shares.__getitem__)]
    return Corunner(longest.shape.load, longest.launch.units)


def _overlap(its: Ticket, mine: Ticket) -> float:
    """Return the seconds that both ran, of which `mine` has ended; up to 0 if they did not."""
    if its.start is None:
        return 0.0
    assert mine.start is not None
    assert mine.end is not None
    its_end = mine.end if its.end is None else its.end
    return min(mine.end, its_end) - max(mine.start, its.start)


def _end(flight: InFlightLaunch) -> float:
    assert flight.ticket.end is not None
    return flight.ticket.end


def lane_waits(state: State) -> list[LaneWait]:
    """Return the wait for the first launch of each lane that no other launch holds back."""
    first: dict[LaneName, InFlightLaunch] = {}
    waits = []
    for flight in state.in_flight:  # in launch order
        lane = flight.launch.lane
        is_first = not any(name in first for name in EXCLUSIVE[lane])
        first.setdefault(lane, flight)
        if is_first and all(ticket.done for ticket in flight.after):
            seconds = state.now() - _could_begin(state, flight)
            waits.append(LaneWait(lane, max(0.0, seconds), flight.predicted))
    return waits


def _could_begin(state: State, flight: InFlightLaunch) -> float:
    """Return when the lane last progressed or could begin this launch, in seconds on its clock."""
    moments = [flight.launched_at, *(t.end for t in flight.after if t.end is not None)]
    names = EXCLUSIVE[flight.launch.lane]
    moments += [state.progressed[name] for name in names if name in state.progressed]
    return max(moments)
