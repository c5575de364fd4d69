"""The lanes' queues as `auto` sees them: work on the whole device keeps a lane busy, too."""

from twolane.devices import EXCLUSIVE, LANES, LaneName
from twolane.systems.view import LaneView, View


def queue(view: View, lane: LaneName) -> LaneView:
    """Return the lane's queue with the work on the whole device that keeps it busy; without units.

    What comes next may be launched in this lane or in one of those, and take the host as long as
    the dearest launch there.
    """
    lanes = EXCLUSIVE[lane]
    busy = [view.lanes[name] for name in lanes if view.lanes[name].queued]
    untils = [each.until for each in busy]
    known = [until for until in untils if until is not None]
    until = max(known, default=None) if len(known) == len(untils) else None
    beside = max(view.lanes[name].queued for name in lanes if name != "device")
    queued = view.lanes["device"].queued + beside
    launch_cost = max(each.launch_cost for each in (*busy, view.lanes[lane]))
    return LaneView(queued=queued, until=until, launch_cost=launch_cost)


def due(view: View, lane: LaneName, lead: float) -> bool:
    """Return whether the lane and the device are idle, or will be within `lead` seconds."""
    return queue(view, lane).due(view.now, lead)


def next_due(view: View, lead: float) -> float | None:
    """Return when the first lane will be due that is not due now."""
    wakes = (queue(view, lane).due_at(lead) for lane in LANES)
    return min((at for at in wakes if at is not None and at > view.now), default=None)


def prefill_free_at(view: View) -> float:
    """Return when the prefill lane has nothing left to do, in seconds; now, if not known."""
    return max(view.now, queue(view, "prefill").until or 0.0)


def step_boundary(view: View) -> float:
    """Return when the decode step under way ends, or when the last one ended, in seconds."""
    until = queue(view, "decode").until
    if until is not None:
        return until
    newest = view.decode_rows.last_token()
    return newest if newest else view.now
