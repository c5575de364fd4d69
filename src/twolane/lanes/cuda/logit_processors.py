"""Sampling work outside the decode graphs: bias, penalties and log-probabilities, on the device.

Queued between the forward pass and the end of a step, for the rows that ask for it; the host waits
for nothing here either, so look-ahead works as for all others. A slot's history lives on the
device, since a step is queued before the token of the one before it is known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twolane.kernels.sampling import MAX_BANNED
from twolane.kernels.token_masks import allow_only
from twolane.lanes.cuda.slots import upload
from twolane.lanes.sampling_points import SamplingPoint
from twolane.lanes.slot_table import SlotTable
from twolane.lanes.work import Sampling, TokenMask, unpack
from twolane.sampling import TokenLogprobs

_MAX_FLOAT = torch.finfo(torch.float32).max


class TokenHistory:
    """Bias and penalty state of one sequence on the device, as `lanes.cpu.sampler.Adjustment`.

    Args:
        sampling: Sampling of the request.
        vocab: tokens of the vocabulary.
        device: The device of the logits.
    """

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device) -> None:
        self.sampling = sampling
        params = sampling.params
        self._seen: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.penalises:
            known, n = unpack(sampling.known), sampling.prompt_tokens
            prompt, output = known[:n], known[n:]
            counted = [np.bincount(part, minlength=vocab) for part in (prompt, output)]
            counts = upload(np.stack(counted).astype(np.int32), device).view(2, vocab)
            self._seen, self._counts = counts[0] > 0, counts[1].float()
        if params.logit_bias:
            ids = np.array(list(params.logit_bias), dtype=np.int32)
            values = np.array(list(params.logit_bias.values()), dtype=np.float32)
            sent = upload(np.concatenate([ids, values.view(np.int32)]), device)
            self._bias = sent[: len(ids)].long(), sent[len(ids) :].view(torch.float32)

    def apply(self, logits: Tensor) -> None:
        """Change logits, float32 [vocab], in place; they stay finite."""
        if self._bias is not None:
            logits.index_add_(0, *self._bias)
        if self._seen is None:
            return
        params, counts = self.sampling.params, self._counts
        factor, produced = params.repetition_penalty, counts > 0
        values = torch.where(logits > 0, logits / factor, logits * factor)
        values = torch.where(self._seen | produced, values, logits)
        values -= params.frequency_penalty * counts + params.presence_penalty * produced
        logits.copy_(values.clamp_(-_MAX_FLOAT, _MAX_FLOAT))

    def add(self, token: Tensor) -> None:
        """Append an output token, int [1], to the sequence."""
        if self._seen is not None:
            self._counts.index_add_(0, token.long(), self._counts.new_ones(1))


@dataclass(frozen=True)
class PendingScores:
    """Log-probabilities on their way to the host."""

    tokens: Tensor
    numbers: Tensor
    """Log-probability, rank, and the most likely ones', [R, 2 + top], pinned."""
    ids: Tensor
    """The most likely tokens, [R, top], pinned."""
    tops: Sequence[int]

    def collect(self) -> list[TokenLogprobs]:
        """Return the log-probabilities, one for each row, once the copies have arrived."""
        rows = zip(
            self.tokens.tolist(), self.numbers.tolist(), self.ids.tolist(), self.tops, strict=True
        )
        return [
            TokenLogprobs(token, own, int(rank), [*zip(ids[:top], best, strict=False)])
            for token, (own, rank, *best), ids, top in rows
        ]


