"""Admission in order: the next prompts of a prefill batch, for every system that keeps an order."""

from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter

from twolane.systems.plan import Chunk
from twolane.systems.view import RequestView, View


def next_chunks(
    view: View, budget: int, *, split: bool, waiting: Sequence[RequestView] | None = None
) -> tuple[Chunk, ...]:
    """Return the next chunks of the waiting requests, of at most `budget` new tokens together.

    Requests are taken in order and not overtaken, with one exception: started prompts hold their
    pages already, so they are taken after a request that lacks memory, which might otherwise wait
    for them forever. A page in each table of every decoding request is left free, so that an
    admission does not cause a preemption at once.

    Args:
        view: The engine's view.
        budget: tokens of the batch.
        split: Whether a prompt that exceeds the budget is cut. Otherwise prompts are taken whole,
            and the first one even if it alone exceeds the budget.
        waiting: the waiting requests in another order than the view's.
    """
    pages = view.free_pages + view.reclaimable_pages
    pages -= len(view.decoding) * view.page_tables
    slots = view.free_slots
    chunks: list[Chunk] = []
    started = sum(1 for _ in takewhile(attrgetter("started"), view.waiting))  # they come first
    for request in view.waiting if waiting is None else waiting:
        if request.started:
            started -= 1
        else:
            pages -= request.page_cost
            slots -= 1
            if pages < 0 or slots < 0:
                if not started:
                    break  # the queue may be long
                continue
        n = min(request.new, budget) if split else request.new
        if n < 1 or (n > budget and chunks):
            break
        chunks.append(Chunk(request.id, n))
        budget -= n
    return tuple(chunks)
