"""Token masks that are computed while their launches run, and sent after them."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from twolane.engine.constrained.constraints import Constraint, GrammarError, Masks
from twolane.engine.request import InFlightLaunch, Phase, Request
from twolane.engine.state import State
from twolane.engine.waiting_queue import masks_of
from twolane.lanes.work import TokenMask


class _Started(NamedTuple):
    requests: Sequence[Request]
    masks: Future[Sequence[bytes | GrammarError]]


class LateMasks:
    """Starts the computation of masks, and sends the lanes those that launches wait for.

    A matcher is asked for one mask at a time: a request gets no token before the mask of the one
    before it was sent. No launch waits for the mask of a slow grammar (see `Request.sits_out`).

    Args:
        state: the engine's.
        masks: computes them.
    """

    def __init__(self, state: State, masks: Masks) -> None:
        self._state, self._masks = state, masks
        self._started: list[_Started] = []

    def start(self) -> None:
        """Begin with the masks of requests that got a token; release launches that they left."""
        state = self._state
        requests = [
            request for request in state.masks_to_compute if request.phase is not Phase.FINISHED
        ]
        state.masks_to_compute.clear()
        together: dict[Request, Constraint] = {}
        for request in requests:
            assert request.constraint is not None
            if request.constraint.pace.apart:
                masks = self._masks.start_apart(request.constraint)
                self._started.append(_Started([request], masks))
            else:
                together[request] = request.constraint
        if together:
            masks = self._masks.start([*together.values()])
            self._started.append(_Started([*together], masks))
        self._send()

    def take(self) -> bool:
        """Take the masks that are computed; return whether there were any."""
        ready = [started for started in self._started if started.masks.done()]
        for started in ready:
            self._started.remove(started)
            for request, mask in zip(started.requests, started.masks.result(), strict=True):
                self._note(request, mask)
        self._send()
        return bool(ready)

    def _note(self, request: Request, mask: bytes | GrammarError) -> None:
        if request.phase is Phase.FINISHED:
            return
        if isinstance(mask, GrammarError):
            self._state.fail_grammar(request, mask)
            self._state.drop_empty_batches()
        else:
            request.mask = mask
            self._state.queue.release(masks_of(request.id))

    def _send(self) -> None:
        """Send the lanes the masks of launches for which all are known."""
        state = self._state
        for flight in list(state.awaiting_masks):
            if all(row.left or row.mask is not None for row in flight.late):
                state.lanes.set_masks(flight.ticket.number, _masks(flight))
                state.awaiting_masks.remove(flight)
                for row in flight.late:
                    row.request.awaiting_masks -= not row.left  # leaving made it zero


def _masks(flight: InFlightLaunch) -> tuple[TokenMask, ...]:
    there = [(row, row.mask) for row in flight.late if not row.left]
    return tuple([TokenMask(row.allocation.slot, mask) for row, mask in there if mask is not None])
