"""The small operations between a layer's matrix products and around a decode step, one kernel each.

All of them run on torch's current stream, read lengths and positions on the device and allocate
nothing, so that they can be captured in a CUDA graph. Tensors are float32, bfloat16 or float16;
arithmetic is float32, rounded to the tensors' type where Hugging Face's Llama rounds. Where the
next product multiplies with e4m3, they round their result to that as well, as
`twolane.model.fp8.quantise_rows` does.

On Hopper the kernels between a layer's products start before the kernel in front of them has ended
(programmatic dependent launch), and let the next one start: see `_early`.

A row is *active* while `lengths[row]` is above 0. Rows that are not pad a batch: nothing is written
for them, and their slots, positions and pages are not followed.
"""

from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.pool import MirroredPool, RoundedPool, WrittenPool, exponents_of, values_of
from twolane.kernels.runtime.launch import launch, power_of_2

Out = TypeVar("Out", bound=Tensor | Quantised)
_HEADS = 16
"""Heads of one token that one program rotates: 4 KB of bfloat16 at 128 dimensions."""
_ELEMENTS = 2048
"""Elements that one program of an elementwise kernel makes."""


def warps(elements: int) -> int:
    """Warps of a program that handles this many elements."""
    # Elements that a warp handles: two loads of 16 bytes a thread in 16-bit types.
    return min(max(elements // 512, 1), 16)


@cache
def _early(device: torch.device) -> bool:
    """Return whether kernels are launched early there, with `EARLY`.

    Such a kernel may run while earlier ones do, back to the last that was launched plainly
    (in a decode step, `embed`). So until it has waited for them it writes nothing that they read,
    and reads only what none of them writes: weights, lengths, slots, positions, page tables, tokens
    of the KV pool and states that an earlier step wrote. Every program waits, since later kernels
    rely on it.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that takes `EARLY`."""
    return {"EARLY": True, "launch_pdl": True} if _early(device) else {"EARLY": False}


@triton.jit
def quantised(x) -> tuple[tl.tensor, tl.tensor]:
    """e4m3 values of a row `x`, and their scale."""
    wide = x.to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide)), 1e-12), 448.0)
    return tl.div_rn(wide, scale).to(tl.float8e4nv), scale


@triton.jit
def rms_normal(value, scale, eps, HIDDEN: tl.constexpr) -> tl.tensor:
    """Return the RMS norm of a row of HIDDEN numbers, which zeros follow."""
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps)
    return ((wide * inverse).to(value.dtype).to(tl.float32) * scale).to(value.dtype)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    weight: Tensor
    """[hidden]"""
    eps: float


@triton.jit
def _rms_norm(
    x, residual, weight, out, scales, x_stride, out_stride, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, QUANTISED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        place = residual + row * HIDDEN + column
        total = value.to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = total.to(value.dtype)
        tl.store(place, value, mask=inside)
    normal = rms_normal(value, scale, eps, HIDDEN)
    if QUANTISED:
        normal, row_scale = quantised(normal)
        tl.store(scales + row, row_scale)
    tl.store(out + row * out_stride + column, normal, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Out) -> Out:
    """`out` [T, hidden] = each row of `x` over its root mean square, times `weight` [hidden].

    Rows of `x` and of `out` may lie apart (`x.stride(0)`); `out` may be `x`.
    """
    _launch_norm(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Out) -> Out:
    """`residual` += `x`, then `out` = the RMS norm of `residual`; all [T, hidden].

    `out` may be `x`.
    """
    _launch_norm(x, residual, weight, eps, out)
    return out


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Activations
) -> None:
    rows, hidden = x.shape
    block = power_of_2(hidden)
    values, scales = parts(out)
    launch(
        _rms_norm, (rows,), x, x if residual is None else residual, weight, values, scales,
        x.stride(0), values.stride(0), eps,
        HIDDEN=hidden, BLOCK=block, ADD=residual is not None, QUANTISED=isinstance(out, Quantised),
        num_warps=warps(block), **launch_options(x.device),
    )  # fmt: skip


