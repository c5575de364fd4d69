"""Linear attention of rows with one new token each, which find their states on the device.

A step reads and writes the state of every row once, and little else: 64 KB for each value head of
128 x 128. A program has some columns of a head's state in registers, and an SM has several
programs, so that a few SMs reach the rate of copying on them. Rows that are not active
(`lengths` of 0) move nothing.
"""

from typing import NamedTuple, Protocol

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twolane.kernels.delta_rule import rule_step
from twolane.kernels.delta_rule.convolution import convolved_token
from twolane.kernels.delta_rule.rule import DeltaRule
from twolane.kernels.fused import launch_options, warps
from twolane.kernels.runtime.launch import launch, power_of_2

_HEADS = 8
"""Heads that one program convolves or normalises."""
_FEW = 64
"""SMs that instructions bind; more are bound by the way over memory."""


class _Tile(NamedTuple):
    """What one program of the rule has in registers."""

    columns: int
    """Columns of a state: with all 128, an SM has one program, which waits for memory and computes
    in turns."""
    warps: int


def _tile(units: int) -> _Tile:
    """Return the tile for a lane's SMs: sums across warps take instructions, and narrow tiles read
    short runs of memory."""
    return _Tile(32, 1) if units <= _FEW else _Tile(64, 2)


class Parameters(Protocol):
    """What a layer has beside its projections."""

    @property
    def conv(self) -> Tensor:
        """The taps, [mixed_size, taps], the latest last."""

    @property
    def decay(self) -> Tensor:
        """Factors of the decays, float32 [value_heads]."""

    @property
    def shift(self) -> Tensor:
        """Terms of the decays, float32 [value_heads]."""

    @property
    def norm(self) -> Tensor:
        """The norm of each value head's output, [value_dim]."""


