"""Slots and pages for the API key whose turn it is."""

from collections import Counter

from twolane.engine.request import Request
from twolane.engine.state import State


def make_room_for_turn(state: State) -> None:
    """Preempt requests of the key that holds most, if the next one of another key finds no room.

    Without that, a key that fills all slots or pages with long answers holds up all others until
    these end. A key loses none to one that holds as much as itself.
    """
    waiting = state.queue.in_turn
    if not waiting or waiting[0].key is None:
        return
    first = waiting[0]
    for victim in [each for each in reversed(state.decoding) if each.key != first.key]:
        slots, pages = _missing(state, first)
        if slots <= 0 and pages <= 0:
            return
        if victim.to_generate > 0 and _holds_more(state, victim, first, slots=slots > 0):
            state.send_back(victim)


def _missing(state: State, request: Request) -> tuple[int, int]:
    """Return how many slots and pages a request lacks, beyond those that will be free when launches
    now in flight have ended; each decoding request has a page of tokens left for its next step."""
    kv = state.kv
    slots = 1 - kv.free_slots
    kept = len(state.decoding) * kv.page_cost
    pages = request.page_cost + kept - kv.free_pages - kv.reclaimable_pages
    if slots > 0 or pages > 0:
        slots, pages = slots - kv.returning_slots, pages - kv.returning_pages
    return slots, pages


def _holds_more(state: State, victim: Request, first: Request, *, slots: bool) -> bool:
    """Return whether the victim's key holds more than any other, and still as much as the key of
    `first` once the victim's place is that one's."""
    held: Counter[int | None] = Counter()
    for request in state.requests.values():
        if request.allocation is not None:
            held[request.key] += 1 if slots else state.kv.held(request.allocation)
    assert victim.allocation is not None
    lost = 1 if slots else state.kv.held(victim.allocation)
    won = 1 if slots else first.page_cost
    mine = held[victim.key]
    return mine == max(held.values()) and mine - lost >= held[first.key] + won