def parts(out: Activations) -> tuple[Tensor, Tensor]:
    """Return the tensors that a kernel writes values and scales to; without scales, `out` twice."""
    return (out.values, out.scales) if isinstance(out, Quantised) else (out, out)


@triton.jit
def _quantise(
    x, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    values, scale = quantised(tl.load(x + row * WIDTH + column, mask=inside, other=0.0))
    tl.store(scales + row, scale)
    tl.store(out + row * WIDTH + column, values, mask=inside)


def quantise(x: Tensor, out: Quantised) -> Quantised:
    """`out` [T, k] = `x` [T, k], contiguous, with a scale for each row.

    For what attention makes: a row's scale is a matter of all heads, which are computed apart.
    """
    rows, width = x.shape
    block = power_of_2(width)
    launch(
        _quantise, (rows,), x, out.values, out.scales,
        WIDTH=width, BLOCK=block, num_warps=warps(block), **launch_options(x.device),
    )  # fmt: skip
    return out


def rotary_table(frequencies: Tensor, scales: Tensor | float, positions: int) -> Tensor:
    """Cosines and sines, times `scales`, of all angles: float32 [positions, head_dim / 2, 2].

    The angles are float32 products of position and `frequencies` [head_dim / 2], as in
    `transformers` and in the CPU's decoder, so that long contexts see the same rotation. A table
    costs 64 MB at 131,072 positions and 128 dimensions, and a token reads 512 bytes of it; sines of
    large angles would cost the kernel a slow path.
    """
    places = torch.arange(positions, dtype=torch.float32, device=frequencies.device)
    angles = places[:, None] * frequencies.float()
    return torch.stack((angles.cos() * scales, angles.sin() * scales), dim=-1)


@triton.jit
def _qkv_rope_write(
    qkv, positions, norm, table, q_out, pool, exponents, pool_copy, exponents_copy, slots, pages,
    lengths, qkv_stride, q_stride, page_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, LAST: tl.constexpr, V_NORM: tl.constexpr, PAGED: tl.constexpr,
    ROUNDED: tl.constexpr, MIRRORED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    rotated = head < Q_HEADS + KV_HEADS
    inside = (head < Q_HEADS + 2 * KV_HEADS) & (dim < DIM)
    if EARLY:
        gdc_launch_dependents()
    else:  # under way while the chain of loads that finds the page runs; of a row not active, too
        x = tl.load(qkv + row * qkv_stride + head * DIM + dim, mask=inside, other=0.0)
    if PAGED:
        active = tl.load(lengths + row) > 0
        owner = tl.load(slots + row, mask=active, other=0).to(tl.int64)
        position = tl.load(positions + row, mask=active, other=0).to(tl.int64)
        page = tl.load(pages + owner * page_stride + position // PAGE, mask=active, other=0)
        page = page.to(tl.int64)
        offset = position % PAGE
    else:
        place = tl.load(slots + row).to(tl.int64)
        active = place >= 0
        position = tl.load(positions + row, mask=active, other=0).to(tl.int64)
        page = place // PAGE
        offset = place % PAGE
    turn = tl.load(
        table + position * DIM + dim + tl.zeros_like(head), mask=inside & rotated, other=0.0
    )
    if EARLY:
        gdc_wait()
        x = tl.load(qkv + row * qkv_stride + head * DIM + dim, mask=inside, other=0.0)
    if not active:
        return
    value = x.to(tl.float32)
    if NORM or V_NORM:
        inverse = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / DIM + eps)
    if V_NORM:
        value = tl.where(rotated, value, (value * inverse).to(x.dtype).to(tl.float32))
    if NORM:
        scale = tl.load(norm + head * DIM + dim, mask=inside & rotated, other=0.0).to(tl.float32)
        normal = value * inverse
        if not LAST:
            normal = (normal.to(x.dtype).to(tl.float32) * scale).to(x.dtype).to(tl.float32)
        value = tl.where(rotated, normal, value)
    cos, sin = tl.split(tl.reshape(turn, (HEADS, BLOCK // 2, 2)))
    even, odd = tl.split(tl.reshape(value, (HEADS, BLOCK // 2, 2)))
    pairs = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    turned = tl.reshape(pairs, (HEADS, BLOCK))
    if LAST:  # a rotation leaves the root mean square as it is
        turned = turned.to(x.dtype).to(tl.float32) * scale
    value = tl.where(rotated, turned, value).to(x.dtype)
    tl.store(q_out + row * q_stride + head * DIM + dim, value, mask=inside & (head < Q_HEADS))
    part = (head >= Q_HEADS + KV_HEADS).to(tl.int32)  # 0: keys, 1: values
    kv_head = head - Q_HEADS - part * KV_HEADS
    line = ((page * KV_HEADS + kv_head) * 2 + part) * PAGE + offset
    kept = inside & (head >= Q_HEADS)
    if ROUNDED:
        wide = value.to(tl.float32)
        bits = tl.max(tl.abs(wide), axis=1, keep_dims=True).to(tl.int32, bitcast=True)
        # The least power of two with which 448 is not less than the largest number.
        exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 135, -100)
        small = wide * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        small = small.to(tl.float8e4nv)
        tl.store(pool + line * DIM + dim, small, mask=kept)
        real = (head >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
        tl.store(exponents + line, exponent.to(tl.int8), mask=real)
        if MIRRORED:
            tl.store(pool_copy + line * DIM + dim, small, mask=kept)
            tl.store(exponents_copy + line, exponent.to(tl.int8), mask=real)
        factor = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
        value = (small.to(tl.float32) * factor).to(x.dtype)
    else:
        tl.store(pool + line * DIM + dim, value, mask=kept)
        if MIRRORED:
            tl.store(pool_copy + line * DIM + dim, value, mask=kept)
    if not PAGED:  # for attention to prompts alone, which reads neighbours faster than pages
        changed = kept & (rotated | ROUNDED | V_NORM)
        tl.store(qkv + row * qkv_stride + head * DIM + dim, value, mask=changed)


def qkv_rope_write(
    qkv: Tensor,
    positions: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    table: Tensor,
    q_out: Tensor,
    pool: WrittenPool,
    places: Tensor,
    slots: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    norm_last: bool = False,
    v_norm: bool = False,
    own: bool = True,
) -> None:
    """Normalise (Qwen3) and rotate queries and keys; write keys and values into the KV pool.

    The keys also go back to their place in `qkv`, where the values are: attention sees the same
    there as in the pool, so values, too, go back from a pool that is rounded.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * head_dim], the product with its bias; pairs of dimensions
            that turn together are neighbours.
        positions: place of each token in its sequence, int [T], below `len(table)`.
        qk_norm: [heads + kv_heads, head_dim], or None for a model without.
        eps: Epsilon of `qk_norm`.
        table: Cosines and sines from `rotary_table`.
        q_out: [T, heads, head_dim], each token's dense; may be that part of `qkv` itself.
        pool: [pages, kv_heads, 2, page_size, head_dim], of the type of `qkv` or rounded, which
            `twolane.model.fp8.quantise_heads` does alike; a mirrored one is written twice.
        places: page * page_size + offset of each token, int [T]; negative: the row is not active.
            With `slots`, the pages of the sequence in each slot, int32 [slots, max_pages]: the
            place of each decode row is found on the device.
        slots: the slot that each row belongs to, int32 [T].
        lengths: above 0 for active rows, int32 [T]; goes with `slots`.
        norm_last: Whether the norm comes after the rotation (Hunyuan), whose table has no scales.
        v_norm: Whether heads of values are divided by their root mean square (Gemma 4).
        own: Whether `qkv` has keys and values; without, it is [T, heads * head_dim], `qk_norm`
            [heads, head_dim], and nothing is written to the pool.
    """
    rows, heads, dim = q_out.shape
    here, copy = (pool.own, pool.copy) if isinstance(pool, MirroredPool) else (pool, pool)
    values, paged = values_of(here), slots is not None
    kv_heads, page_size = values.shape[1] if own else 0, values.shape[3]
    block = power_of_2(dim)
    launch(
        _qkv_rope_write, (rows, -(-(heads + 2 * kv_heads) // _HEADS)), qkv, positions,
        qkv if qk_norm is None else qk_norm, table, q_out, values, exponents_of(here),
        values_of(copy), exponents_of(copy), places if slots is None else slots, places,
        places if lengths is None else lengths, qkv.stride(0), q_out.stride(0),
        places.stride(0) if paged else 0, eps,
        Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size, NORM=qk_norm is not None,
        LAST=norm_last and qk_norm is not None, V_NORM=v_norm, PAGED=paged,
        ROUNDED=isinstance(here, RoundedPool), MIRRORED=isinstance(pool, MirroredPool),
        HEADS=_HEADS, BLOCK=block, num_warps=warps(_HEADS * block), **launch_options(qkv.device),
    )  # fmt: skip


@triton.jit
def _gate(
    x, gates, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gates + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    opened = (1.0 / (1.0 + tl.exp(-gate))).to(value.dtype).to(tl.float32)
    tl.store(x + row * WIDTH + column, (value * opened).to(value.dtype), mask=inside)


def gate(x: Tensor, gates: Tensor) -> None:
    """Multiply `x` [T, width] in place with the sigmoid of `gates` [T, width], whose rows may lie
    apart."""
    width, options = x.shape[1], launch_options(x.device)
    grid, sizes = (len(x), -(-width // _ELEMENTS)), {"WIDTH": width, "BLOCK": _ELEMENTS}
    launch(_gate, grid, x, gates, gates.stride(0), **sizes, num_warps=warps(_ELEMENTS), **options)


@triton.jit
def _act_mul(
    gate_up, out, scales,
    GELU: tl.constexpr, CLAMPED: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    place = gate_up + row * 2 * INNER + column
    gate = tl.load(place, mask=inside, other=0.0)
    up = tl.load(place + INNER, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    if CLAMPED:  # see SWIGLU_LIMIT, SWIGLU_ALPHA
        wide = tl.minimum(wide, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    inner = wide * 1.702 if CLAMPED else wide
    if GELU:  # 0.5 * x * (1 + tanh(y)) = x * sigmoid(2 * y), with y = sqrt(2 / pi) * (...)
        inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    act = (wide / (1.0 + tl.exp(-inner))).to(gate.dtype).to(tl.float32)
    product = (act * up).to(gate.dtype)
    if QUANTISED:  # the program has the whole row
        product, row_scale = quantised(product)
        tl.store(scales + row, row_scale)
    tl.store(out + row * INNER + column, product, mask=inside)


def act_mul(gate_up: Tensor, out: Out, activation: str = "silu") -> Out:
    """`out` [T, inner] = activation(gate) * up of `gate_up` [T, 2 * inner], the gate first.

    `activation`: of `ModelSpec.activation`; `clamped_swiglu` multiplies with up + 1.
    """
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    quantised = isinstance(out, Quantised)
    block = power_of_2(inner) if quantised else min(_ELEMENTS, power_of_2(inner))
    values, scales = parts(out)
    launch(
        _act_mul, (rows, -(-inner // block)), gate_up, values, scales,
        GELU=activation == "gelu_pytorch_tanh", CLAMPED=activation == "clamped_swiglu", INNER=inner,
        BLOCK=block, QUANTISED=quantised, num_warps=warps(block), **launch_options(gate_up.device),
    )  # fmt: skip
    return out


@triton.jit
def _side_by_side(
    parts, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row, part, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < WIDTH) & (part * WIDTH + column < COLUMNS)
    values = tl.load(parts + (part.to(tl.int64) * rows + row) * WIDTH + column, mask=inside)
    tl.store(out + row * COLUMNS + part * WIDTH + column, values, mask=inside)


def side_by_side(parts: Tensor, out: Tensor) -> None:
    """`out` [R, C] = the first C columns of all parts [parts, R, width], in their order."""
    count, rows, width = parts.shape
    block = min(_ELEMENTS, power_of_2(width))
    sizes = {"WIDTH": width, "COLUMNS": out.shape[1], "BLOCK": block}
    launch(
        _side_by_side, (rows, count, -(-width // block)), parts, out,
        **sizes, num_warps=warps(block),
    )  # fmt: skip


@triton.jit
def _embed(
    last_token, slots, lengths, embedding, out, vocab_first, vocab_rows, scale,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    active = tl.load(lengths + row) > 0
    slot = tl.load(slots + row, mask=active, other=0)
    token = tl.load(last_token + slot, mask=active, other=0).to(tl.int64) - vocab_first
    active &= (token >= 0) & (token < vocab_rows)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    value = tl.load(embedding + token * HIDDEN + column, mask=inside & active, other=0.0)
    tl.store(out + row * HIDDEN + column, value.to(tl.float32) * scale, mask=inside)


def embed(
    last_token: Tensor,
    slots: Tensor,
    lengths: Tensor,
    embedding: Tensor,
    out: Tensor,
    vocab_first: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """`out` [R, hidden] = the rows of `embedding` of the tokens last sampled in each row's slot.

    Rows that are not active become zeros, so that what follows computes with finite numbers, and
    so do rows whose token is another rank's.

    Args:
        last_token: int [slots].
        slots: the slot that each row belongs to, int [R].
        lengths: above 0 for active rows, int [R].
        embedding: [this rank's part of the vocabulary, hidden].
        out: [R, hidden].
        vocab_first: the first token of that part.
        scale: factor of the embeddings.
    """
    rows, hidden = out.shape
    block = min(1024, power_of_2(hidden))
    launch(
        _embed, (rows, -(-hidden // block)), last_token, slots, lengths, embedding, out,
        vocab_first, len(embedding), scale,
        HIDDEN=hidden, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return out


@triton.jit
def _lay_out(
    counts, slots, places, last_token, tables, tokens, token_places, token_slots, embedding,
    residual, positions, write_slots, table_stride, vocab_first, vocab_rows, scale,
    HIDDEN: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    decoding = tl.load(counts)
    decodes, active = row < decoding, row < tl.load(counts + 1)
    given = active & (row >= decoding)
    slot = tl.load(slots + row, mask=decodes, other=0).to(tl.int64)
    token = tl.load(last_token + slot, mask=decodes, other=0)
    position = tl.load(places + row, mask=decodes, other=0)
    page = tl.load(tables + slot * table_stride + position // PAGE, mask=decodes, other=0)
    at = row - decoding
    token += tl.load(tokens + at, mask=given, other=0)
    position += tl.load(token_places + at, mask=given, other=0)
    place = tl.load(token_slots + at, mask=given, other=-1)
    place = tl.where(decodes, page * PAGE + position % PAGE, place)
    if tl.program_id(1) == 0:
        tl.store(positions + row, position)
        tl.store(write_slots + row, place)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    token = token.to(tl.int64) - vocab_first
    active &= (token >= 0) & (token < vocab_rows)
    value = tl.load(embedding + token * HIDDEN + column, mask=inside & active, other=0.0)
    place = residual + row.to(tl.int64) * HIDDEN + column
    tl.store(place, value.to(tl.float32) * scale, mask=inside)


def lay_out(
    counts: Tensor,
    slots: Tensor,
    places: Tensor,
    last_token: Tensor,
    tables: Tensor,
    tokens: Tensor,
    token_places: Tensor,
    token_slots: Tensor,
    *,
    page_size: int,
    embedding: Tensor,
    residual: Tensor,
    positions: Tensor,
    write_slots: Tensor,
    vocab_first: int = 0,
    scale: float = 1.0,
) -> None:
    """Begin a pass: decode rows, whose tokens and pages the device knows, then given tokens.

    Rows that pad the pass follow these; they become zeros and are written nowhere. Rows whose token
    is another rank's become zeros, too.

    Args:
        counts: decode rows, and rows that do not pad, int32 [2].
        slots: The slot of each decode row, int32 [at least as many].
        places: Position of each decode row's token in its sequence, int32 [at least as many].
        last_token: the token last sampled in each slot, int32 [slots].
        tables: pages of the sequence in each slot, int32 [slots, max_pages].
        tokens: given ones, int32 [at least as many].
        token_places: Position of each given token in its sequence, int32 [at least as many].
        token_slots: page * page_size + offset of each, alike.
        page_size: tokens in a page.
        embedding: [this rank's part of the vocabulary, hidden].
        residual: Receives the embeddings of all rows, [R, hidden].
        positions: Receives the positions of all rows, int32 [R].
        write_slots: Receives the KV slots of all rows, int32 [R]; -1 for rows that pad.
        vocab_first: the first token of that part.
        scale: factor of the embeddings.
    """
    rows, hidden = residual.shape
    block = min(1024, power_of_2(hidden))
    launch(
        _lay_out, (rows, -(-hidden // block)),
        *(counts, slots, places, last_token, tables, tokens, token_places, token_slots),
        *(embedding, residual, positions, write_slots), tables.stride(0), vocab_first,
        len(embedding), scale,
        HIDDEN=hidden, PAGE=page_size, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip


@triton.jit
def _advance(
    sampled, slots, steps, step, positions, lengths, last_token, ring, experts_read, rows,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    # One warp, so that every lane has read the step before one of them writes the next.
    now = tl.load(step)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        length = tl.load(lengths + row, mask=row < rows, other=0)
        active = length > 0
        limit = tl.load(steps + row, mask=active, other=0)
        active = active & (now < limit)
        token = tl.load(sampled + row, mask=active, other=0)
        slot = tl.load(slots + row, mask=active, other=0)
        position = tl.load(positions + row, mask=active, other=0)
        tl.store(last_token + slot, tl.where(token < 0, -1 - token, token), mask=active)
        tl.store(ring + now * (rows + EXPERTS) + row, token, mask=active)
        tl.store(positions + row, position + 1, mask=active)
        left = tl.where(active & (now + 1 < limit), length + 1, 0)
        tl.store(lengths + row, left, mask=row < rows)
    if EXPERTS:
        tl.store(ring + now * (rows + 1) + rows, tl.load(experts_read))
        tl.store(experts_read, 0)
    tl.store(step, now + 1)


def advance(
    sampled: Tensor,
    slots: Tensor,
    steps: Tensor,
    step: Tensor,
    positions: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    ring: Tensor,
    experts_read: Tensor | None = None,
) -> None:
    """End a decode step: hand out its tokens and make the rows ready for the next one.

    An active row's token goes to its slot and to `ring`, its position and length grow by one, and
    if this was its last step its length becomes 0: it pads the batch from then on.

    Args:
        sampled: the token of each row, int [R]; its complement, for a row with broken logits,
            goes to `ring` as it is.
        slots: the slot that each row belongs to, int [R], different for active rows.
        steps: Number of steps of the launch in which each row takes part, int [R].
        step: the number of this step in its launch, from 0, int [1]; grows by one.
        positions: place of the row's input token in its sequence, int [R].
        lengths: tokens that the row sees, its input token included, int [R].
        last_token: int [slots].
        ring: tokens of each step, int [k, R], or [k, R + 1] with `experts_read`, on the device or
            in pinned memory; entries of inactive rows are left as they are.
        experts_read: number of experts that the step has read, int [1]; it is copied after the
            step's tokens and set to 0.
    """
    rows = len(sampled)
    block = min(256, max(32, power_of_2(rows)))
    launch(
        _advance, (1,), sampled, slots, steps, step, positions, lengths, last_token, ring,
        step if experts_read is None else experts_read, rows,
        BLOCK=block, EXPERTS=int(experts_read is not None), num_warps=1,
    )  # fmt: skip