@triton.jit
def channels(
    head, dim, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the channels of dimensions of heads of queries, keys and values, and which are
    there."""
    keyed = head < 2 * KEY_HEADS
    valued = 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM
    first = tl.where(keyed, head * KEY_DIM, valued)
    return first + dim, dim < tl.where(keyed, KEY_DIM, VALUE_DIM)


@triton.jit
def normalised(value, head, KEY_HEADS: tl.constexpr, DIM: tl.constexpr) -> tl.tensor:
    """Return SiLU of the heads `value` [HEADS, BLOCK]; queries and keys have a length of 1, and
    queries are scaled."""
    active = value / (1.0 + tl.exp(-value))
    inverse = tl.rsqrt(tl.sum(active * active, axis=1) + 1e-6)[:, None]
    scale = tl.where(head < KEY_HEADS, inverse * DIM**-0.5, inverse)
    return tl.where(head < 2 * KEY_HEADS, active * scale, active)


@triton.jit
def _convolve_step(
    x, taps, conv, slots, lengths, mixed, x_stride, channel_stride, tap_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    channel, inside = channels(head, dim, KEY_HEADS, KEY_DIM, VALUE_DIM)
    inside &= head < 2 * KEY_HEADS + VALUE_HEADS
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    if EARLY:
        gdc_launch_dependents()
    inside &= tl.load(lengths + row) > 0
    kept = conv + tl.load(slots + row).to(tl.int64) * (TAPS - 1) * WIDTH
    given = x + row * x_stride + channel, taps, kept, channel, inside, channel_stride, tap_stride
    value = convolved_token(*given, WIDTH, TAPS, False, EARLY)
    value = normalised(value, head, KEY_HEADS, KEY_DIM).to(mixed.dtype.element_ty)
    tl.store(mixed + row * WIDTH + channel, value, mask=inside)


@triton.jit
def decay_of(raw, shift, factor) -> tl.tensor:
    """Return the logarithm of the decay, `factor` * softplus(raw + shift)."""
    moved = raw.to(tl.float32) + shift
    return factor * tl.where(moved > 20.0, moved, tl.log(1.0 + tl.exp(tl.minimum(moved, 20.0))))


@triton.jit
def _moved(state, q, k, v, rate) -> tuple[tl.tensor, tl.tensor]:
    """Return the decayed state corrected by a token, and what its query reads there."""
    known = tl.sum(state * k[:, None], axis=0)
    correction = (v.to(tl.float32) - known) / (1.0 + tl.exp(-rate.to(tl.float32)))
    read = tl.sum(state * q[:, None], axis=0) + tl.sum(q * k) * correction
    return state + k[:, None] * correction[None, :], read


@triton.jit
def _rule_step(
    mixed, rates, decay, shift, rule, slots, lengths, out, rate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    key, value = tl.arange(0, KEYS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    some_keys, some_values = key < KEY_DIM, value < VALUE_DIM
    if EARLY:
        gdc_launch_dependents()
    length, slot = tl.load(lengths + row), tl.load(slots + row).to(tl.int64)
    inside = some_keys[:, None] & some_values[None, :] & (length > 0)
    place = rule + (slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    place = place + key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
    if length <= 0:
        return
    start = mixed + row * (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM)
    keyed = start + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    q = tl.load(keyed, mask=some_keys, other=0.0).to(tl.float32)
    k = tl.load(keyed + KEY_HEADS * KEY_DIM, mask=some_keys, other=0.0).to(tl.float32)
    column = head * VALUE_DIM + value
    v = tl.load(start + 2 * KEY_HEADS * KEY_DIM + column, mask=some_values, other=0.0)
    rated = rates + row * rate_stride + head
    rate, raw = tl.load(rated), tl.load(rated + VALUE_HEADS)  # before what waits for a load
    g = decay_of(raw, tl.load(shift + head), tl.load(decay + head))
    state, read = _moved(state * tl.exp(g), q, k, v, rate)
    tl.store(place, state, mask=inside, eviction_policy="evict_first")
    tl.store(out + row * VALUE_HEADS * VALUE_DIM + column, read.to(v.dtype), mask=some_values)


@triton.jit
def _gate_heads(
    out, gates, norm, gate_stride, eps,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    value = tl.arange(0, VALUES)[None, :]
    inside = (head < VALUE_HEADS) & (value < VALUE_DIM)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    column = head * VALUE_DIM + value
    place = out + row * VALUE_HEADS * VALUE_DIM + column
    read = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * gate_stride + column, mask=inside, other=0.0)
    weight = tl.load(norm + value, mask=value < VALUE_DIM, other=0.0)
    inverse = tl.rsqrt(tl.sum(read * read, axis=1)[:, None] / VALUE_DIM + eps)
    normal = ((read * inverse).to(gate.dtype).to(tl.float32) * weight.to(tl.float32)).to(gate.dtype)
    wide = gate.to(tl.float32)
    opened = normal.to(tl.float32) * (wide / (1.0 + tl.exp(-wide)))
    tl.store(place, opened.to(gate.dtype), mask=inside)


class LinearLayer(NamedTuple):
    """A layer of linear attention, with the states of all slots."""

    parameters: Parameters
    delta: DeltaRule
    conv: Tensor
    """Inputs of the convolution, [slots, taps - 1, mixed_size]."""
    rule: Tensor
    """States of the rule, float32 [slots, value_heads, key_dim, value_dim]."""
    eps: float
    """Epsilon of the norm of the output."""

    @property
    def shape(self) -> dict[str, int]:
        """Constants of the kernels."""
        delta = self.delta
        return {
            **{"KEY_HEADS": delta.key_heads, "VALUE_HEADS": delta.value_heads},
            **{"KEY_DIM": delta.key_dim, "VALUE_DIM": delta.value_dim},
        }


def decode_step(
    x: Tensor,
    rates: Tensor,
    layer: LinearLayer,
    slots: Tensor,
    lengths: Tensor,
    mixed: Tensor,
    out: Tensor,
    units: int,
) -> None:
    """`out` [R, value_size] = linear attention of one new token in each slot, whose states move on.

    Args:
        x: Projected queries, keys, values and gates, [R, projected].
        rates: Projected learning rates and decays, [R, 2 * value_heads].
        layer: The layer.
        slots: int32 [R].
        lengths: Above 0 for active rows, int32 [R].
        mixed: Room for [R, mixed_size].
        out: Written.
        units: SMs of torch's current stream.
    """
    parameters, delta, conv, rule, _ = layer
    keys, values = power_of_2(delta.key_dim), power_of_2(delta.value_dim)
    heads, block = 2 * delta.key_heads + delta.value_heads, max(keys, values)
    rows, early = (slots, lengths), launch_options(x.device)
    taps = parameters.conv
    taken = x, taps, conv, *rows, mixed, x.stride(0), *taps.stride()
    tile = {"TAPS": delta.taps, "HEADS": _HEADS, "BLOCK": block, **early}
    grid, width = (len(x), -(-heads // _HEADS)), warps(_HEADS * block)
    launch(_convolve_step, grid, *taken, **layer.shape, **tile, num_warps=width)
    if rule_step.serves(delta, x, units):
        _step_by_heads(x, rates, layer, rows, mixed, out, units)
        return
    tiled = _tile(units)
    columns = min(tiled.columns, values)
    moved = mixed, rates, parameters.decay, parameters.shift, rule, *rows, out, rates.stride(0)
    tile = {"KEYS": keys, "COLUMNS": columns, **early}
    parts = -(-delta.value_dim // columns), delta.value_heads, len(x)
    width = min(tiled.warps, warps(keys * columns))
    launch(_rule_step, parts, *moved, **layer.shape, **tile, num_warps=width)
    gate_heads(out, x, layer)


def _step_by_heads(
    x: Tensor,
    rates: Tensor,
    layer: LinearLayer,
    rows: tuple[Tensor, Tensor],
    mixed: Tensor,
    out: Tensor,
    units: int,
) -> None:
    """What follows the convolution in `decode_step`, in one kernel; rows: slots and lengths."""
    own, (slots, lengths) = layer.parameters, rows
    arrays = mixed, rates, own.decay, own.shift, layer.rule, slots, lengths, out
    pointers = [tensor.data_ptr() for tensor in (*arrays, x[:, layer.delta.mixed_size :], own.norm)]
    given = rule_step.RuleStepArguments(*pointers, len(x), rates.stride(0), x.stride(0), layer.eps)
    rule_step.launch(layer.delta, given, x.device, units)


def gate_heads(out: Tensor, x: Tensor, layer: LinearLayer) -> None:
    """Normalise each value head of `out` [T, value_size] and multiply it with SiLU of its gates,
    the last columns of `x` [T, projected]."""
    delta, values = layer.delta, power_of_2(layer.delta.value_dim)
    given = out, x[:, delta.mixed_size :], layer.parameters.norm, x.stride(0), layer.eps
    tile = {"VALUE_HEADS": delta.value_heads, "VALUE_DIM": delta.value_dim, "HEADS": _HEADS}
    grid, width = (len(x), -(-delta.value_heads // _HEADS)), warps(_HEADS * values)
    early = launch_options(x.device)
    launch(_gate_heads, grid, *given, **tile, VALUES=values, **early, num_warps=width)
