"""Rank 0's lanes, where prefill and decode have devices of their own (1P1D).

This process decodes. Rank 1 has the model and a KV pool of its own, carries out the prefill lane's
launches, and pushes the keys and values of each layer into this process's pool. At the end of a
prompt it sends the hidden states from which this process samples. This process pushes what decode
steps write into rank 1's pool, so that both pools hold every page and prefixes are shared.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from twolane.devices import LaneName
from twolane.lanes.base import Ticket
from twolane.lanes.ranks.followers import Followers
from twolane.lanes.ranks.ranked_lanes import LocalLanes, RankedLanes
from twolane.lanes.work import DecodeWork, FillRecord, LaunchRecord, PrefillWork, Work


class DisaggregatedLanes(RankedLanes):
    """A prefill lane on rank 1 and a decode lane in this process, each with a whole device.

    Args:
        lanes: this process's; their prefill lane waits for rank 1 and samples.
        followers: rank 1.
        progress: changes when rank 1 goes on, also before it has ended a slice.
    """

    def __init__(
        self, lanes: LocalLanes, followers: Followers, progress: Callable[[], int] = lambda: 0
    ) -> None:
        self._progress = progress
        self._logged = 0
        """Number of launches sent to rank 1."""
        super().__init__(lanes, followers)
        units = lanes.units
        self.levels = ((units, units), (units, 0), (0, units))

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """See `Lanes.launch`.

        Raises:
            ValueError: it is neither a slice in the prefill lane nor decode steps in the other one,
                or a slice waits for decode steps.
        """
        if lane == "prefill" and isinstance(work, PrefillWork) and not after:
            ticket = self._lanes.launch(lane, units, work, after)
            sent = replace(work, masks=(), late=())  # rank 1 does not sample
            self._followers.log(LaunchRecord(lane, units, sent, (), self._logged))
            self._logged += 1
            return ticket
        if lane == "decode" and isinstance(work, DecodeWork):
            return self._lanes.launch(lane, units, work, after)
        raise ValueError(
            f"{type(work).__name__} is launched in the {lane} lane, where prefill and decode have "
            "devices of their own"
        )

    def fill_kv(self) -> None:
        """See `MachineLanes.fill_kv`: both pools."""
        self._followers.log(FillRecord())
        super().fill_kv()

    def _watch(self) -> None:
        """Have rank 1 watched by the launches in which it takes part."""
        self._followers.watch(_Prompts(self._lanes), self._progress)


class _Prompts:
    """The launches of the prefill lane."""

    def __init__(self, lanes: LocalLanes) -> None:
        self._lanes = lanes

    def waiting(self) -> Sequence[Ticket]:
        """See `OpenLaunches.waiting`."""
        return [ticket for ticket in self._lanes.waiting() if ticket.lane == "prefill"]
