"""Rotary frequencies of every supported type, as `transformers` computes them in float32."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from twolane.model.spec import ModelSpec, RopeSpec


class Rotation(NamedTuple):
    """The rotation of pairs of dimensions of queries and keys at each position."""

    frequencies: Tensor
    """Radians per position of each pair, float32 [head_dim / 2]; 0: it is not turned."""
    scales: Tensor
    """The factor of each pair, float32 [head_dim / 2]."""

    def to(self, device: torch.device) -> "Rotation":
        """Return the rotation on a device."""
        return Rotation(self.frequencies.to(device), self.scales.to(device))


def rotations(spec: ModelSpec, device: torch.device) -> dict[tuple[RopeSpec, int], Rotation]:
    """Return the rotation of each rotary embedding that layers of a model have, by the dimensions
    of their heads, too."""
    shapes = {(spec.rope_of(i), at.head_dim): at for i, at in enumerate(spec.each)}
    return {key: rotation(at, key[0]).to(device) for key, at in shapes.items()}


def rotation(spec: ModelSpec, rope: RopeSpec) -> Rotation:
    """Return the rotation of layers of a model that have this rotary embedding.

    The factors make scores of queries and keys those of the model's `attention_scale`, for
    attention itself multiplies scores with head_dim ** -0.5.
    """
    pairs = spec.head_dim // 2
    scales = torch.ones(pairs)
    if spec.attention_scale is not None:
        scales *= math.sqrt(spec.attention_scale * math.sqrt(spec.head_dim))
    if rope.type == "none":
        return Rotation(torch.zeros(pairs), scales)
    rotated = rope.rotated or spec.head_dim
    if not spec.norms_rotated:  # norms after the rotation undo its factor
        scales[: rotated // 2] *= rope.attention_factor
    turned = frequencies(rope, rotated, spec.max_positions)
    return Rotation(torch.cat([turned, torch.zeros(pairs - len(turned))]), scales)


def query_scales(rope: RopeSpec, positions: Tensor) -> Tensor:
    """Return the factor of the queries at each position, float32 [T, 1, 1], after their rotation.

    It is 1 + beta * ln(1 + floor(position / original_positions)), as in Llama 4 and Ministral 3.

    Args:
        rope: A rotary embedding with a `query_beta`.
        positions: Positions of the tokens, int [T].
    """
    stretches = torch.div(positions, rope.original_positions, rounding_mode="floor")
    return (1.0 + rope.query_beta * torch.log1p(stretches.float()))[:, None, None]


def pair_rows(tensor: Tensor, head_dim: int, rope: RopeSpec) -> Tensor:
    """Order the rows of each head so that those that turn together are neighbours.

    With R rotated rows these become 0, R/2, 1, R/2 + 1, ..., unless the checkpoint has neighbours
    already; the others follow them. Rows are [heads * head_dim, ...].
    """
    if rope.interleaved:
        return tensor
    rotated = rope.rotated or head_dim
    heads = tensor.view(-1, head_dim, *tensor.shape[1:])
    halves = heads[:, :rotated].reshape(len(heads), 2, rotated // 2, *tensor.shape[1:])
    turned = halves.transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, rotated:]], dim=1).flatten(0, 1)


def frequencies(rope: RopeSpec, rotated: int, positions: int = 0) -> Tensor:
    """Radians per position of each pair of rotated dimensions, float32 [rotated / 2].

    Args:
        rope: The rotary embedding, which says how positions are stretched.
        rotated: dimensions of a head that are rotated.
        positions: The model's positions, which choose the base of "dynamic" and the list of
            "longrope".
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    theta = _raised(rope, rotated, positions) if rope.type == "dynamic" else rope.theta
    plain = 1.0 / (theta**exponents)
    match rope.type:
        case "default" | "dynamic" | "none":
            return plain
        case "linear":
            return plain / rope.factor
        case "proportional":
            turned = int(rope.share * rotated // 2)
            return torch.where(torch.arange(rotated // 2) < turned, plain / rope.factor, 0.0)
        case "factors":
            return plain / torch.tensor(rope.divisors, dtype=torch.float32)
        case "longrope":
            short = positions <= rope.original_positions
            divisors = rope.short_divisors if short else rope.divisors
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, rotated)


def _raised(rope: RopeSpec, rotated: int, positions: int) -> float:
    """Return the base that `transformers` takes for a sequence of this many positions."""
    grown = max(positions / rope.original_positions, 1.0)
    raised = rope.factor * grown - (rope.factor - 1.0)
    return rope.theta * math.pow(raised, rotated / (rotated - 2))


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between."""
    wavelength = 2 * math.pi / plain
    low = rope.original_positions / rope.low_freq_factor
    high = rope.original_positions / rope.high_freq_factor
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > low, plain / rope.factor, plain)
    between = (wavelength >= high) & (wavelength <= low)
    return torch.where(between, ramp, scaled)


def _yarn(rope: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): interpolate by how often a dimension turns."""

    def dimension(turns: float) -> float:
        ratio = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
