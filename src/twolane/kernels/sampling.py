"""Choosing tokens on the device, inside a CUDA graph, as `twolane.lanes.cpu.sampler` chooses them.

Nothing is sorted. A row's logits lie in *chunks*, one program each, so that a few rows fill a
partition as well as many do. The logits are read

- once if the row is greedy: the largest of each chunk (`_peaks`), then of those (`_winner`);
- twice if it is random: each chunk's first in the exponential race (`_race`), then among those;
- up to five times if top-k or top-p cut the distribution; most chunks are left out early. The
  weight at the cut is found by 15 pivots at once, twice: `_masses` and `_narrow` bring it down to a
  256th of the range of weights. `_narrow` then gathers the tokens there, at most a few thousand,
  and `_cut` searches among them to the bit. Where they are more (a row of nothing but ties), it
  searches the whole row: slow, rare, and as exact.

A weight is the float32 exponential of a scaled logit, at most 1. Sums of weights are integers, in
units of 2**-44: adding them is associative, so that a cut depends neither on the order of the
programs nor on the size of the chunks. Weights order as their bits do.

Logits that are NaN or plus infinity are found on the way (`_peaks`), before anything is banned:
the token of such a row is reported as its complement, which is negative.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.runtime.launch import launch, power_of_2

MAX_BANNED = 8
"""Token ids that a slot's parameters can ban."""
_MAX_INT = 2**31 - 1

WORDS = 8
"""Words of 64 bits that a slot's parameters take."""

