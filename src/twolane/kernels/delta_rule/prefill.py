"""Linear attention of prompts, in chunks (Yang et al. 2024, arXiv:2412.06464, section 3.3).

Within a chunk of `CHUNK` tokens, what the rule adds to the state for each of them solves a
triangular system. One kernel inverts the systems of all chunks and heads at once; another one goes
from chunk to chunk with a state, or a part of its columns, in registers: one program for each
sequence, head and part.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.delta_rule.convolution import PromptStates, convolved_chunk, keep_inputs
from twolane.kernels.delta_rule.decode import (
    LinearLayer,
    channels,
    decay_of,
    gate_heads,
    normalised,
)
from twolane.kernels.delta_rule.rule import StatePart
from twolane.kernels.runtime.launch import launch, power_of_2

CHUNK = 64
"""Tokens of a chunk."""
_HALVES = CHUNK.bit_length() - 1
"""How often a chunk can be halved."""
_COLUMNS = 32
"""Columns of a state that one program has."""


class PromptRoom(NamedTuple):
    """Room for what the kernels of T rows hand each other."""

    mixed: Tensor
    """What the convolution makes of queries, keys and values, [T, mixed_size]."""
    inverse: Tensor
    """The inverted systems of chunks, whose columns have the learning rates of their tokens,
    [T, value_heads * CHUNK]."""
    scores: Tensor
    """Their decayed products of queries and keys, [T, value_heads * CHUNK]."""
    sums: Tensor
    """The sums of logarithmic decays from the beginning of a chunk, float32 [T, value_heads]."""


Lists = npt.NDArray[np.int64]


def prompt_lists(prompts: Sequence[Sequence[StatePart]]) -> list[tuple[Lists, Lists]]:
    """Return the lists of `PromptStates` of prompts whose rows follow each other: of all first
    parts, then of the second ones, which begin where these end, and so on."""
    counts = [sum(part.tokens for part in parts) for parts in prompts]
    begins = np.cumsum([0, *counts]).tolist()
    lists = []
    for turn in range(max(map(len, prompts))):
        segments = list[tuple[int, ...]]()
        chunks = list[tuple[int, int]]()
        for begin, parts in zip(begins, prompts, strict=False):
            if turn < len(parts):
                first, count, slot, fresh, source, save = parts[turn]
                first += begin
                chunks += [(len(segments), row) for row in range(first, first + count, CHUNK)]
                segments.append((first, count, slot, fresh, source, save))
        lists.append((np.array(segments, dtype=np.int64), np.array(chunks, dtype=np.int64)))
    return lists


@triton.jit
def _convolve(
    x, taps, conv, segments, chunks, mixed, x_stride, channel_stride, tap_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    segment = segments + 6 * tl.load(chunks + 2 * number)
    first = tl.load(chunks + 2 * number + 1).to(tl.int64)
    row = first + tl.arange(0, CHUNK)[:, None]
    there = row < tl.load(segment).to(tl.int64) + tl.load(segment + 1)
    dim = tl.arange(0, BLOCK)[None, :]
    channel, some = channels(head, dim, KEY_HEADS, KEY_DIM, VALUE_DIM)
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    given = x, taps, conv, segment, first, channel, some, x_stride, channel_stride, tap_stride
    value = convolved_chunk(*given, WIDTH, TAPS, False, CHUNK, BLOCK)
    heads = head + tl.zeros([CHUNK, 1], dtype=tl.int32)
    value = normalised(value, heads, KEY_HEADS, KEY_DIM).to(mixed.dtype.element_ty)
    tl.store(mixed + row * WIDTH + channel, value, mask=there & some)


@triton.jit
def _decays(
    rates, decay, shift, row, there, head, rate_stride, VALUE_HEADS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the learning rates of a chunk's tokens, 0 beyond its end, and the sums of their
    logarithmic decays."""
    rate = tl.load(rates + row * rate_stride + head, mask=there, other=0.0).to(tl.float32)
    raw = tl.load(rates + row * rate_stride + VALUE_HEADS + head, mask=there, other=0.0)
    g = tl.where(there, decay_of(raw, tl.load(shift + head), tl.load(decay + head)), 0.0)
    return tl.where(there, 1.0 / (1.0 + tl.exp(-rate)), 0.0), tl.cumsum(g, axis=0)


