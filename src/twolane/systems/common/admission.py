"""Who is next for prefill: what every system that takes requests in order shares."""

from collections.abc import Sequence

from twolane.systems.plan import Chunk
from twolane.systems.view import RequestView, View


def next_chunks(
    view: View, budget: int, *, split: bool, waiting: Sequence[RequestView] | None = None
) -> tuple[Chunk, ...]:
    """Chunks of the waiting requests, in order, of at most `budget` new tokens together.

    `waiting` gives them in another order than the view does.

    With `split`, a prompt that exceeds the budget is cut; without, prompts are taken whole and
    the first is taken even if it alone exceeds the budget. Nobody is overtaken: behind the first
    request that does not fit, only started prompts are taken, which have their pages: they go on
    whatever memory is left, or who waits for memory could wait for them for ever. A page for every
    decoding request is left over, so that an admission does not lead straight to a preemption.
    """
    pages = view.free_pages + view.reclaimable_pages - len(view.decoding)
    slots = view.free_slots
    chunks: list[Chunk] = []
    for request in view.waiting if waiting is None else waiting:
        if not request.started:
            pages -= request.page_cost
            slots -= 1
            if pages < 0 or slots < 0:
                if waiting is None:
                    break  # started ones come first there, and the queue may be long
                continue
        n = min(request.new, budget) if split else request.new
        if n < 1 or (n > budget and chunks):
            break
        chunks.append(Chunk(request.id, n))
        budget -= n
    return tuple(chunks)