_PARAMS = np.dtype(
    [
        ("seed", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("log_min_p", np.float32),
        ("top_k", np.int32),
        ("limit", np.int32),
        ("banned", np.int32, (MAX_BANNED,)),
    ]
)
# The same in elements of each type.
_SEED = tl.constexpr(0)
_TOP_P = tl.constexpr(1)
_TEMPERATURE = tl.constexpr(4)
_LOG_MIN_P = tl.constexpr(5)
_TOP_K = tl.constexpr(6)
_LIMIT = tl.constexpr(7)
_BANNED = tl.constexpr(8)
_BANS = tl.constexpr(MAX_BANNED)
_LONGS = tl.constexpr(WORDS)
_INTS = tl.constexpr(2 * WORDS)

_UNIT = tl.constexpr(2.0**44)
_ABOVE_ALL = tl.constexpr(0x3F800001)
"""One more than the bits of the largest weight, 1."""
_PIVOTS = tl.constexpr(16)
"""Cells that the pivots cut a range of bits into."""
_WARPS = 8


def pack_params(
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    limit: int = 0,
    banned: Sequence[int] = (),
) -> npt.NDArray[np.int64]:
    """Return a slot's sampling parameters as the words [WORDS] of its row of `params`.

    Args:
        temperature: 0: greedy, and nothing else but `limit` and `banned` counts.
        top_k: 0 or less: all tokens.
        top_p: Share of the probability that is kept, in (0, 1].
        min_p: Least probability relative to the likeliest token, in [0, 1].
        seed: any 64 bits.
        limit: index in the sequence from which on nothing is banned.
        banned: token ids that are not chosen before `limit`.

    Raises:
        ValueError: more than `MAX_BANNED` ids are banned.
    """
    if len(banned) > MAX_BANNED:
        raise ValueError(f"banned: {len(banned)} token ids, more than {MAX_BANNED}")
    row = np.zeros((), dtype=_PARAMS)
    row["seed"] = np.uint64(seed & (2**64 - 1)).astype(np.int64)
    row["top_p"] = top_p
    row["temperature"] = temperature
    row["log_min_p"] = np.log(min_p) if min_p > 0.0 else -np.inf
    row["top_k"] = min(max(top_k, 0), _MAX_INT)
    row["limit"] = min(limit, _MAX_INT)
    row["banned"] = [*banned, *[-1] * (MAX_BANNED - len(banned))]
    return row.reshape(1).view(np.int64)


def new_params(slots: int, device: torch.device | str) -> Tensor:
    """Parameters of greedy slots, int64 [slots, WORDS]; fill rows from `pack_params`."""
    return torch.zeros(slots, WORDS, dtype=torch.int64, device=device)


@triton.jit
def _mix(z) -> tl.tensor:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _exponentials(seed, position, ids) -> tl.tensor:
    """`twolane.lanes.cpu.sampler.exponentials`, to the last bits; `seed` is int64."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    stream = _mix(_mix(seed.to(tl.uint64) + golden) + (position.to(tl.uint64) + 1) * golden)
    bits = (_mix(stream + (ids.to(tl.uint64) + 1) * golden) >> 32).to(tl.uint32)
    x = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # -log(1 - x): the difference is inexact where x is small, and the series short.
    series = x * (1.0 + x * (0.5 + x * (1.0 / 3.0 + x * 0.25)))
    return tl.where(x < 1.0 / 64.0, series, -tl.log(1.0 - x))


@triton.jit
def _logits(logits, ids, position, ints, VOCAB: tl.constexpr) -> tl.tensor:
    """Logits of a row at `ids`, float32; minus infinity where banned or beyond the vocabulary."""
    given = tl.load(logits + ids, mask=ids < VOCAB, other=-float("inf"))
    return _unbanned(given, ids, position, ints)


@triton.jit
def _unbanned(given, ids, position, ints) -> tl.tensor:
    """Logits, float32, with minus infinity where banned."""
    x = given.to(tl.float32)
    if position < tl.load(ints + _LIMIT):
        for i in tl.static_range(_BANS):
            x = tl.where(ids == tl.load(ints + _BANNED + i), -float("inf"), x)
    return x


@triton.jit
def _weights(x, floats, peak) -> tl.tensor:
    """Weights of logits, 1 where `x` is `peak` and 0 below min-p (and for NaN)."""
    temperature = tl.load(floats + _TEMPERATURE)
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
        peak = tl.div_rn(peak, temperature)
    scaled = x - peak
    return tl.where(scaled >= tl.load(floats + _LOG_MIN_P), tl.exp(scaled), 0.0)


@triton.jit
def _rough_weights(x, floats, peak) -> tl.tensor:
    """`_weights` to about a millionth, in a third of the instructions."""
    scaled = (x - peak) * (1.0 / tl.load(floats + _TEMPERATURE))
    return tl.where(scaled >= tl.load(floats + _LOG_MIN_P), tl.exp(scaled), 0.0)


@triton.jit
def _bits(weights) -> tl.tensor:
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def _units(weights) -> tl.tensor:
    return (weights * _UNIT).to(tl.int64)


@triton.jit
def _peaks(
    logits, stride, slots, positions, lengths, ints, floats, peaks, best, floors, counts, broken,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Largest logit of each chunk, its id, how many are NaN or plus infinity, and for random rows
    the smallest that is finite."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if tl.load(lengths + row) <= 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    given = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=-float("inf"))
    x = _unbanned(given, ids, tl.load(positions + row) + 1, ints + slot * _INTS)
    peak = tl.max(x)
    place = row * tl.num_programs(1) + chunk
    tl.store(broken + place, tl.sum(1 - (given < float("inf")).to(tl.int32)))
    tl.store(peaks + place, peak)
    tl.store(best + place, tl.min(tl.where(x == peak, ids, VOCAB)))
    if tl.load(floats + slot * _INTS + _TEMPERATURE) > 0.0:
        tl.store(floors + place, tl.min(tl.where(x > -float("inf"), x, float("inf"))))
        if chunk == 0:
            tl.store(counts + row, 0)


@triton.jit
def _filters(ints, doubles, VOCAB: tl.constexpr) -> tl.tensor:
    """Top-k (0: none) and top-p of a slot."""
    top_k = tl.load(ints + _TOP_K)
    top_k = tl.where(top_k < VOCAB, top_k, 0)
    return top_k, tl.load(doubles + _TOP_P)


@triton.jit
def _pivot(low, high, i) -> tl.tensor:
    """Lower end of cell `i` of the bits [low, high)."""
    return (low + (high - low).to(tl.int64) * i // _PIVOTS).to(tl.int32)


@triton.jit
def _measure(weights, top_k, low, high, parts) -> None:
    """Write a chunk's sum at or above each pivot: tokens with a top-k, mass without."""
    bits = _bits(weights)
    value = tl.where(top_k > 0, 1.0, weights)
    for i in tl.static_range(1, _PIVOTS):
        tl.store(parts + i, tl.sum(tl.where(bits >= _pivot(low, high, i), value, 0.0)))


@triton.jit
def _masses(
    logits, stride, slots, positions, lengths, ints, floats, doubles, peaks, floors, masses, cells,
    parts,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """For the rows with a filter, the mass of each chunk and the first pivots."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    if tl.load(lengths + row) <= 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(floats + slot * _INTS + _TEMPERATURE)
    top_k, top_p = _filters(ints + slot * _INTS, doubles + slot * _LONGS, VOCAB)
    if (temperature <= 0.0) | ((top_k <= 0) & (top_p >= 1.0)):
        return
    each = tl.arange(0, CHUNKS)
    known = each < chunks
    peak = tl.max(tl.load(peaks + row * chunks + each, mask=known, other=-float("inf")))
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _logits(
        logits + row * stride, ids, tl.load(positions + row) + 1, ints + slot * _INTS, VOCAB
    )
    weights = _weights(x, floats + slot * _INTS, peak)
    tl.store(masses + row * chunks + chunk, tl.sum(_units(weights)))
    floor = tl.min(tl.load(floors + row * chunks + each, mask=known, other=float("inf")))
    least = tl.div_rn(floor, temperature) - tl.div_rn(peak, temperature)
    least = tl.maximum(least, tl.load(floats + slot * _INTS + _LOG_MIN_P))
    low = _bits(tl.exp(least))
    high = tl.full((), _ABOVE_ALL, tl.int32)
    if chunk == 0:
        tl.store(cells + row * 6, low)
        tl.store(cells + row * 6 + 1, high)
    _measure(weights, top_k, low, high, parts + (row * chunks + chunk) * _PIVOTS)


@triton.jit
def _cell(cells, parts, masses, chunks, top_k, top_p, CHUNKS: tl.constexpr) -> tl.tensor:
    """Return the cell of a row's range with the cut: the highest that still reaches far enough."""
    each = tl.arange(0, CHUNKS)
    known = each < chunks
    total = tl.sum(tl.load(masses + each, mask=known, other=0)).to(tl.float64) / _UNIT
    wanted = tl.where(top_k > 0, top_k.to(tl.float64), top_p * total)
    i = tl.arange(0, _PIVOTS)
    inner = i > 0
    part = tl.load(
        parts + each[:, None] * _PIVOTS + i[None, :],
        mask=known[:, None] & inner[None, :],
        other=0.0,
    )
    reached = tl.sum(part.to(tl.float64), axis=0) >= wanted
    cell = tl.sum((reached & inner).to(tl.int32))
    low, high = tl.load(cells), tl.load(cells + 1)
    return _pivot(low, high, cell), _pivot(low, high, cell + 1)


@triton.jit
def _narrow(
    logits, stride, slots, positions, lengths, ints, floats, doubles, peaks, masses, cells, parts,
    above, counts, tokens, found,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
    COLLECT: tl.constexpr,
) -> None:  # fmt: skip
    """Rows with a filter: one more round of pivots or, with COLLECT, gather what is left.

    Left are the tokens of the cell, and with a top-k those above it, too. `above` is the mass of a
    chunk that is certainly kept and not gathered.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    rows = tl.num_programs(0)
    if tl.load(lengths + row) <= 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(floats + slot * _INTS + _TEMPERATURE) <= 0.0:
        return
    top_k, top_p = _filters(ints + slot * _INTS, doubles + slot * _LONGS, VOCAB)
    if (top_k <= 0) & (top_p >= 1.0):
        return
    cells += row * 6
    parts += row * chunks * _PIVOTS
    if COLLECT:
        cells += 2
        parts += rows * chunks * _PIVOTS
    low, high = _cell(cells, parts, masses + row * chunks, chunks, top_k, top_p, CHUNKS)
    if chunk == 0:
        tl.store(cells + 2, low)
        tl.store(cells + 3, high)
    floats += slot * _INTS
    place = row * chunks + chunk
    parts += (rows * chunks + chunk) * _PIVOTS
    each = tl.arange(0, CHUNKS)
    peak = tl.max(tl.load(peaks + row * chunks + each, mask=each < chunks, other=-float("inf")))
    if _bits(_weights(tl.load(peaks + place), floats, peak)) < low:
        # Nothing of this chunk is as likely as the cut, which is so for most chunks of most rows.
        if COLLECT:
            tl.store(above + place, 0)
        else:
            tl.store(parts + tl.arange(0, _PIVOTS), tl.zeros((_PIVOTS,), tl.float32))
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _logits(
        logits + row * stride, ids, tl.load(positions + row) + 1, ints + slot * _INTS, VOCAB
    )
    if COLLECT:
        weights = _weights(x, floats, peak)
        bits = _bits(weights)
        high = tl.where(top_k > 0, _ABOVE_ALL, high)
        tl.store(above + place, tl.sum(tl.where(bits >= high, _units(weights), 0)))
        inside = (bits >= low) & (bits < high)
        count = tl.sum(inside.to(tl.int32))
        if count > CANDIDATES:
            tl.atomic_add(counts + row, count)
        elif count > 0:
            # In whatever order: only sums are taken of them.
            order = tl.atomic_add(counts + row + tl.zeros_like(bits), 1, mask=inside)
            kept = inside & (order < CANDIDATES)
            tl.store(tokens + row * CANDIDATES + order, ids, mask=kept)
            tl.store(found + row * CANDIDATES + order, weights, mask=kept)
    else:
        _measure(_rough_weights(x, floats, peak), top_k, low, high, parts)


@triton.jit
def _kept(bits, ids, cut, last) -> tl.tensor:
    """Return which tokens are kept: weights above the cut, and those at it up to the id `last`."""
    return (bits > cut) | ((bits == cut) & (ids <= last))


@triton.jit
def _sums(
    row: tl.tuple, size, whole, cut, last, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the number and mass of the kept candidates (`whole`: of all tokens)."""
    logits, tokens, found, position, ints, floats, peak = row
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0, tl.int64)
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        if whole:
            ids = place
            weights = _weights(_logits(logits, ids, position, ints, VOCAB), floats, peak)
        else:
            ids = tl.load(tokens + place, mask=place < size, other=VOCAB)
            weights = tl.load(found + place, mask=place < size, other=0.0)
        kept = _kept(_bits(weights), ids, cut, last)
        count += tl.sum(kept.to(tl.int32))
        mass += tl.sum(tl.where(kept, _units(weights), 0))
    return count, mass


@triton.jit
def _kth(
    row: tl.tuple, size, whole, low, high, top_k, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the largest cut in [low, high) at or above which there are `top_k` tokens."""
    while high - low > 1:
        middle = (low + high) // 2
        count, _ = _sums(row, size, whole, middle, VOCAB - 1, VOCAB, BLOCK)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count >= top_k, high, middle)
    return low


@triton.jit
def _nucleus(
    row: tl.tuple, size, whole, low, high, wanted, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the largest cut in [low, high) at or above which the mass is `wanted`, and the last id
    at it.

    Of the tokens at the cut the first ones are kept, as few as make up the mass.
    """
    while high - low > 1:
        middle = (low + high) // 2
        _, mass = _sums(row, size, whole, middle, VOCAB - 1, VOCAB, BLOCK)
        low = tl.where(mass >= wanted, middle, low)
        high = tl.where(mass >= wanted, high, middle)
    count, mass = _sums(row, size, whole, low, -1, VOCAB, BLOCK)
    one = tl.maximum(_units(low.to(tl.float32, bitcast=True)), 1)
    few = count + (wanted - mass + one - 1) // one
    last = tl.full((), VOCAB - 1, tl.int32)
    all_of_them, _ = _sums(row, size, whole, low, VOCAB - 1, VOCAB, BLOCK)
    if all_of_them > few:
        before = tl.full((), -1, tl.int32)
        while last - before > 1:
            middle = (before + last) // 2
            count, _ = _sums(row, size, whole, low, middle, VOCAB, BLOCK)
            before = tl.where(count >= few, before, middle)
            last = tl.where(count >= few, middle, last)
    return low, last


@triton.jit
def _cut(
    logits, stride, slots, positions, lengths, ints, floats, doubles, peaks, masses, cells, above,
    counts, tokens, found, cuts,
    VOCAB: tl.constexpr, N_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """For each row with a filter, the bits of the least weight kept and the last id that has it."""
    r = tl.program_id(0).to(tl.int64)
    if tl.load(lengths + r) <= 0:
        return
    slot = tl.load(slots + r).to(tl.int64)
    ints += slot * _INTS
    floats += slot * _INTS
    top_k, top_p = _filters(ints, doubles + slot * _LONGS, VOCAB)
    if (tl.load(floats + _TEMPERATURE) <= 0.0) | ((top_k <= 0) & (top_p >= 1.0)):
        return
    each = tl.arange(0, CHUNKS)
    known = each < N_CHUNKS
    place = r * N_CHUNKS + each
    peak = tl.max(tl.load(peaks + place, mask=known, other=-float("inf")))
    row = (
        logits + r * stride, tokens + r * CANDIDATES, found + r * CANDIDATES,
        tl.load(positions + r) + 1, ints, floats, peak,
    )  # fmt: skip
    total = tl.sum(tl.load(masses + place, mask=known, other=0))
    wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    # The mass of what is kept is `sure` plus what `_sums` finds among `size` candidates.
    sure = tl.sum(tl.load(above + place, mask=known, other=0))
    size = tl.load(counts + r)
    low, high = tl.load(cells + r * 6 + 4), tl.load(cells + r * 6 + 5)
    whole = size > CANDIDATES
    if not whole:
        # The pivots were rough: that the cut is among the candidates is checked here.
        _, mass = _sums(row, size, whole, 0, VOCAB - 1, VOCAB, BLOCK)
        missed = (sure >= wanted) | (sure + mass < wanted)
        whole = tl.where(top_k > 0, (size < top_k) & (mass < total), missed)
    if whole:
        sure = tl.full((), 0, tl.int64)
        size = tl.full((), VOCAB, tl.int32)
        low = tl.full((), 0, tl.int32)
        high = tl.full((), _ABOVE_ALL, tl.int32)
    last = tl.full((), VOCAB - 1, tl.int32)
    if top_k > 0:
        high = tl.full((), _ABOVE_ALL, tl.int32)
        low = _kth(row, size, whole, low, high, tl.minimum(top_k, size), VOCAB, BLOCK)
        _, mass = _sums(row, size, whole, low, VOCAB - 1, VOCAB, BLOCK)
        wanted = tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
    if top_p < 1.0:
        low, last = _nucleus(row, size, whole, low, high, wanted - sure, VOCAB, BLOCK)
    tl.store(cuts + 2 * r, low)
    tl.store(cuts + 2 * r + 1, last)


@triton.jit
def _race(
    logits, stride, slots, positions, lengths, ints, floats, doubles, longs, peaks, best, cuts,
    speeds,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the chunk's winner over its most likely token, and its speed; greedy: its logit."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    if tl.load(lengths + row) <= 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    ints += slot * _INTS
    floats += slot * _INTS
    place = row * chunks + chunk
    highest = tl.load(peaks + place)
    if tl.load(floats + _TEMPERATURE) <= 0.0:
        tl.store(speeds + place, highest)
        return
    each = tl.arange(0, CHUNKS)
    peak = tl.max(tl.load(peaks + row * chunks + each, mask=each < chunks, other=-float("inf")))
    top_k, top_p = _filters(ints, doubles + slot * _LONGS, VOCAB)
    cut = tl.full((), 0, tl.int32)
    last = tl.full((), VOCAB - 1, tl.int32)
    if (top_k > 0) | (top_p < 1.0):
        cut, last = tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1)
        if _bits(_weights(highest, floats, peak)) < cut:
            tl.store(speeds + place, -1.0)
            return
    position = tl.load(positions + row) + 1
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    weights = _weights(_logits(logits + row * stride, ids, position, ints, VOCAB), floats, peak)
    speed = weights / _exponentials(tl.load(longs + slot * _LONGS + _SEED), position, ids)
    speed = tl.where(_kept(_bits(weights), ids, cut, last), speed, -1.0)
    fastest = tl.max(speed)
    tl.store(speeds + place, fastest)
    tl.store(best + place, tl.min(tl.where(speed == fastest, ids, VOCAB)))


@triton.jit
def _winner(
    lengths, speeds, best, broken, out,
    VOCAB: tl.constexpr, N_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the token of each row: the best of its chunks, of the lowest id where several are; its
    complement where logits are broken."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(lengths + row) <= 0:
        return
    each = tl.arange(0, CHUNKS)
    known = each < N_CHUNKS
    speed = tl.load(speeds + row * N_CHUNKS + each, mask=known, other=-float("inf"))
    token = tl.load(best + row * N_CHUNKS + each, mask=known, other=VOCAB)
    token = tl.min(tl.where(speed == tl.max(speed), token, VOCAB))
    token = tl.minimum(token, VOCAB - 1)
    count = tl.sum(tl.load(broken + row * N_CHUNKS + each, mask=known, other=0))
    tl.store(out + row, tl.where(count > 0, -1 - token, token))


def chosen(tokens: Tensor) -> Tensor:
    """Return the tokens that `Sampler.sample` has chosen, of rows with broken logits too."""
    return torch.where(tokens < 0, ~tokens, tokens)


class Sampler:
    """Buffers to sample up to `rows` rows; one for each stream that samples.

    Args:
        rows: the most rows of a call.
        vocab: tokens of the vocabulary.
        device: The device of the logits.
        chunk: tokens that one program reads; a power of 2.
        candidates: tokens of a row among which a top-k or top-p cut is searched quickly.
    """

    def __init__(
        self,
        rows: int,
        vocab: int,
        device: torch.device | str,
        chunk: int = 8192,
        candidates: int = 4096,
    ) -> None:
        self.vocab, self._chunk, self._candidates = vocab, chunk, candidates
        self._chunks = triton.cdiv(vocab, chunk)
        each = rows * self._chunks

        def buffer(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._peaks, self._floors, self._speeds = (buffer(each, torch.float32) for _ in range(3))
        self._best, self._broken = (buffer(each, torch.int32) for _ in range(2))
        self._masses, self._above = (buffer(each, torch.int64) for _ in range(2))
        self._cells, self._cuts = buffer(6 * rows, torch.int32), buffer(2 * rows, torch.int32)
        self._parts = buffer(2 * each * _PIVOTS.value, torch.float32)
        self._counts = buffer(rows, torch.int32)
        self._tokens = buffer(rows * candidates, torch.int32)
        self._found = buffer(rows * candidates, torch.float32)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        lengths: Tensor,
        params: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Sample the token after each active row, on the current stream, without a host round trip.

        Args:
            logits: [R, vocab], float32 or 16-bit; a row's are dense. Left as they are.
            slots: the slot that each row belongs to, int [R].
            positions: place, in its sequence, of the token that the logits came from, int [R]; the
                one chosen has the next.
            lengths: above 0 for active rows, int [R]; others are skipped.
            params: Parameters of each slot, from `new_params`.
            out: int [R]; the complement (`~token`) where logits of the row are NaN or plus
                infinity.
        """
        rows = len(logits)
        ints, floats = params.view(torch.int32), params.view(torch.float32)
        row = (logits, logits.stride(0), slots, positions, lengths, ints, floats)
        doubles = params.view(torch.float64)
        grid = (rows, self._chunks)
        sizes = {"VOCAB": self.vocab, "CHUNK": self._chunk}
        chunks = power_of_2(self._chunks)
        warps = {"num_warps": _WARPS}
        launch(
            _peaks, grid, *row, self._peaks, self._best, self._floors, self._counts,
            self._broken, **sizes, **warps,
        )  # fmt: skip
        launch(
            _masses, grid, *row, doubles, self._peaks, self._floors, self._masses, self._cells,
            self._parts, **sizes, CHUNKS=chunks, **warps,
        )  # fmt: skip
        for collect in (False, True):
            launch(
                _narrow, grid, *row, doubles, self._peaks, self._masses, self._cells, self._parts,
                self._above, self._counts, self._tokens, self._found, **sizes, CHUNKS=chunks,
                CANDIDATES=self._candidates, COLLECT=collect, **warps,
            )  # fmt: skip
        launch(
            _cut, (rows,), *row, doubles, self._peaks, self._masses, self._cells, self._above,
            self._counts, self._tokens, self._found, self._cuts, VOCAB=self.vocab,
            N_CHUNKS=self._chunks, CHUNKS=chunks, CANDIDATES=self._candidates,
            BLOCK=min(2048, self._candidates), **warps,
        )  # fmt: skip
        launch(
            _race, grid, *row, doubles, params, self._peaks, self._best, self._cuts, self._speeds,
            **sizes, CHUNKS=chunks, **warps,
        )  # fmt: skip
        launch(
            _winner, (rows,), lengths, self._speeds, self._best, self._broken, out,
            VOCAB=self.vocab, N_CHUNKS=self._chunks, CHUNKS=chunks, num_warps=1,
        )  # fmt: skip
        return out
