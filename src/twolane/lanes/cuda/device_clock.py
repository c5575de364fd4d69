"""Times of device events, in seconds of the host's monotonic clock."""

import time

import torch


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """Return an event that is not recorded yet; a host that waits for it spins."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


class DeviceClock:
    """Times of events, which must have happened, in the order they are asked for.

    The host sees an event a little after it happened and never before, so the smallest distance
    seen between the two clocks is the truest; it may grow only as fast as clocks drift.
    """

    def __init__(self) -> None:
        self._base = new_event(timing=True)
        self._base.record()
        self._base.synchronize()
        self._base_seconds = 0.0
        self._offset = time.monotonic()
        self._synced = 0.0

    def seen(self, event: torch.cuda.Event) -> float:
        """Return the time of an event that the caller has just waited for."""
        seconds = self._device_seconds(event)
        observed = time.monotonic() - seconds
        # Seconds a second that the device's clock and the host's are allowed to part.
        drifted = self._offset + 2e-5 * max(0.0, seconds - self._synced)
        self._offset, self._synced = min(observed, drifted), seconds
        return seconds + self._offset

    def both(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> tuple[float, float]:
        """Return the times of a launch that has just ended. Its begin is looked at when all of it
        is launched, milliseconds late; after an idle time, in which the clocks may have parted,
        only its end says by how much."""
        end = self.seen(ended)
        return end - begun.elapsed_time(ended) * 1e-3, end

    def _device_seconds(self, event: torch.cuda.Event) -> float:
        seconds: float = self._base_seconds + self._base.elapsed_time(event) * 1e-3
        # Events give their distance as float32 milliseconds: over this much it is exact to 1 us.
        if seconds - self._base_seconds > 10.0:
            self._base, self._base_seconds = event, seconds
        return seconds
