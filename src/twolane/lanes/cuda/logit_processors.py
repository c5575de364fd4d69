"""Sampling work outside the decode graphs: bias, penalties and log-probabilities, on the device.

Queued between the forward pass and the end of a step, for the rows that ask for it; the host waits
for nothing here either, so look-ahead works as for all others. A slot's history lives on the
device, since a step is queued before the token of the one before it is known.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twolane.kernels.sampling import MAX_BANNED
from twolane.kernels.token_masks import allow_only
from twolane.lanes.cuda.slots import upload
from twolane.lanes.sampling_points import SamplingPoint
from twolane.lanes.slot_table import SlotTable
from twolane.lanes.work import MAX_ENDS, Sampling, TokenMask, unpack
from twolane.sampling import MAX_BIASED_TOKENS, TokenLogprobs

_MAX_FLOAT = torch.finfo(torch.float32).max


class SlotBiases:
    """Amounts that each slot adds to the logits of some tokens, on the device.

    All rows are changed by one kernel, however many tokens their slots have.

    Args:
        slots: the most requests at a time.
        width: the most tokens of a slot.
        device: The device of the logits.
    """

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self._device, self._width = device, width
        self._ids = torch.zeros((slots, width), dtype=torch.int32, device=device)
        self._amounts = torch.zeros((slots, width), dtype=torch.float32, device=device)
        self._counts = [0] * slots

    def put(self, slot: int, amounts: Mapping[int, float]) -> None:
        """Set the amounts of a slot by token id."""
        self._counts[slot] = len(amounts)
        if not amounts:
            return
        # The first token stands in the places that are left: to write it twice changes nothing.
        ids = np.full(self._width, next(iter(amounts)), np.int32)
        values = np.full(self._width, next(iter(amounts.values())), np.float32)
        ids[: len(amounts)] = list(amounts)
        values[: len(amounts)] = list(amounts.values())
        sent = upload(np.concatenate([ids, values.view(np.int32)]), self._device)
        self._ids[slot] = sent[: self._width]
        self._amounts[slot] = sent[self._width :].view(torch.float32)

    def apply(self, logits: Tensor, points: Iterable[SamplingPoint]) -> None:
        """Add their slots' amounts to the rows of logits, float32 [R, vocab], in place."""
        rows = [(point.row, point.slot) for point in points if self._counts[point.slot]]
        if not rows:
            return
        widest = max(self._counts[slot] for _, slot in rows)
        row, slot = upload(np.array(rows, np.int32).T, self._device).long().view(2, -1, 1)
        ids = self._ids[slot[:, 0], :widest].long()
        logits[row, ids] = logits[row, ids] + self._amounts[slot[:, 0], :widest]


class TokenHistory:
    """Penalty state of one sequence on the device, as `lanes.cpu.sampler.Adjustment`.

    Args:
        sampling: Sampling of the request.
        vocab: tokens of the vocabulary.
        device: The device of the logits.
    """

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device) -> None:
        self._params = sampling.params
        known, n = unpack(sampling.known), sampling.prompt_tokens
        prompt, output = known[:n], known[n:]
        counted = [np.bincount(part, minlength=vocab) for part in (prompt, output)]
        counts = upload(np.stack(counted).astype(np.int32), device).view(2, vocab)
        self._seen, self._counts = counts[0] > 0, counts[1].float()

    def apply(self, logits: Tensor) -> None:
        """Change logits, float32 [vocab], in place; they stay finite."""
        params, counts = self._params, self._counts
        factor, produced = params.repetition_penalty, counts > 0
        values = torch.where(logits > 0, logits / factor, logits * factor)
        values = torch.where(self._seen | produced, values, logits)
        values -= params.frequency_penalty * counts + params.presence_penalty * produced
        logits.copy_(values.clamp_(-_MAX_FLOAT, _MAX_FLOAT))

    def add(self, token: Tensor) -> None:
        """Append an output token, int [1], to the sequence."""
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
        count = len(slots.sampling)
        self._biases = SlotBiases(count, MAX_BIASED_TOKENS, device)
        self._bans = SlotBiases(count, MAX_ENDS, device)
        """Tokens that end a request, where they are too many for the sampling kernel."""
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
            if params.penalises:
                self._histories[slot] = TokenHistory(sampling, self._vocab, self._device)
            self._biases.put(slot, params.logit_bias)
            ends = sampling.banned(sampling.prompt_tokens)
            many_banned = len(ends) > MAX_BANNED
            self._bans.put(slot, dict.fromkeys(ends, -math.inf) if many_banned else {})
            asked = params.logprobs is not None or params.embeds
            if params.penalises or params.logit_bias or many_banned or asked:
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
        self._biases.apply(logits, wanting)
        for point in wanting:
            if (history := self._histories.get(point.slot)) is not None:
                history.apply(logits[point.row])
        banning = (point for point in wanting if samplings[point.row].banned(point.position))
        self._bans.apply(logits, banning)
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
