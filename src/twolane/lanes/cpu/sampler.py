"""Choosing tokens. A row's token depends on its logits, its parameters, its seed and its position.

The order is that of vLLM (`vllm/v1/sample/sampler.py`, 0.10 to 0.22): banned tokens, logit bias,
penalties (repetition, frequency, presence), temperature, min-p, top-k, top-p. Log-probabilities are
of the logits before all of that.

Random numbers are counters, not streams: a hash of (seed, position, token). So the same request
draws the same tokens whatever runs beside it, and after any preemption. Tokens are drawn by an
exponential race (the Gumbel-max trick): token i, of weight w, arrives at E / w with its own
E ~ Exp(1), and the first wins, with a probability proportional to its weight. Where a batch of
another shape rounds the logits otherwise, the winner changes only if two tokens arrive that close
together. (An inverse CDF shifts the borders of all tokens by a little, and of 49,000 of them most
are not much wider than that.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twolane.sampling import SamplingParams, TokenLogprobs

# splitmix64's (Steele et al., 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_MAX_FLOAT = torch.finfo(torch.float32).max
KEPT_MASKS = 32
"""This many masks, the latest, are kept as tensors: `allowed_token_ids` has the same at each
step."""


class Adjustment:
    """Logit bias and penalties of one sequence, whose tokens it remembers.

    Args:
        params: Sampling parameters of the request.
        prompt: Tokens of the prompt, as they were sent.
        output: the tokens after them, so far.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        self._params = params
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        # Each token of the sequence once, in arrays that double when they are full.
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64)
        if params.penalises:
            for token in prompt:
                self._note(token)
            for token in output:
                self.add(token)

    def add(self, token: int) -> None:
        """Append an output token to the sequence."""
        if self._params.penalises:
            place = self._note(token)
            self._counts[place] += 1

    def _note(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place

    def apply(self, logits: Tensor) -> None:
        """Change logits, float32 [vocab], in place; they stay finite."""
        if len(self._biased):
            logits.index_add_(0, self._biased.to(logits.device), self._bias.to(logits.device))
        if self._place:
            self._penalise(logits)

    def _penalise(self, logits: Tensor) -> None:
        params, size = self._params, len(self._place)
        ids = torch.from_numpy(self._ids[:size]).to(logits.device)
        counts = torch.from_numpy(self._counts[:size]).to(logits.device)
        factor = params.repetition_penalty
        values = logits[ids].double()
        values = torch.where(values > 0, values / factor, values * factor)
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        logits[ids] = values.clamp_(-_MAX_FLOAT, _MAX_FLOAT).to(logits.dtype)


@dataclass(frozen=True)
class SampleRow:
    """Sampling parameters and state of one row."""

    params: SamplingParams
    seed: int
    position: int
    """Index, in its sequence, of the token that is chosen."""
    banned: Sequence[int] = ()
    """Token ids that must not be chosen (end tokens before `min_tokens`)."""
    adjustment: Adjustment | None = None
    """Bias and penalties, if there are any."""
    allowed: bytes | None = None
    """A bit for each token of the vocabulary, the lowest first, that may be chosen; None: all."""


def broken_rows(logits: Tensor) -> list[int]:
    """Rows of logits [R, vocab] that hold NaN or plus infinity: there is no distribution."""
    return [i for i, best in enumerate(logits.amax(dim=-1).tolist()) if not best < math.inf]


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Sample one token a row, int64 [R], from logits, float32 [R, vocab].

    Greedy rows take the most likely token, the lowest id where several tie. Bias, penalties and
    banned tokens change the logits of their rows in place: a copy would cost more than the change.
    """
    for values, row in zip(logits, rows, strict=True):
        _change(values, row)
    drawn = [r for r, row in enumerate(rows) if not row.params.greedy]
    tokens = [_draw(logits[r], rows[r]) for r in drawn]
    if len(drawn) == len(rows):
        return torch.tensor(tokens, dtype=torch.long, device=logits.device)
    chosen = logits.argmax(dim=-1)
    if drawn:
        chosen[drawn] = torch.tensor(tokens, device=logits.device)
    return chosen


def score(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one token a row, and of the most likely ones.

    Args:
        logits: the model's own, float32 [R, vocab], R at least 1.
        tokens: int64 [R].
        tops: Number of most likely tokens that each row wants; no more than there are are given.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, tokens[:, None])
    ranks = (logits >= own).sum(dim=-1).tolist()
    best = logits.topk(min(max(tops), logits.shape[1]))
    ids, logprobs = best.indices.tolist(), (best.values - total).tolist()
    columns = zip(
        tokens.tolist(), (own - total)[:, 0].tolist(), ranks, ids, logprobs, tops, strict=True
    )
    return [
        TokenLogprobs(token, logprob, rank, [*zip(row_ids[:top], row_logprobs, strict=False)])
        for token, logprob, rank, row_ids, row_logprobs, top in columns
    ]


def exponentials(seed: int, position: int, ids: Tensor) -> Tensor:
    """Exponentially distributed numbers, one a token, float32 [N], above 0.

    Args:
        seed: any 64 bits.
        position: index, in its sequence, of the token that is chosen.
        ids: tokens, int64 [N].
    """
    stream = _mix(_mix(_words(seed) + _GOLDEN) + _words(position + 1) * _GOLDEN)
    bits = _mix(stream + (ids.cpu().numpy().astype(np.uint64) + _words(1)) * _GOLDEN)
    # The upper 32 bits, as a number in (0, 1). Small ones win, and have 24 digits of their own.
    uniform = torch.from_numpy((bits >> _words(32)).astype(np.float32)).add_(0.5).mul_(2.0**-32)
    return uniform.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_().to(ids.device)


def _words(number: int) -> npt.NDArray[np.uint64]:
    """[1]: arrays wrap around silently, scalars warn."""
    return np.array([number & (2**64 - 1)], np.uint64)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser."""
    z = (z ^ (z >> _words(30))) * _FACTORS[0]
    z = (z ^ (z >> _words(27))) * _FACTORS[1]
    return z ^ (z >> _words(31))


def _change(logits: Tensor, row: SampleRow) -> None:
    """Apply bias, penalties and banned tokens to one row's logits [vocab]."""
    if row.adjustment is not None:
        row.adjustment.apply(logits)
    if row.allowed is not None:
        torch.minimum(logits, _largest_logits(row.allowed, len(logits)), out=logits)
    if row.banned:
        logits.index_fill_(0, torch.from_numpy(np.array(row.banned)), -torch.inf)


@lru_cache(KEPT_MASKS)
def _largest_logits(allowed: bytes, vocab_size: int) -> Tensor:
    """Return minus infinity for the tokens that a mask does not allow, infinity for the others,
    float32 [vocab_size]. A minimum takes a thirtieth of the time of a masked fill."""
    return torch.where(token_mask(allowed, vocab_size), torch.inf, -torch.inf)


def token_mask(allowed: bytes, vocab_size: int) -> Tensor:
    """Bits, one a token and the lowest first, as bool [vocab_size]."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little", count=vocab_size)
    return torch.from_numpy(bits).bool()


def _draw(logits: Tensor, row: SampleRow) -> int:
    """Draw one token from logits [vocab]: the first of the candidates in an exponential race."""
    if not logits.max().isfinite():  # the model has overflowed: there is no distribution
        return int(logits.argmax())
    ids, weights = _candidates(logits, row.params)
    winner = int((weights / exponentials(row.seed, row.position, ids)).argmax())
    return int(ids[winner])


def _candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids and weights of the tokens that pass min-p, top-k and top-p, in order of id.

    Weights are probabilities after temperature, up to a common factor; the largest is 1.
    """
    scaled = (logits - logits.max()) / params.temperature  # in this order nothing overflows
    if params.min_p > 0.0:
        scaled.masked_fill_(scaled < math.log(params.min_p), -torch.inf)
    ids = torch.arange(len(scaled), device=scaled.device)
    if 0 < params.top_k < len(scaled):
        # Tokens as likely as the k-th stay, as in vLLM.
        kth = torch.topk(scaled, params.top_k, sorted=False).values.min()
        ids = torch.nonzero(scaled >= kth).squeeze(1)
        scaled = scaled[ids]
    weights = scaled.exp()
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
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