@triton.jit
def _inverted(
    below, place, kind: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Return the inverse of a lower triangle with ones on its diagonal, given what is below that.

    The blocks on the diagonal are inverted from those of half their size, A and B, and the block C
    below A: the new part of the inverse is -B^-1 C A^-1. Keys of length 1 and rates of 1 at most
    keep all numbers small, so products in float16 are as exact as in TF32.
    """
    apart = place[:, None] ^ place[None, :]
    solved = tl.where(apart == 0, 1.0, tl.where(apart == 1, -below, 0.0))
    for half in range(1, HALVES):
        block = tl.where(apart >> half == 1, below, 0.0)
        known = solved.to(kind)
        moved = tl.dot(known, block.to(kind), input_precision=PRECISION)
        solved -= tl.dot(moved.to(kind), known, input_precision=PRECISION)
    return solved


@triton.jit
def _solve(
    mixed, rates, decay, shift, segments, chunks, inverse, scores, sums, rate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    segment = segments + 6 * tl.load(chunks + 2 * number)
    place = tl.arange(0, CHUNK)
    row = tl.load(chunks + 2 * number + 1).to(tl.int64) + place
    there = row < tl.load(segment).to(tl.int64) + tl.load(segment + 1)
    beta, total = _decays(rates, decay, shift, row, there, head, rate_stride, VALUE_HEADS)
    tl.store(sums + row * VALUE_HEADS + head, total, mask=there)
    key = tl.arange(0, KEYS)
    width = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    keyed = mixed + row[:, None] * width + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    keyed += key[None, :]
    inside = there[:, None] & (key < KEY_DIM)[None, :]
    q = tl.load(keyed, mask=inside, other=0.0)
    k = tl.load(keyed + KEY_HEADS * KEY_DIM, mask=inside, other=0.0)
    later = place[:, None] >= place[None, :]
    between = tl.exp(tl.where(later, total[:, None] - total[None, :], 0.0))
    seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    kind = inverse.dtype.element_ty
    at = (row[:, None] * VALUE_HEADS + head) * CHUNK + place[None, :]
    tl.store(scores + at, tl.where(later, seen, 0.0).to(kind), mask=there[:, None])
    # Row i has what token i corrects for each token before it.
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[:, None]
    below = tl.where(place[:, None] > place[None, :], system, 0.0)
    exact: tl.constexpr = tl.float32 if kind == tl.float32 else tl.float16
    solved = _inverted(below, place, exact, HALVES, PRECISION) * beta[None, :]
    tl.store(inverse + at, solved.to(kind), mask=there[:, None])


@triton.jit
def _scan(
    mixed, segments, inverse, scores, sums, rule, out,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    segment = segments + 6 * tl.program_id(2)
    begun, count = tl.load(segment).to(tl.int64), tl.load(segment + 1)
    key, place = tl.arange(0, KEYS), tl.arange(0, CHUNK)
    some_keys, some_values = key < KEY_DIM, column < VALUE_DIM
    place_in = rule + head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + column[None, :]
    size = VALUE_HEADS * KEY_DIM * VALUE_DIM
    held = some_keys[:, None] & some_values[None, :]
    source = place_in + tl.load(segment + 4).to(tl.int64) * size
    state = tl.load(source, mask=held & (tl.load(segment + 3) == 0), other=0.0)
    kind = mixed.dtype.element_ty
    width = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    keyed = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key[None, :]
    valued = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column[None, :]
    for first in range(0, count, CHUNK):
        there = first + place < count
        row = begun + first + place
        total = tl.load(sums + row * VALUE_HEADS + head, mask=there, other=0.0)
        last = begun + tl.minimum(first + CHUNK, count) - 1
        since, end = tl.exp(total)[:, None], tl.load(sums + last * VALUE_HEADS + head)
        inside = there[:, None] & some_keys[None, :]
        start = mixed + row[:, None] * width
        q = tl.load(start + keyed, mask=inside, other=0.0)
        k = tl.load(start + keyed + KEY_HEADS * KEY_DIM, mask=inside, other=0.0)
        v = tl.load(start + valued, mask=there[:, None] & some_values[None, :], other=0.0)
        at = (row[:, None] * VALUE_HEADS + head) * CHUNK + place[None, :]
        solved = tl.load(inverse + at, mask=there[:, None], other=0.0)
        seen = tl.load(scores + at, mask=there[:, None], other=0.0)
        narrow = state.to(kind)
        known = since * tl.dot(k, narrow, input_precision=PRECISION)
        wanted = (v.to(tl.float32) - known).to(kind)
        correction = tl.dot(solved, wanted, input_precision=PRECISION)
        read = since * tl.dot(q, narrow, input_precision=PRECISION)
        read = tl.dot(seen, correction.to(kind), read, input_precision=PRECISION)
        target = out + row[:, None] * VALUE_HEADS * VALUE_DIM + head * VALUE_DIM + column[None, :]
        tl.store(target, read.to(kind), mask=there[:, None] & some_values[None, :])
        left = (correction * tl.exp(end - total)[:, None]).to(kind)
        state = tl.dot(tl.trans(k), left, state * tl.exp(end), input_precision=PRECISION)
    tl.store(place_in + tl.load(segment + 2).to(tl.int64) * size, state, mask=held)
    save = tl.load(segment + 5).to(tl.int64)
    tl.store(place_in + save * size, state, mask=held & (save >= 0))


def prompt_pass(
    x: Tensor,
    rates: Tensor,
    layer: LinearLayer,
    prompts: Sequence[PromptStates],
    room: PromptRoom,
    out: Tensor,
) -> None:
    """`out` [T, value_size] = linear attention of the prompts' rows, whose states move on.

    Args:
        x: See `decode_step`, as for other arguments of the same name; T rows.
        rates: See there.
        layer: See there.
        prompts: The rows, in parts that follow each other.
        room: Room for what the kernels hand each other.
        out: Written.
    """
    for part in prompts:
        _convolve_prompts(x, layer, part, room.mixed)
        _move_states(rates, layer, part, room, out)
    gate_heads(out, x, layer)


def _convolve_prompts(x: Tensor, layer: LinearLayer, prompts: PromptStates, mixed: Tensor) -> None:
    """Write the convolved rows to `mixed`, and keep the last inputs; see `prompt_pass`."""
    delta, lists = layer.delta, (prompts.segments, prompts.chunks)
    block = power_of_2(max(delta.key_dim, delta.value_dim))
    taps = layer.parameters.conv
    taken = x, taps, layer.conv, *lists, mixed, x.stride(0), *taps.stride()
    sizes = {"TAPS": delta.taps, "CHUNK": CHUNK, "BLOCK": block}
    grid = len(prompts.chunks), 2 * delta.key_heads + delta.value_heads
    launch(_convolve, grid, *taken, **layer.shape, **sizes, num_warps=8)
    keep_inputs(x, layer.conv, prompts.segments, gated=False)


def _move_states(
    rates: Tensor, layer: LinearLayer, prompts: PromptStates, room: PromptRoom, out: Tensor
) -> None:
    """Move the states of the rule over the convolved rows, `room.mixed`; see `prompt_pass`."""
    parameters, delta = layer.parameters, layer.delta
    keys, values = max(16, power_of_2(delta.key_dim)), power_of_2(delta.value_dim)
    single = room.mixed.element_size() == 4
    shape = {**layer.shape, "KEYS": keys}
    precision = {"PRECISION": "tf32x3" if single else "tf32"}
    mixed, *solved = room
    given = mixed, rates, parameters.decay, parameters.shift, *prompts, *solved, rates.stride(0)
    grid = len(prompts.chunks), delta.value_heads
    launch(_solve, grid, *given, **shape, CHUNK=CHUNK, HALVES=_HALVES, **precision, num_warps=4)
    columns = max(16, min(_COLUMNS, values))
    parts = -(-delta.value_dim // columns), delta.value_heads, len(prompts.segments)
    stages = 1 if single else 2  # tiles of float32 fill the shared memory
    tile = {**shape, "COLUMNS": columns, "CHUNK": CHUNK, **precision}
    scanned = mixed, prompts.segments, *solved, layer.rule, out
    launch(_scan, parts, *scanned, **tile, num_warps=4, num_stages=stages)
