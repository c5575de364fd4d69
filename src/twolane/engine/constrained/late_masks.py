"""Masks that are computed while the launches that they are for run, and follow them."""

from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

from twolane.engine.constrained.constraints import GrammarError, MaskThreads
from twolane.engine.request import Flight, Phase, Request
from twolane.engine.state import State
from twolane.lanes.work import TokenMask


class _Started(NamedTuple):
    request: Request
    mask: Future[bytes]


class LateMasks:
    """Has the masks of delivered tokens computed, and tells the lanes those that launches wait for.

    A matcher is asked for one mask at a time: a request gets no token before the mask of the one
    before it was told.

    Args:
        state: the engine's.
        threads: compute.
    """

    def __init__(self, state: State, threads: MaskThreads) -> None:
        self._state, self._threads = state, threads
        self._started: deque[_Started] = deque()

    def start(self) -> None:
        """Begin with the masks of requests that got a token; release launches that they left."""
        state = self._state
        asked = [request for request in state.unmasked if request.phase is not Phase.FINISHED]
        state.unmasked.clear()
        constraints = [each.constraint for each in asked if each.constraint is not None]
        if constraints:
            masks = self._threads.start(constraints)
            self._started.extend(map(_Started, asked, masks))
        self._tell()

    def take(self) -> bool:
        """Take the masks that are there, in the order of the tokens; whether there were any."""
        taken = False
        while self._started and self._started[0].mask.done():
            request, mask = self._started.popleft()
            taken = True
            if request.phase is Phase.FINISHED:
                continue
            try:
                request.mask = mask.result()
            except GrammarError as error:
                self._state.fail(request, f"grammar {error}")
                self._state.drop_empty_batches()
        self._tell()
        return taken

    def _tell(self) -> None:
        """Tell the lanes the masks of launches of which none is missing."""
        state = self._state
        for flight in list(state.owed):
            if all(row.left or row.mask is not None for row in flight.late):
                state.lanes.allow(flight.ticket.number, _masks(flight))
                state.owed.remove(flight)
                for row in flight.late:
                    row.request.owed &= row.left  # one that left may wait for a mask elsewhere


def _masks(flight: Flight) -> tuple[TokenMask, ...]:
    there = [(row, row.mask) for row in flight.late if not row.left]
    return tuple([TokenMask(row.allocation.slot, mask) for row, mask in there if mask is not None])
