"""Choosing tokens. A row's token depends on its logits, its parameters, its seed and its position.

The order is that of vLLM 1.x: banned tokens, temperature, min-p, top-k, top-p. Random numbers are
counters, not streams: one hash of (seed, position) gives the uniform number, so the same request
draws the same tokens whatever runs beside it, and after any preemption.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twolane.sampling import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SampleRow:
    """How one row's token is chosen."""

    params: SamplingParams
    seed: int
    position: int
    """Index, in its sequence, of the token that is chosen."""
    banned: Sequence[int] = ()
    """Token ids that must not be chosen (end tokens before `min_tokens`)."""


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """One token a row, int64 [R], from logits, float32 [R, vocab], which are left as they are.

    Greedy rows take the most likely token, the lowest id where several tie.
    """
    banned = [(r, t) for r, row in enumerate(rows) for t in row.banned]
    if banned:
        logits = logits.clone()
        index = torch.tensor(banned, device=logits.device)
        logits[index[:, 0], index[:, 1]] = -torch.inf
    random = [r for r, row in enumerate(rows) if not row.params.greedy]
    if not random:
        return logits.argmax(dim=-1)
    tokens = [_draw(logits[r], rows[r]) for r in random]
    if len(random) == len(rows):
        return torch.tensor(tokens, device=logits.device)
    chosen = logits.argmax(dim=-1)
    chosen[random] = torch.tensor(tokens, device=logits.device)
    return chosen


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a seed and a counter: 53 bits of splitmix64 (Steele et al., 2014)."""
    state = _mix((seed & _MASK) + _GOLDEN)
    return (_mix(state + (position + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _draw(logits: torch.Tensor, row: SampleRow) -> int:
    """Draw one token from logits [vocab] by inverse CDF over the candidates, in order of id."""
    ids, weights = _candidates(logits, row.params)
    cdf = weights.double().cumsum(0)
    target = uniform(row.seed, row.position) * cdf[-1]
    # The first candidate whose cumulated weight is above the target: never one of weight zero.
    place = min(
        int(torch.searchsorted(cdf, target, right=True)),
        int(torch.searchsorted(cdf, cdf[-1])),
    )
    return place if ids is None else int(ids[place])


def _candidates(
    logits: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Ids (None: all) and weights of the tokens that pass min-p, top-k and top-p.

    Weights are probabilities after temperature, up to a common factor; the largest is 1.
    """
    scaled = logits / params.temperature
    scaled -= scaled.max()
    if params.min_p > 0.0:
        scaled.masked_fill_(scaled < math.log(params.min_p), -torch.inf)
    ids = None
    if 0 < params.top_k < len(scaled):
        # Tokens as likely as the k-th stay, as in vLLM.
        kth = torch.topk(scaled, params.top_k, sorted=False).values.min()
        ids = torch.nonzero(scaled >= kth).squeeze(1)
        scaled = scaled[ids]
    weights = scaled.exp()
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Places, in order, of the fewest weights that make up `top_p` of their sum.

    Among equal weights the earlier ones are kept.
    """
    # numpy sorts floats with vector instructions, thirty times faster than torch on a CPU.
    best = np.sort(weights.cpu().numpy())[::-1]
    mass = best.cumsum(dtype=np.float64)
    last = min(int(mass.searchsorted(mass[-1] * top_p)), len(best) - 1)
    least = float(best[last])
    above = torch.nonzero(weights > least).squeeze(1)
    ties = torch.nonzero(weights == least).squeeze(1)[: last + 1 - len(above)]
    return torch.cat([above, ties]).sort().values
