"""Short causal convolutions, by channel, over inputs in rows of tokens.

The inputs are the first `WIDTH` columns of the rows `x`, or, if `GATED`, the products of these and
of the last `WIDTH` ones (LFM2). A slot keeps the last `TAPS - 1` inputs of its request, [slots,
taps - 1, channels]; another kernel keeps those of prompts when all chunks have read the old ones.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from twolane.kernels.runtime.launch import launch

_CHANNELS = 512
"""Channels whose last inputs one program keeps."""


class PromptStates(NamedTuple):
    """Parts of sequences that can be computed side by side, on the device."""

    segments: Tensor
    """First row, number of rows, slot, whether the sequence begins here, where the states are that
    it begins with, and where they are saved (-1: nowhere) of each; int32 [S, 6]."""
    chunks: Tensor
    """Segment and first row of each chunk, int32 [C, 2]."""


@triton.jit
def inputs_at(place, some, WIDTH: tl.constexpr, GATED: tl.constexpr) -> tl.tensor:
    """Return inputs of the convolution at some places of rows, and zeros elsewhere."""
    value = tl.load(place, mask=some, other=0.0)
    if GATED:
        gate = tl.load(place + 2 * WIDTH, mask=some, other=0.0)
        value = (value.to(tl.float32) * gate.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _weight(taps, tap: tl.constexpr, channel, some, channel_stride, tap_stride) -> tl.tensor:
    """Return one tap of some channels."""
    place = taps + channel * channel_stride + tap * tap_stride
    return tl.load(place, mask=some, other=0.0).to(tl.float32)


@triton.jit
def convolved_token(
    place, taps, kept, channel, inside, channel_stride, tap_stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the convolution of one new input of each channel, at `place`, which the slot at `kept`
    keeps instead of the oldest one. No kernel of a step but this one touches what a slot keeps, so
    that is moved before earlier kernels have ended."""
    own = kept + channel
    total = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(own + tap * WIDTH, mask=inside, other=0.0)
        weight = _weight(taps, tap, channel, inside, channel_stride, tap_stride)
        total += old.to(tl.float32) * weight
        if tap > 0:
            tl.store(own + (tap - 1) * WIDTH, old, mask=inside)
    weight = _weight(taps, TAPS - 1, channel, inside, channel_stride, tap_stride)
    if EARLY:
        gdc_wait()
    new = inputs_at(place, inside, WIDTH, GATED)
    tl.store(own + (TAPS - 2) * WIDTH, new, mask=inside)
    total += new.to(tl.float32) * weight
    return total.to(new.dtype).to(tl.float32)


@triton.jit
def convolved_chunk(
    x, taps, kept, segment, first, channel, some, x_stride, channel_stride, tap_stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the convolution of some channels [1, BLOCK] in a segment's rows from `first` on."""
    begun = tl.load(segment).to(tl.int64)
    row = first + tl.arange(0, ROWS)[:, None]
    there = (row < begun + tl.load(segment + 1)) & some
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1 - tap)
        place = x + source * x_stride + channel
        value = inputs_at(place, there & (source >= begun), WIDTH, GATED).to(tl.float32)
        weight = _weight(taps, tap, channel, some, channel_stride, tap_stride)
        total += value * weight
    if (first < begun + TAPS - 1) & (tl.load(segment + 3) == 0):
        known = kept + tl.load(segment + 4).to(tl.int64) * (TAPS - 1) * WIDTH + channel
        for tap in tl.static_range(TAPS - 1):
            source = row - begun - (TAPS - 1 - tap)
            place = known + (TAPS - 1 + source) * WIDTH
            value = tl.load(place, mask=there & (source < 0), other=0.0).to(tl.float32)
            weight = _weight(taps, tap, channel, some, channel_stride, tap_stride)
            total += value * weight
    return total.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _keep(
    x, kept, segments, x_stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    segment = segments + 6 * tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < WIDTH
    begun, count = tl.load(segment).to(tl.int64), tl.load(segment + 1)
    known = kept + tl.load(segment + 4).to(tl.int64) * (TAPS - 1) * WIDTH + channel
    own = kept + tl.load(segment + 2).to(tl.int64) * (TAPS - 1) * WIDTH + channel
    save = tl.load(segment + 5).to(tl.int64)
    saved = kept + save * (TAPS - 1) * WIDTH + channel
    goes_on = tl.load(segment + 3) == 0
    for tap in tl.static_range(TAPS - 1):  # what is read lies behind what was written
        source = count - (TAPS - 1) + tap
        place = x + (begun + source) * x_stride + channel
        new = inputs_at(place, inside & (source >= 0), WIDTH, GATED)
        was = inside & (source < 0) & goes_on
        old = tl.load(known + (TAPS - 1 + source) * WIDTH, mask=was, other=0.0)
        value = tl.where(source >= 0, new, old)
        tl.store(own + tap * WIDTH, value, mask=inside)
        tl.store(saved + tap * WIDTH, value, mask=inside & (save >= 0))


def keep_inputs(x: Tensor, kept: Tensor, segments: Tensor, *, gated: bool) -> None:
    """Let slots keep the last inputs of their segments.

    Args:
        x: The rows of all segments, [T, any].
        kept: What slots keep, [slots, taps - 1, channels].
        segments: See `PromptStates`.
        gated: Whether inputs are products.
    """
    _, before, width = kept.shape
    constants = {"WIDTH": width, "TAPS": before + 1, "GATED": gated, "CHANNELS": _CHANNELS}
    grid = len(segments), -(-width // _CHANNELS)
    launch(_keep, grid, x, kept, segments, x.stride(0), **constants, num_warps=4)
