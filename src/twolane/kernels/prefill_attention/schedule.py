"""Assignment of a prefill attention's work to blocks, for a given number of SMs.

A *tile* is some consecutive new tokens of one segment; a *work item* is a tile of one head over a
range of keys. Items are dealt to the `units` blocks of a persistent grid, longest first. Where
whole tiles leave blocks idle (256 equal tiles on 100 SMs take three rounds, not 2.56), the longest
are *split*: the tail, which holds the causal diagonal, stays an item, and the keys before it, the
*front*, which every token of the tile sees, are cut into pieces of equal length, one a block. A
piece leaves its partial result in a *slot*; a merge combines the slots of a tile with its tail.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

ROW, TOKENS, POSITION, TABLE, LOW, HIGH, HEAD, SLOT = range(8)
"""Columns of an item: its first row in the batch, its tokens, the first one's position in the
sequence, where the sequence's pages begin in the list of all, the keys [LOW, HIGH) it reads, the
head, and where it goes: a slot, or `WHOLE` or `TAIL`."""
COLUMNS = 8
MERGE_COLUMNS = 5
"""Columns of `Schedule.merges`."""
WHOLE = -1
"""The item is all of its tile and writes to the output."""
TAIL = -2
"""The item is the end of a tile that is split: it writes to the output, and its log-sum-exp for the
merge."""

_OWNER_BITS = 16
_EXACT_ROUNDS = 2
"""The last rounds are dealt one by one to the block with the least work, those before in turn."""
_SPLIT_GAIN = 0.03
"""Splitting must save this share of the time to be worth its launches."""


@dataclass(frozen=True)
class Costs:
    """Costs of a kernel's work in keys: the unit is a tile's time for one more key."""

    block: int
    """Keys computed together."""
    item: int
    """An item beside its keys: loading queries, the last softmax, storing."""
    split: int
    """Everything that comes with splitting: the other launches."""


@dataclass(frozen=True)
class Segments:
    """The sequences of a batch, as columns."""

    reused: Ints
    new: Ints
    rows: Ints
    """First row of each in the batch."""
    tables: Ints
    """Start of each one's pages in the list of all."""


@dataclass(frozen=True)
class BlockSchedule:
    """Items in the order of the blocks that compute them."""

    items: Ints
    """[N, COLUMNS]"""
    bounds: Ints
    """Block b computes the items [bounds[b], bounds[b + 1]), [units + 1]."""


@dataclass(frozen=True)
class Schedule:
    """A batch's attention on `units` blocks."""

    main: BlockSchedule
    """Items that write to the output; also the fronts, where these have no launch of their own."""
    fronts: BlockSchedule | None
    """Pieces of fronts, computed in a launch before; None: there are none, or `main` has them."""
    merges: Ints
    """[split tiles, MERGE_COLUMNS]: row, tokens, head, first slot, slots."""
    slots: int


