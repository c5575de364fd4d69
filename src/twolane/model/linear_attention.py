"""Linear attention on a CPU: a short causal convolution, then the gated delta rule.

A request keeps two states of constant size in each layer: the last inputs of the convolution, and
for every value head a matrix S [key_dim, value_dim], in float32 or wider. A token with query q,
key k, value v, decay exp(g) and learning rate b makes of it (Yang et al. 2024, arXiv:2412.06464,
equation 10):

    S <- exp(g) S;    S <- S + k (b (v - S' k))';    output S' q

Rows with one new token do this for all of them at once. Segments with several tokens compute it in
chunks: within a chunk, the corrections b (v - S' k) of all tokens solve one triangular system
(section 3.3 there).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from twolane.kernels.delta_rule.rule import DeltaRule, StatePart
from twolane.model.matrix import Matrix
from twolane.model.sharding import Shard
from twolane.model.spec import ModelSpec, ShortConvolution

CHUNK = 64
"""Tokens of a chunk."""
NORM_EPS = 1e-6
"""Epsilon of the norms of queries and keys."""


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """What a layer of linear attention has beside its projections."""

    rates: Matrix
    """[2 * value_heads, hidden]: the rows of the learning rates, then those of the decays."""
    conv: Tensor
    """The taps of the convolution, [mixed_size, taps], the latest last."""
    decay: Tensor
    """Minus the exponential of the checkpoint's logarithms, float32 [value_heads]."""
    shift: Tensor
    """What is added to projected decays, float32 [value_heads]."""
    norm: Tensor
    """The norm of each value head's output, [value_dim]."""


@dataclass(frozen=True)
class DeltaRows:
    """A rank's rows of the tensors of linear attention, int64, in the order of the decoder."""

    mixed: Tensor
    """Those of queries, keys and values in a module that has all queries first."""
    gates: Tensor
    """Those of the output gates in a module of their own."""
    heads: Tensor
    """The value heads."""
    rates: Tensor
    """Those of the learning rates, then of the decays, where all rates come first."""
    grouped: Tensor
    """Those of queries, keys, values and gates in a module that has them by key head."""
    grouped_rates: Tensor
    """Those of learning rates and decays in a module that has them by key head."""


def delta_rows(shard: Shard) -> DeltaRows:
    """Return the rows of a rank of a model with linear attention; key heads are shared out."""
    delta, local = shard.spec.delta, shard.local.delta
    assert delta is not None
    assert local is not None
    group = delta.value_heads // delta.key_heads
    keys = slice(shard.rank * local.key_heads, (shard.rank + 1) * local.key_heads)

    def rows(*widths: int) -> list[Tensor]:
        """Return the rows of parts with these widths, of which each key head has one each."""
        each = torch.arange(delta.key_heads * sum(widths)).view(delta.key_heads, -1)[keys]
        return [part.flatten() for part in torch.split(each, [*widths], dim=1)]

    (keyed,), (valued,) = rows(delta.key_dim), rows(group * delta.value_dim)
    values = group * delta.value_dim
    (heads,), key_size = rows(group), delta.key_size
    return DeltaRows(
        mixed=torch.cat([keyed, key_size + keyed, 2 * key_size + valued]),
        gates=valued,
        heads=heads,
        rates=torch.cat([heads, delta.value_heads + heads]),
        grouped=torch.cat(rows(delta.key_dim, delta.key_dim, values, values)),
        grouped_rates=torch.cat(rows(group, group)),
    )


def _mixed(state: DeltaRule | ShortConvolution) -> int:
    """Return the channels of the convolution."""
    return state.mixed_size if isinstance(state, DeltaRule) else state.channels


def convolution_rows(shard: Shard) -> Tensor:
    """Return a rank's rows of the projections of B, C and x of a short convolution, int64."""
    hidden, channels = shard.spec.hidden_size, shard.spec.hidden_size // shard.size
    own = torch.arange(shard.rank * channels, (shard.rank + 1) * channels)
    return torch.cat([own + part * hidden for part in range(3)])