def score(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> PendingScores:
    """`lanes.cpu.sampler.score` without waiting: queued on the current stream."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, tokens.long()[:, None])
    ranks = (logits >= own).sum(dim=-1, keepdim=True)
    best = logits.topk(min(max(tops), logits.shape[1]))
    numbers = torch.cat([own - total, ranks, best.values - total], dim=1)
    return PendingScores(fetch(tokens), fetch(numbers), fetch(best.indices), tops)


class LogitProcessors:
    """Processes the logits of slots that need more than the graphs do.

    Args:
        slots: Table of how each slot samples.
        vocab: tokens of the vocabulary.
        device: The device of the logits.
    """

    def __init__(self, slots: SlotTable, vocab: int, device: torch.device) -> None:
        self._slots = slots
        self._vocab, self._device = vocab, device
        self._wanting: set[int] = set()
        self._histories: dict[int, TokenHistory] = {}
        self._allowed: dict[int, bytes] = {}
        """Masks by slot, until the slot has been sampled."""

    def constrain(self, masks: Sequence[TokenMask]) -> None:
        """Have these slots choose among some tokens the next time they are sampled."""
        self._allowed.update({mask.slot: mask.allowed for mask in masks})

    def begin(self, points: Sequence[SamplingPoint]) -> None:
        """Begin sampling for prompts that end: their slots are these requests' from now on."""
        for point in points:
            slot = point.slot
            sampling = self._slots.sampling_of(slot)
            params = sampling.params
            self._histories.pop(slot, None)
            self._wanting.discard(slot)
            if params.penalises or params.logit_bias:
                self._histories[slot] = TokenHistory(sampling, self._vocab, self._device)
            many_banned = len(sampling.banned(sampling.prompt_tokens)) > MAX_BANNED
            asked = params.logprobs is not None or params.embeds
            if slot in self._histories or many_banned or asked:
                self._wanting.add(slot)

    def asked(self, points: Iterable[SamplingPoint]) -> list[SamplingPoint]:
        """Return the points whose slots need more than the graphs do."""
        wanting = self._wanting | self._allowed.keys()
        return [point for point in points if point.slot in wanting] if wanting else []

    def skip(self, points: Sequence[SamplingPoint]) -> None:
        """Drop the masks of rows that another rank samples."""
        for point in points:
            self._allowed.pop(point.slot, None)

    def adjust(
        self, logits: Tensor, points: Sequence[SamplingPoint]
    ) -> Callable[[Tensor], dict[int, PendingScores]]:
        """Change the logits of these rows before they are sampled.

        Returns:
            What to call with the tokens, int [R], when they are; it gives the log-probabilities
            that were asked for, by row of the logits.
        """
        wanting = [point for point in points if point.slot in self._wanting]
        samplings = {point.row: self._slots.sampling_of(point.slot) for point in wanting}
        tops = {row: sampling.params.logprobs for row, sampling in samplings.items()}
        scored = {row: top for row, top in tops.items() if top is not None}
        raw = {row: logits[row : row + 1].clone() for row in scored}
        broken = self._broken(logits, wanting)
        for point in wanting:
            row = logits[point.row]
            if (history := self._histories.get(point.slot)) is not None:
                history.apply(row)
            if len(banned := samplings[point.row].banned(point.position)) > MAX_BANNED:
                ids = upload(np.array(banned, dtype=np.int32), self._device)
                row[ids.long()] = -torch.inf
        self._mask(logits, points)
        if broken is not None:
            rows, flags = broken
            logits[rows, 0] = torch.where(flags, torch.nan, logits[rows, 0])

        def after(tokens: Tensor) -> dict[int, PendingScores]:
            for point in wanting:
                if (history := self._histories.get(point.slot)) is not None:
                    history.add(tokens[point.row : point.row + 1])
            return {
                row: score(raw[row], tokens[row : row + 1], [top]) for row, top in scored.items()
            }

        return after

    def _broken(
        self, logits: Tensor, points: Sequence[SamplingPoint]
    ) -> tuple[Tensor, Tensor] | None:
        """Rows whose logits are about to change, int [P], and whether the model gave any of them
        NaN or plus infinity, bool [P]: a mask would hide it from the sampler."""
        if not points:
            return None
        rows = upload(np.array([p.row for p in points], np.int32), self._device).long()
        return rows, ~(logits[rows].amax(dim=1) < torch.inf)

    def _mask(self, logits: Tensor, points: Sequence[SamplingPoint]) -> None:
        """Take the tokens that may not be chosen out of the rows that are constrained."""
        masked = [(p.row, self._allowed.pop(p.slot)) for p in points if p.slot in self._allowed]
        if not masked:
            return
        # Filled where the device reads it: launches wait for this. Bits beyond the vocabulary's
        # are not read.
        shape = len(masked), 1 + -(-self._vocab // 32)
        pinned = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        board = pinned.numpy()
        masks = board.view(np.uint8)[:, 4:]
        for line, (row, allowed) in enumerate(masked):
            board[line, 0] = row
            masks[line, : len(allowed)] = np.frombuffer(allowed, np.uint8)
        allow_only(logits, pinned.to(self._device, non_blocking=True))


def fetch(values: Tensor) -> Tensor:
    """Return a pinned copy, which is complete when the stream has reached it."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
        values, non_blocking=True
    )