def tiles(
    segments: Segments, tokens: int, heads: int, window: int | None, costs: Costs
) -> tuple[Ints, Ints]:
    """Work items of a batch in tiles of `tokens`, longest first, and what each costs.

    Returns:
        [N, COLUMNS] and [N]; the heads of a tile are neighbours, so that they share keys in L2.
    """
    counts = -(-segments.new // tokens)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    taken = np.minimum(segments.new[owner] - first, tokens)
    position = segments.reused[owner] + first
    high = position + taken
    low = np.zeros_like(high)
    if window is not None:
        low = np.maximum(position - window + 1, 0) // costs.block * costs.block
    columns = (segments.rows[owner] + first, taken, position, segments.tables[owner], low, high)
    cost = _cost(low, high, costs)
    order = np.argsort(-cost, kind="stable")
    items = np.empty((len(order), heads, COLUMNS), dtype=np.int64)
    items[:, :, :HEAD] = np.stack(columns, axis=1)[order, None]
    items[:, :, HEAD] = np.arange(heads)
    items[:, :, SLOT] = WHOLE
    return items.reshape(-1, COLUMNS), np.repeat(cost[order], heads)


def schedule(
    items: Ints, cost: Ints, units: int, costs: Costs, granule: int, own_launch: bool, split: bool
) -> Schedule:
    """Deal items, longest first, to `units` blocks; split some where that is faster.

    Args:
        granule: fronts are cut at multiples of this many keys.
        own_launch: pieces of fronts cannot run beside other items.
        split: Whether tiles may be split.
    """
    owner, loads = _deal(cost, units)
    best, whole = float(loads.max()), Schedule(_work(items, owner, units), None, _NO_MERGES, 0)
    mean = cost.sum() / units
    if not split or best - mean <= costs.split + _SPLIT_GAIN * best:
        return whole
    chosen = whole
    for count in _candidates(cost, mean, units):
        candidate, seconds = _split(items, cost, count, units, costs, granule, own_launch)
        if candidate is not None and seconds < (1 - _SPLIT_GAIN) * best:
            best, chosen = seconds, candidate
    return chosen


_NO_MERGES = np.zeros((0, MERGE_COLUMNS), dtype=np.int64)


def _cost(low: Ints, high: Ints, costs: Costs) -> Ints:
    return -(-(high - low) // costs.block) * costs.block + costs.item


def _candidates(cost: Ints, mean: float, units: int) -> Sequence[int]:
    """Return how many of the longest tiles may be split: the last round's, those too long."""
    counts = {len(cost) % units, int((cost > mean).sum()), int((cost > mean / 2).sum())}
    return sorted(count for count in counts if 0 < count <= 2 * units)


def _deal(cost: Ints, units: int) -> tuple[Ints, Ints]:
    """Return the block of each item, and each block's work. `cost` falls: longest first.

    Equal to giving each to the block with the least work, but for the first rounds of many, which
    go forth and back over the blocks: that is as even and needs no loop.
    """
    if len(cost) <= units:
        return np.arange(len(cost)), np.concatenate([cost, np.zeros(units - len(cost), np.int64)])
    bulk = 2 * units * max(0, len(cost) // (2 * units) - _EXACT_ROUNDS // 2)
    turn = np.arange(units)
    owner = np.empty(len(cost), dtype=np.int64)
    owner[:bulk] = np.tile(np.concatenate([turn, turn[::-1]]), bulk // (2 * units))
    loads = np.bincount(owner[:bulk], cost[:bulk], minlength=units).astype(np.int64)
    heap = ((loads << _OWNER_BITS) + turn).tolist()
    heapify(heap)
    mask = (1 << _OWNER_BITS) - 1
    rest = []
    for more in (cost[bulk:] << _OWNER_BITS).tolist():
        least = heap[0]
        rest.append(least & mask)
        heapreplace(heap, least + more)
    owner[bulk:] = rest
    return owner, np.array(heap, dtype=np.int64) >> _OWNER_BITS


def _work(items: Ints, owner: Ints, units: int) -> BlockSchedule:
    order = np.argsort(owner, kind="stable")
    bounds = np.zeros(units + 1, dtype=np.int64)
    np.cumsum(np.bincount(owner, minlength=units), out=bounds[1:])
    return BlockSchedule(items[order], bounds)


def _split(
    items: Ints, cost: Ints, count: int, units: int, costs: Costs, granule: int, own_launch: bool
) -> tuple[Schedule | None, float]:
    """Split the `count` longest items; the schedule and what it takes, in keys."""
    front = items[:count, POSITION] // granule * granule
    long = front >= 2 * granule
    chosen = np.flatnonzero(long)
    if not len(chosen):
        return None, math.inf
    # Neighbouring pieces are of one head, as far as can be: they read the same keys.
    chosen = chosen[np.argsort(items[chosen, HEAD], kind="stable")]
    pieces, owner, merges = _cut(items[chosen], front[chosen], units, granule)
    tails = items[chosen].copy()
    tails[:, LOW], tails[:, SLOT] = front[chosen], TAIL
    kept = np.ones(len(items), dtype=bool)
    kept[chosen] = False
    main = np.concatenate([items[kept], tails])
    main_cost = np.concatenate([cost[kept], _cost(tails[:, LOW], tails[:, HIGH], costs)])
    piece_cost = _cost(pieces[:, LOW], pieces[:, HIGH], costs)
    if own_launch:
        fronts = _work(pieces, owner, units)
        spent = np.bincount(owner, piece_cost, minlength=units).max()
    else:
        fronts, spent = None, 0.0
        main = np.concatenate([main, pieces])
        main_cost = np.concatenate([main_cost, piece_cost])
    order = np.argsort(-main_cost, kind="stable")
    dealt, loads = _deal(main_cost[order], units)
    done = Schedule(_work(main[order], dealt, units), fronts, merges, len(pieces))
    return done, float(loads.max()) + float(spent) + costs.split


def _cut(items: Ints, front: Ints, units: int, granule: int) -> tuple[Ints, Ints, Ints]:
    """Lay all fronts end to end and cut them into `units` equal shares.

    Returns:
        The pieces (slots in order), the block of each, and the merges.
    """
    ends = np.cumsum(front // granule)
    shares = np.arange(units + 1) * ends[-1] // units
    cuts = np.unique(np.concatenate([[0], ends, shares]))
    begin, end = cuts[:-1], cuts[1:]
    item = np.searchsorted(ends, begin, side="right")
    base = np.concatenate([[0], ends[:-1]])[item]
    pieces = items[item].copy()
    pieces[:, LOW], pieces[:, HIGH] = (begin - base) * granule, (end - base) * granule
    pieces[:, SLOT] = np.arange(len(pieces))
    owner = np.searchsorted(shares, begin, side="right") - 1
    slots = np.bincount(item, minlength=len(items))
    merges = np.stack(
        [items[:, ROW], items[:, TOKENS], items[:, HEAD], np.cumsum(slots) - slots, slots], axis=1
    )
    return pieces, owner, merges
