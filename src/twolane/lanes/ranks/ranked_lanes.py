"""Rank 0's lanes, whose launches other processes carry out, too."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from twolane.devices import LaneName
from twolane.lanes.base import MachineLanes, OpenLaunches, Ticket
from twolane.lanes.ranks.followers import Followers
from twolane.lanes.work import DropRecord, LaunchRecord, TokenMask, Work


class LocalLanes(MachineLanes, OpenLaunches, Protocol):
    """The lanes of this process."""

    explain: Callable[[BaseException], BaseException]
    """Finds the cause of a lane's error."""

    def close(self, timeout: float = 1.0) -> None:
        """End the threads after what is queued; wait for each for `timeout` seconds at most."""


class RankedLanes:
    """Lanes whose every launch all other ranks carry out, too, in the same order.

    Args:
        lanes: those of rank 0.
        followers: the other ranks.
    """

    def __init__(self, lanes: LocalLanes, followers: Followers) -> None:
        self._lanes, self._followers = lanes, followers
        self.units = lanes.units
        self.levels = lanes.levels
        lanes.explain = followers.explain
        self._watch()

    clock = staticmethod(time.monotonic)

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """See `Lanes.launch`."""
        ticket = self._lanes.launch(lane, units, work, after)
        self._followers.log(LaunchRecord(lane, units, work, tuple(after), ticket.number))
        return ticket

    def set_masks(self, number: int, masks: Sequence[TokenMask]) -> None:
        """See `Lanes.set_masks`; the other ranks do not sample."""
        self._lanes.set_masks(number, masks)

    def drop(self, batch: int) -> None:
        """See `Lanes.drop`."""
        self._followers.log(DropRecord(batch))
        self._lanes.drop(batch)

    def _watch(self) -> None:
        """Have the other ranks watched."""
        self._followers.watch(self._lanes)

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """See `Lanes.load_adapter`; all ranks have read it when this returns."""
        self._lanes.load_adapter(slot, path, digest)
        self._followers.load_adapter(slot, path, digest)

    def drop_adapter(self, slot: int) -> None:
        """See `Lanes.drop_adapter`: the other ranks keep their parts until others come."""
        self._lanes.drop_adapter(slot)

    def silences(self) -> Sequence[float]:
        """See `Lanes.silences`."""
        return self._followers.silences

    def check(self) -> None:
        """See `Lanes.check`."""
        self._followers.check()

    def rest(self, seconds: float) -> None:
        """See `MachineLanes.rest`."""
        self._lanes.rest(seconds)

    def fill_kv(self) -> None:
        """See `MachineLanes.fill_kv`."""
        self._lanes.fill_kv()

    def close(self, timeout: float = 1.0) -> None:
        """See `LocalLanes.close`; ends the other ranks, too."""
        self._lanes.close(timeout)
        self._followers.close(timeout)
