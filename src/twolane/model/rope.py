"""Rotary frequencies of every supported type, as `transformers` computes them in float32."""

import math

import torch

from twolane.model.spec import RopeSpec


def frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.type:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "factors":
            return plain / torch.tensor(rope.divisors, dtype=torch.float32)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, head_dim)


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
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


def _yarn(rope: RopeSpec, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
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
