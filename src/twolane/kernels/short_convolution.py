"""Short causal convolutions between two gates (LFM2): after * conv(before * value), by channel.

A request keeps the last `taps - 1` products of `before` and `value` in its slot. Rows of decode
find their slots on the device, and those that are not active (`lengths` of 0) move nothing. Prompts
go in chunks, which read what came before them where the rows have it, and from the slot otherwise;
another kernel keeps the last products when all chunks have read the old ones.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twolane.kernels.delta_rule.prefill import CHUNK, PromptStates
from twolane.kernels.fused import launch_options
from twolane.kernels.runtime.launch import launch

_CHANNELS, _CHUNK_CHANNELS = 512, 64
"""Channels of one program, for rows of decode and for a chunk of a prompt."""


@triton.jit
def _opened(x: tl.tensor, some: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the products of `before` and `value` at some places of rows."""
    before = tl.load(x, mask=some, other=0.0)
    value = tl.load(x + 2 * WIDTH, mask=some, other=0.0)
    return (before.to(tl.float32) * value.to(tl.float32)).to(before.dtype)


@triton.jit
def _step(
    x: tl.tensor,
    taps: tl.tensor,
    kept: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(lengths + row) <= 0:
        return
    own = kept + tl.load(slots + row).to(tl.int64) * (TAPS - 1) * WIDTH + channel
    place = x + row * 3 * WIDTH + channel
    new = _opened(place, inside, WIDTH)
    weight = tl.load(taps + channel * TAPS + TAPS - 1, mask=inside, other=0.0)
    total = new.to(tl.float32) * weight.to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(own + tap * WIDTH, mask=inside, other=0.0)
        weight = tl.load(taps + channel * TAPS + tap, mask=inside, other=0.0)
        total += old.to(tl.float32) * weight.to(tl.float32)
        if tap > 0:
            tl.store(own + (tap - 1) * WIDTH, old, mask=inside)
    tl.store(own + (TAPS - 2) * WIDTH, new, mask=inside)
    after = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = after * total.to(new.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + channel, result.to(new.dtype), mask=inside)


@triton.jit
def _chunk(
    x: tl.tensor,
    taps: tl.tensor,
    kept: tl.tensor,
    segments: tl.tensor,
    chunks: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    segment = segments + 6 * tl.load(chunks + 2 * number)
    begun = tl.load(segment).to(tl.int64)
    row = tl.load(chunks + 2 * number + 1).to(tl.int64) + tl.arange(0, CHUNK)[:, None]
    there = (row < begun + tl.load(segment + 1)) & (channel < WIDTH)
    own = kept + tl.load(segment + 4).to(tl.int64) * (TAPS - 1) * WIDTH
    goes_on = tl.load(segment + 3) == 0
    total = tl.zeros([CHUNK, BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1 - tap)
        new = there & (source >= begun)
        value = _opened(x + source * 3 * WIDTH + channel, new, WIDTH).to(tl.float32)
        if tap < TAPS - 1:
            old = there & (source < begun) & goes_on
            place = own + (TAPS - 1 + source - begun) * WIDTH + channel
            value += tl.load(place, mask=old, other=0.0).to(tl.float32)
        weight = tl.load(taps + channel * TAPS + tap, mask=channel < WIDTH, other=0.0)
        total += value * weight.to(tl.float32)
    kind = out.dtype.element_ty
    after = tl.load(x + row * 3 * WIDTH + WIDTH + channel, mask=there, other=0.0).to(tl.float32)
    result = after * total.to(kind).to(tl.float32)
    tl.store(out + row * WIDTH + channel, result.to(kind), mask=there)


@triton.jit
def _keep(
    x: tl.tensor,
    kept: tl.tensor,
    segments: tl.tensor,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    segment = segments + 6 * tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    begun, count = tl.load(segment).to(tl.int64), tl.load(segment + 1)
    known = kept + tl.load(segment + 4).to(tl.int64) * (TAPS - 1) * WIDTH + channel
    own = kept + tl.load(segment + 2).to(tl.int64) * (TAPS - 1) * WIDTH + channel
    save = tl.load(segment + 5).to(tl.int64)
    saved = kept + save * (TAPS - 1) * WIDTH + channel
    goes_on = tl.load(segment + 3) == 0
    for tap in tl.static_range(TAPS - 1):  # what is read lies behind what was written
        source = count - (TAPS - 1) + tap
        place = x + (begun + source) * 3 * WIDTH + channel
        new = _opened(place, inside & (source >= 0), WIDTH)
        was = inside & (source < 0) & goes_on
        old = tl.load(known + (TAPS - 1 + source) * WIDTH, mask=was, other=0.0)
        value = tl.where(source >= 0, new, old)
        tl.store(own + tap * WIDTH, value, mask=inside)
        tl.store(saved + tap * WIDTH, value, mask=inside & (save >= 0))


def convolve_step(
    x: Tensor, taps: Tensor, kept: Tensor, slots: Tensor, lengths: Tensor, out: Tensor
) -> None:
    """`out` [R, channels] = the short convolution of one new token in each slot.

    Args:
        x: The projected gate before, gate after and value, [R, 3 * channels], contiguous.
        taps: [channels, taps], the latest last.
        kept: The products that each slot keeps, [slots, taps - 1, channels]; moved on.
        slots: int32 [R].
        lengths: Above 0 for active rows, int32 [R].
        out: Written.
    """
    width, count = taps.shape
    constants = {"WIDTH": width, "TAPS": count, "BLOCK": _CHANNELS, **launch_options(x.device)}
    grid = len(x), -(-width // _CHANNELS)
    launch(_step, grid, x, taps, kept, slots, lengths, out, **constants, num_warps=4)


def convolve_prompts(
    x: Tensor, taps: Tensor, kept: Tensor, prompts: Sequence[PromptStates], out: Tensor
) -> None:
    """`out` [T, channels] = the short convolution of the rows of prompts.

    Args:
        x, taps, kept, out: As in `convolve_step`, for T rows.
        prompts: The sequences of the pass, in parts that follow each other.
    """
    width, count = taps.shape
    sizes, tile = {"WIDTH": width, "TAPS": count}, {"CHUNK": CHUNK, "BLOCK": _CHUNK_CHANNELS}
    for part in prompts:
        grid = len(part.chunks), -(-width // _CHUNK_CHANNELS)
        launch(_chunk, grid, x, taps, kept, *part, out, **sizes, **tile, num_warps=4)
        grid = len(part.segments), -(-width // _CHANNELS)
        launch(_keep, grid, x, kept, part.segments, **sizes, BLOCK=_CHANNELS, num_warps=4)
