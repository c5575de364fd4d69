"""Short causal convolutions between two gates (LFM2): after * conv(before * value), by channel.

Rows of decode find their slots on the device, and those that are not active (`lengths` of 0) move
nothing. Prompts go in chunks, which read what came before them where the rows have it, and from the
slot otherwise.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from twolane.kernels.delta_rule.convolution import (
    PromptStates,
    convolved_chunk,
    convolved_token,
    keep_inputs,
)
from twolane.kernels.delta_rule.prefill import CHUNK
from twolane.kernels.fused import launch_options
from twolane.kernels.runtime.launch import launch

_CHANNELS, _CHUNK_CHANNELS = 512, 64
"""Channels of one program, for rows of decode and for a chunk of a prompt."""


@triton.jit
def _step(
    x, taps, kept, slots, lengths, out, channel_stride, tap_stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    if EARLY:
        gdc_launch_dependents()
    inside &= tl.load(lengths + row) > 0
    own = kept + tl.load(slots + row).to(tl.int64) * (TAPS - 1) * WIDTH
    place = x + row * 3 * WIDTH + channel
    given = place, taps, own, channel, inside, channel_stride, tap_stride
    value = convolved_token(*given, WIDTH, TAPS, True, EARLY)
    after = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + channel, (after * value).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _chunk(
    x, taps, kept, segments, chunks, out, channel_stride, tap_stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < WIDTH
    segment = segments + 6 * tl.load(chunks + 2 * number)
    first = tl.load(chunks + 2 * number + 1).to(tl.int64)
    row = first + tl.arange(0, CHUNK)[:, None]
    there = (row < tl.load(segment).to(tl.int64) + tl.load(segment + 1)) & inside
    given = x, taps, kept, segment, first, channel, inside, 3 * WIDTH, channel_stride, tap_stride
    value = convolved_chunk(*given, WIDTH, TAPS, True, CHUNK, BLOCK)
    after = tl.load(x + row * 3 * WIDTH + WIDTH + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + channel, (after * value).to(out.dtype.element_ty), mask=there)


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
    launch(
        _step, grid, x, taps, kept, slots, lengths, out, *taps.stride(), **constants, num_warps=4
    )


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
        given = x, taps, kept, *part, out, *taps.stride()
        launch(_chunk, grid, *given, **sizes, **tile, num_warps=4)
        keep_inputs(x, kept, part.segments, gated=True)