class StatePool:
    """The states of all layers of linear attention, one of each for every slot.

    The pool starts uninitialised: a sequence's first token begins with zeros.

    Args:
        spec: The shape of this rank's part of the model.
        slots: The most requests at a time, and snapshots.
        dtype: Type of activations.
        device: The device of the states.
    """

    def __init__(
        self, spec: ModelSpec, slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.conv: list[Tensor] = []
        """The last inputs of each layer's convolution, [slots, mixed_size, taps - 1]; layers with
        keys and values have no slots."""
        self.rule: list[Tensor] = []
        """The states of the rule, float32 or wider [slots, value_heads, key_dim, value_dim]."""
        delta, wide = spec.delta, torch.promote_types(dtype, torch.float32)
        shape = (0, 0, 0) if delta is None else (delta.value_heads, delta.key_dim, delta.value_dim)
        mixed = 0 if spec.state is None else _mixed(spec.state)
        taps = 1 if spec.state is None else spec.state.taps
        for i in range(spec.layers):
            count = slots if spec.is_linear(i) else 0
            inputs, state = (count, mixed, taps - 1), (count, *shape)
            self.conv.append(torch.empty(inputs, dtype=dtype, device=device))
            self.rule.append(torch.empty(state, dtype=wide, device=device))


class SequenceStates(NamedTuple):
    """The new tokens of one sequence by the states that they move on."""

    slot: int
    start: int
    """Tokens of the sequence before them."""
    tokens: int
    parts: Sequence[StatePart] = ()
    """Where states are taken from and saved; none: all is in the slot."""


@dataclass(frozen=True)
class StateRows:
    """The rows of one forward pass by the states that they move on."""

    single: Tensor
    """Rows of the sequences with one new token that is not the first, int64 [R]."""
    single_slots: Tensor
    """Their slots, int64 [R]."""
    parts: Sequence[tuple[slice, StatePart]]
    """Rows of the other sequences, in their order."""

    @classmethod
    def of(cls, sequences: Iterable[SequenceStates]) -> "StateRows":
        """Return the rows of sequences that follow each other.

        Raises:
            ValueError: one has no slot, or two have the same.
        """
        single, parts, row, slots = [], [], 0, []
        for slot, start, count, own in sequences:
            slots.append(slot)
            if count == 1 and start and not own:
                single.append((row, slot))
            for part in own or (StatePart(0, count, slot, start == 0, slot, -1),):
                first = row + part.first
                if single[-1:] != [(row, slot)]:
                    parts.append((slice(first, first + part.tokens), part))
            row += count
        if min(slots) < 0 or len(set(slots)) < len(slots):
            raise ValueError(f"linear attention needs a slot for each sequence, not {slots}")
        rows = torch.tensor(single, dtype=torch.long).view(-1, 2)
        return cls(rows[:, 0], rows[:, 1], parts)


class DeltaInputs(NamedTuple):
    """What some tokens bring to the rule, one row each."""

    q: Tensor
    """Normalised and scaled queries, [n, value_heads, key_dim]."""
    k: Tensor
    """Normalised keys, [n, value_heads, key_dim]."""
    v: Tensor
    """Values, [n, value_heads, value_dim]."""
    g: Tensor
    """Logarithms of the decays, [n, value_heads]."""
    beta: Tensor
    """Learning rates, [n, value_heads]."""


def attend(
    x: Tensor,
    rates: Tensor,
    weights: DeltaWeights,
    delta: DeltaRule,
    rows: StateRows,
    states: StatePool,
    layer: int,
    eps: float,
) -> Tensor:
    """Return the output of a layer's linear attention, [T, value_size], and move its states on.

    Args:
        x: Projected queries, keys, values and gates, [T, projected].
        rates: Projected learning rates and decays, [T, 2 * value_heads].
        weights: The layer's.
        delta: Its shape.
        rows: Which rows belong to which slot.
        states: The pool of states.
        layer: The index of the layer.
        eps: Epsilon of the norm of the output.
    """
    conv, rule = states.conv[layer], states.rule[layer]
    mixed, gates = torch.split(x, [delta.mixed_size, delta.value_size], dim=1)
    beta, decay = rates.to(rule.dtype).chunk(2, dim=1)
    g, beta = functional.softplus(decay + weights.shift) * weights.decay, beta.sigmoid()

    def inputs(where: Tensor | slice, convolved: Tensor) -> DeltaInputs:
        heads = _heads(functional.silu(convolved).to(rule.dtype), delta)
        return DeltaInputs(*heads, g[where], beta[where])

    out = rule.new_empty(len(x), delta.value_heads, delta.value_dim)
    convolved = convolve(mixed, weights.conv, rows, conv)
    if len(single := rows.single):
        out[single] = recurrent(inputs(single, convolved[single]), rule, rows.single_slots)
    for where, part in rows.parts:
        source = rule[part.source]
        state = torch.zeros_like(source) if part.fresh else source.clone()
        out[where] = chunked(inputs(where, convolved[where]), state)
        for place in part.kept:
            rule[place] = state
    normal = functional.rms_norm(out, (delta.value_dim,), None, eps).to(x.dtype) * weights.norm
    opened = functional.silu(gates.to(rule.dtype)).view_as(normal)
    return (normal * opened).to(x.dtype).flatten(1)


def convolve(mixed: Tensor, taps: Tensor, rows: StateRows, inputs: Tensor) -> Tensor:
    """Return the causal convolution of each channel, [T, channels], and keep the last inputs.

    Args:
        mixed: The inputs of the new tokens, [T, channels].
        taps: [channels, taps], the latest last.
        rows: Which rows belong to which slot.
        inputs: The inputs of all slots that came before, [slots, channels, taps - 1].
    """
    out = torch.empty_like(mixed)
    if len(single := rows.single):
        out[single] = _convolve_rows(mixed[single], taps, inputs, rows.single_slots)
    for where, part in rows.parts:
        source = inputs[part.source]
        before = torch.zeros_like(source) if part.fresh else source.clone()
        out[where] = _convolve(mixed[where], taps, before)
        for place in part.kept:
            inputs[place] = before
    return out


def _convolve_rows(new: Tensor, taps: Tensor, inputs: Tensor, slots: Tensor) -> Tensor:
    """Return the convolution of one new token of each slot, [R, mixed]; keep the inputs."""
    window = torch.cat([inputs[slots], new[:, :, None]], dim=2)
    inputs[slots] = window[:, :, 1:]
    return (window * taps).sum(dim=2)


def _convolve(new: Tensor, taps: Tensor, inputs: Tensor) -> Tensor:
    """Return the convolution of a sequence's new tokens [n, mixed]; keep the inputs."""
    window = torch.cat([inputs, new.t()], dim=1)
    inputs.copy_(window[:, -inputs.shape[1] :])
    return functional.conv1d(window[None], taps[:, None], groups=len(window))[0].t()


def _heads(mixed: Tensor, delta: DeltaRule) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of each value head, [T, value_heads, key or value_dim]."""
    sizes = [delta.key_size, delta.key_size, delta.value_size]
    q, k, v = torch.split(mixed, sizes, dim=1)
    shared = delta.value_heads // delta.key_heads

    def normalised(x: Tensor) -> Tensor:
        heads = x.reshape(len(x), delta.key_heads, delta.key_dim)
        normal = heads * (heads.square().sum(dim=-1, keepdim=True) + NORM_EPS).rsqrt()
        return normal.repeat_interleave(shared, dim=1)

    values = v.reshape(len(v), delta.value_heads, delta.value_dim)
    return normalised(q) * delta.key_dim**-0.5, normalised(k), values


def recurrent(tokens: DeltaInputs, rule: Tensor, slots: Tensor) -> Tensor:
    """Return the outputs of one new token of each slot, [R, heads, value_dim]; move `rule` on.

    Args:
        tokens: The R tokens.
        rule: The states of all slots, [slots, heads, key_dim, value_dim].
        slots: The slots of the rows, int64 [R].
    """
    q, k, v, g, beta = tokens
    state = rule[slots] * g.exp()[..., None, None]
    known = (k.unsqueeze(-2) @ state).squeeze(-2)
    correction = (v - known) * beta.unsqueeze(-1)
    state += k.unsqueeze(-1) * correction.unsqueeze(-2)
    rule[slots] = state
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def chunked(tokens: DeltaInputs, state: Tensor) -> Tensor:
    """Return the outputs of consecutive tokens of one sequence, [n, heads, value_dim]; move `state`
    [heads, key_dim, value_dim] on."""
    parts = zip(*(torch.split(each, CHUNK) for each in tokens), strict=True)
    return torch.cat([_chunk(DeltaInputs(*part), state) for part in parts])


def _chunk(tokens: DeltaInputs, state: Tensor) -> Tensor:
    """Return the outputs of one chunk; see `chunked`."""
    q, k, v, g, beta = (each.transpose(0, 1) for each in tokens)
    total = g.cumsum(dim=1)
    later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool).triu(1)
    between = (total[:, :, None] - total[:, None, :]).masked_fill(later, -torch.inf).exp()
    since, left = total.exp().unsqueeze(-1), (total[:, -1:] - total).exp().unsqueeze(-1)
    system = (k @ k.mT) * between * beta.unsqueeze(-1)
    wanted = (v - (k * since) @ state) * beta.unsqueeze(-1)
    corrections: Tensor = torch.linalg.solve_triangular(
        system, wanted, upper=False, unitriangular=True
    )
    out = (q * since) @ state + ((q @ k.mT) * between) @ corrections
    state *= since[:, -1:]
    state += (k * left).mT @ corrections
    return out.transpose(0, 1)
