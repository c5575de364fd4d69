"""How long each lane has kept the engine waiting, for whoever judges whether the device hangs."""

from twolane.common.vocabulary import EXCLUSIVE, LaneName
from twolane.engine.messages import LaneWait
from twolane.engine.request import Flight
from twolane.engine.state import State


def lane_waits(state: State) -> list[LaneWait]:
    """The wait for the first launch of each lane that has one which nothing else holds back."""
    first: dict[LaneName, Flight] = {}
    waits = []
    for flight in state.flights:  # in launch order
        lane = flight.launch.lane
        is_first = not any(name in first for name in EXCLUSIVE[lane])
        first.setdefault(lane, flight)
        if is_first and all(ticket.done for ticket in flight.after):
            seconds = state.now() - _could_begin(state, flight)
            waits.append(LaneWait(lane, max(0.0, seconds), flight.predicted))
    return waits


def _could_begin(state: State, flight: Flight) -> float:
    """When the lane was last seen to go on, or could begin with this launch, on its clock."""
    moments = [flight.launched_at, *(t.end for t in flight.after if t.end is not None)]
    names = EXCLUSIVE[flight.launch.lane]
    moments += [state.progressed[name] for name in names if name in state.progressed]
    return max(moments)
