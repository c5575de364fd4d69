"""The rotary embedding that a `config.json` states, under the names of `rope_parameters`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from twolane.common.checked_json import converted
from twolane.model.spec import RopeSpec, RopeType, UnsupportedModel


class _RopeNumbers(msgspec.Struct):
    """The numbers among `rope_parameters`."""

    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    attn_factor: float | None = None
    partial_rotary_factor: float | None = None
    llama_4_scaling_beta: float | None = None
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None


_ABOVE_0 = (
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "partial_rotary_factor"),
)
"""The numbers of `rope_parameters` that are divided by or multiply everything."""


def read_rope(
    stated: Mapping[str, Any],
    positions: int,
    head_dim: int,
    types: Mapping[str, RopeType],
    *,
    partly: bool,
) -> RopeSpec:
    """Return the rotary embedding: how it is stretched, and which dimensions are rotated.

    Args:
        stated: The fields of `rope_parameters`, with those of the config beside it.
        positions: The config's `max_position_embeddings`.
        head_dim: The dimensions of a head.
        types: The types that work, by the names that configs have for them.
        partly: Whether some dimensions of each head may be left unrotated.

    Raises:
        UnsupportedModel: that is not built.
        ValueError: `rope_parameters` lacks a number, or has something else in its place.
    """
    rope = _stretched(stated, positions, types)
    given = stated.get("partial_rotary_factor")
    share = 1.0 if given is None else float(given)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"config.json: partial_rotary_factor must be above 0, not {share}")
    if rope.type == "proportional":
        return replace(rope, share=share)
    if share != 1.0 and not partly:
        raise UnsupportedModel.because("partial_rotary_factor", share, ("1.0",))
    rotated = int(head_dim * share)
    if len(rope.divisors) not in (0, rotated // 2):
        raise ValueError(f"config.json: long_factor must have {rotated // 2} numbers")
    beta = float(stated.get("llama_4_scaling_beta") or 0.0)
    return replace(
        rope,
        rotated=None if rotated == head_dim else rotated,
        query_beta=beta,
        original_positions=_original(stated, positions) if beta else rope.original_positions,
    )


def _original(rope: Mapping[str, Any], positions: int) -> int:
    """Return the positions before stretching."""
    return int(rope.get("original_max_position_embeddings") or positions)


def _stretched(
    stated: Mapping[str, Any], positions: int, types: Mapping[str, RopeType]
) -> RopeSpec:
    """Return the rotary embedding of whole heads; see `read_rope`."""
    rope = {name: value for name, value in stated.items() if value is not None}
    for name, value in rope.items():
        if isinstance(value, dict):
            raise UnsupportedModel.because("rope_parameters of", name, ("one for all layers",))
    _check_rope(converted(rope, _RopeNumbers, "config.json: rope_parameters", lax=True))
    theta = float(rope.get("rope_theta") or 10_000.0)
    if not theta > 1.0:
        raise ValueError(f"config.json: rope_theta must be above 1, not {theta:g}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    try:
        match types.get(kind):
            case "default":
                return RopeSpec(theta)
            case "linear":
                return RopeSpec(theta, "linear", float(rope["factor"]))
            case "proportional":
                return RopeSpec(theta, "proportional", float(rope.get("factor") or 1.0))
            case "dynamic":
                factor = float(rope["factor"])
                return RopeSpec(theta, "dynamic", factor, original_positions=positions)
            case "llama3":
                return _llama3(theta, rope, _original(rope, positions))
            case "yarn":
                return _yarn(theta, rope, positions)
            case "longrope":
                return _longrope(theta, rope, positions)
    except KeyError as error:
        raise ValueError(f"config.json: rope_parameters of type {kind} have no {error}") from error
    raise UnsupportedModel.because("rope type", kind, dict.fromkeys(types.values()))


def _check_rope(numbers: _RopeNumbers) -> None:
    """Refuse numbers by which no position can be rotated.

    Raises:
        ValueError: there is one.
    """
    for name in _ABOVE_0:
        value = getattr(numbers, name)
        if value is not None and not 0.0 < value < math.inf:
            raise ValueError(f"config.json: rope_parameters: {name} must be above 0, not {value}")
    beta = numbers.llama_4_scaling_beta
    if beta is not None and not 0.0 <= beta < math.inf:
        raise ValueError(f"config.json: rope_parameters: llama_4_scaling_beta cannot be {beta}")
    low, high = numbers.low_freq_factor, numbers.high_freq_factor
    if low is not None and high is not None and not low < high:
        problem = f"low_freq_factor {low} must be below high_freq_factor {high}"
        raise ValueError(f"config.json: rope_parameters: {problem}")


def _llama3(theta: float, rope: Mapping[str, Any], original: int) -> RopeSpec:
    return RopeSpec(
        theta,
        "llama3",
        float(rope["factor"]),
        original_positions=original,
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
    )


def _longrope(theta: float, rope: Mapping[str, Any], positions: int) -> RopeSpec:
    """LongRoPE; the scale of the attention follows from the factor where the config gives none."""
    original = _original(rope, positions)
    long, short = (tuple(map(float, rope[name])) for name in ("long_factor", "short_factor"))
    if len(long) != len(short) or min(*long, *short) <= 0.0:
        raise ValueError(
            "config.json: short_factor and long_factor must have equally many numbers above 0"
        )
    factor, scale = float(rope.get("factor") or positions / original), rope.get("attention_factor")
    if scale is None:
        grown = factor > 1.0
        scale = math.sqrt(1.0 + math.log(factor) / math.log(original)) if grown else 1.0
    return RopeSpec(
        theta,
        "longrope",
        factor,
        original_positions=original,
        attention_factor=float(scale),
        divisors=long,
        short_divisors=short,
    )


def _yarn(theta: float, rope: Mapping[str, Any], positions: int) -> RopeSpec:
    """YaRN; the scale of the attention follows from the factor where the config gives none.

    `attn_factor` multiplies it, as in vLLM and llama.cpp; `transformers` does not know it.
    """
    original = _original(rope, positions)
    factor = float(rope.get("factor") or positions / original)
    scale = rope.get("attention_factor")
    if scale is None:
        growths = [float(rope.get(name) or 0.0) for name in ("mscale", "mscale_all_dim")]
        if not all(growths):
            growths = [1.0, 0.0]
        own, shared = (_yarn_scale(factor, growth) for growth in growths)
        scale = own / shared * float(rope.get("attn_factor") or 1.0)
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=float(scale),
    )


def _yarn_scale(factor: float, growth: float) -> float:
    return 0.1 * growth * math.log(factor) + 1.0 if factor > 1.0 else 1.0
