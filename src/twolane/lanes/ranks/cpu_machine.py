"""The cores of a machine shared by several ranks, each a process of its own; this one is rank 0."""

from collections.abc import Callable

from twolane.devices import DeviceSettings, OnProgress
from twolane.lanes.cpu.machine import CpuMachine
from twolane.lanes.ranks.followers import Followers
from twolane.lanes.ranks.ranked_lanes import RankedLanes
from twolane.lanes.settings import LaneSizes
from twolane.parallel.group import CpuGroup

FOLLOWER = "twolane.lanes.ranks.cpu_follower"
"""The module that the other ranks run."""


class RankedCpuMachine(CpuMachine):
    """This machine's cores, which all ranks share.

    Raises:
        FieldError: the ranks cannot share the model.
        ValueError: a setting is wrong, or the model.
        RankLost: another rank does not start.
    """

    followers: Followers

    def _group(self, settings: DeviceSettings) -> CpuGroup:
        """See `CpuMachine._group`: starts the other ranks."""
        followers = self.followers = Followers(settings, FOLLOWER, self._cores)
        return CpuGroup(0, self.tp, followers.store, followers.check)

    def start(
        self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress
    ) -> RankedLanes:
        """See `Machine.start`; once only."""
        lanes = self._lanes(sizes, notify)
        self.followers.on_lost = notify
        self.followers.start(sizes)
        return RankedLanes(lanes, self.followers)
