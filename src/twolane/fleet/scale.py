"""Autoscaling: the number of replicas, from the states that they report."""

from collections.abc import Sequence
from dataclasses import dataclass

from twolane.fleet.options import FleetOptions
from twolane.router.state import ReplicaState

MIN_ATTAINMENT = 0.95
"""Attainment of the TTFT bound below which a replica is added."""


@dataclass(frozen=True)
class Trend:
    """Times since which the load has been high or low, on the caller's clock."""

    high_since: float | None = None
    low_since: float | None = None


def wanted(
    states: Sequence[ReplicaState], present: int, now: float, trend: Trend, options: FleetOptions
) -> tuple[int, Trend]:
    """Return the wanted number of replicas, which changes by one at a time, and the new trend.

    Args:
        states: States of the replicas that take requests.
        present: number of replicas, starting ones included.
        now: Current time in seconds.
        trend: The trend that the previous call returned.
        options: bounds and thresholds.
    """
    least, most = options.bounds
    if present < least:
        return least, Trend()
    if not states or len(states) < present:  # what starts will change the load
        return present, Trend()
    high = _high(states, options, len(states))
    # Share of the scale-up thresholds that the load must stay below with one replica fewer, for one
    # to be stopped.
    low = not high and not _high(states, options, 0.5 * (len(states) - 1))
    since = Trend(
        (now if trend.high_since is None else trend.high_since) if high else None,
        (now if trend.low_since is None else trend.low_since) if low else None,
    )
    if since.high_since is not None and now - since.high_since >= options.scale_up_seconds:
        return min(most, present + 1), Trend()
    if since.low_since is not None and now - since.low_since >= options.scale_down_seconds:
        return max(least, present - 1), Trend()
    return present, since


def _high(states: Sequence[ReplicaState], options: FleetOptions, replicas: float) -> bool:
    """Return whether the total load is too high for this number of replicas."""
    seconds = sum(each.prompt_pace.seconds(each.queued) for each in states)
    open_ = sum(each.running + each.waiting for each in states)
    late = any(
        each.waiting and each.attainment is not None and each.attainment < MIN_ATTAINMENT
        for each in states
    )
    return (
        seconds > options.scale_up_queue * replicas
        or open_ > options.scale_up_open * replicas
        or (late and replicas >= len(states))
    )
