"""When a playout buffer shows the tokens of a request.

Such a buffer shows tokens evenly although they arrive unevenly, as for speech over packets (Andes,
Liu et al. 2024, has one at the client). `engine.pacing` has it in the server and `results.metrics`
computes what a client with one would show.
"""

from collections.abc import Sequence

PACE_FRACTION = 0.97
"""Fraction of the TBT bound from one shown token to the next; the rest of the bound is for what
varies on the way to the client."""

SHORT_BOUND = 0.0115
"""TBT bounds below this, in seconds, have no room to deliver sooner or to keep slack in reserve:
that would make more tokens late than it saves."""


def first_shown(arrival: float, hold: float, deadline: float | None) -> float:
    """Return the time at which the first of several tokens is shown, in seconds.

    It fills the buffer, unless it would miss for that a deadline that it has met on arrival.

    Args:
        arrival: Time at which the token arrives.
        hold: Longest time in seconds for which a token is held.
        deadline: Time at which the first token should be shown at the latest, if there is one.
    """
    full = arrival + hold
    return full if deadline is None or deadline < arrival else min(full, deadline)


def next_shown(arrival: float, before: float, pace: float, hold: float) -> float:
    """Return the time at which a later token is shown, in seconds.

    Args:
        arrival: Time at which the token arrives.
        before: Time at which the token before it is shown.
        pace: Seconds from one shown token to the next if none is late.
        hold: Longest time in seconds for which a token is held.
    """
    return max(arrival, min(before + pace, arrival + hold))


def shown(
    arrivals: Sequence[float], bound: float, buffer: float, deadline: float | None = None
) -> list[float]:
    """Return the times at which a client with a playout buffer shows the tokens of an answer.

    Args:
        arrivals: Arrival times of the tokens in seconds; those of one event are equal.
        bound: TBT bound in seconds.
        buffer: Longest time in seconds for which a token is held; at most the bound is used.
        deadline: Time at which the TTFT bound of the request ends, if it has one.
    """
    if len(arrivals) < 2:
        return list(arrivals)
    hold, pace = min(buffer, bound), PACE_FRACTION * bound
    times = [first_shown(arrivals[0], hold, deadline)]
    for arrival in arrivals[1:]:
        times.append(next_shown(arrival, times[-1], pace, hold))
    return times
