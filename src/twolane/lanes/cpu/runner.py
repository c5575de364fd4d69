"""Runs work on the model, eagerly, on the calling thread: what the CPU lanes do."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twolane.lanes.base import PromptLogprobs, Sampled, Step
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptRow,
    Sampling,
    Scoring,
    Work,
)
from twolane.model.attention import Batch, KVCache, Segment
from twolane.model.decoder import Decoder
from twolane.model.sampler import Adjustment, SampleRow, sample, score
from twolane.sampling import TokenLogprobs

SCORED_LOGITS = 2**22
"""The most logits made at a time for a prompt's log-probabilities: 16 MiB, and as much again."""


class _Place(NamedTuple):
    """Where a token is sampled."""

    row: int
    """Of the work."""
    slot: int
    position: int
    """Of the token, in its sequence."""
    sampling: Sampling


class Runner:
    """One model, one KV pool, and for every slot the last token and what penalties need.

    Two lanes may run work at the same time: the engine sees to it that no slot and no page that
    one of them writes is named by the other.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, page_size: int, slots: int) -> None:
        self._decoder = decoder
        self._kv = kv
        self._page_size = page_size
        self._last_token = [0] * slots
        self._adjustments: list[Adjustment | None] = [None] * slots

    def run(self, work: Work) -> Iterator[Step]:
        """Do the work; yields what each step came to when it is done."""
        if isinstance(work, DecodeWork):
            for step in range(work.k):
                yield self._decode(work.rows, step)
        elif isinstance(work, PrefillWork):
            yield self._prefill(work)
        else:
            yield self._hybrid(work)

    def _decode(self, rows: Sequence[DecodeRow], step: int) -> Step:
        alive = [(i, row) for i, row in enumerate(rows) if step < row.steps]
        tokens = torch.tensor([self._last_token[row.slot] for _, row in alive])
        batch = self._batch([Segment(row.position + step, 1, row.pages) for _, row in alive])
        hidden = self._layers(self._decoder.embed(tokens), batch, 0, self._decoder.spec.layers)
        return Step(self._sample(hidden, [_next(i, row, step) for i, row in alive]))

    def _prefill(self, work: PrefillWork) -> Step:
        batch = self._batch([_segment(row) for row in work.rows])
        hidden = self._resume(work)
        hidden = self._layers(hidden, batch, work.first, work.last)
        if not work.finishes:
            work.state.hidden, work.state.rows = hidden, work.rows
            return Step()
        work.state.hidden, work.state.rows = None, ()
        return self._finish_prompts(hidden, work.rows, first_row=0)

    def _resume(self, work: PrefillWork) -> Tensor:
        """The hidden states where the last slice left them, without the rows that have left."""
        if work.first == 0:
            return self._decoder.embed(_tokens(work.rows))
        hidden = work.state.hidden
        assert isinstance(hidden, Tensor)
        if work.state.rows == work.rows:
            return hidden
        alive = {row.slot for row in work.rows}
        parts = torch.split(hidden, [len(row.tokens) for row in work.state.rows])
        kept = zip(work.state.rows, parts, strict=True)
        return torch.cat([part for row, part in kept if row.slot in alive])

    def _hybrid(self, work: HybridWork) -> Step:
        last = torch.tensor([self._last_token[row.slot] for row in work.decode], dtype=torch.long)
        tokens = torch.cat([last, _tokens(work.prompts)])
        segments = [Segment(row.position, 1, row.pages) for row in work.decode]
        batch = self._batch(segments + [_segment(row) for row in work.prompts])
        hidden = self._layers(self._decoder.embed(tokens), batch, 0, self._decoder.spec.layers)
        n = len(work.decode)
        decoded = self._sample(hidden[:n], [_next(i, row, 0) for i, row in enumerate(work.decode)])
        prompts = self._finish_prompts(hidden[n:], work.prompts, first_row=n)
        return Step([*decoded, *prompts.sampled], prompts.prompt_logprobs)

    def _finish_prompts(self, hidden: Tensor, rows: Sequence[PromptRow], first_row: int) -> Step:
        """Sample after the last token of each prompt that is complete; score what is asked for."""
        ends: list[int] = []
        places: list[_Place] = []
        scored: list[PromptLogprobs] = []
        end = 0
        for i, row in enumerate(rows, first_row):
            if row.scoring is not None:
                scored.append(PromptLogprobs(i, self._score(hidden[end:], row.scoring)))
            end += len(row.tokens)
            if row.sampling is not None:
                place = _Place(i, row.slot, row.start + len(row.tokens), row.sampling)
                self._adjustments[row.slot] = _adjustment(place)
                ends.append(end - 1)
                places.append(place)
        return Step(self._sample(hidden[ends], places), scored)

    def _sample(self, hidden: Tensor, places: Sequence[_Place]) -> list[Sampled]:
        """Sample after each of the hidden states [R, hidden]."""
        if not places:
            return []
        logits = self._decoder.head(hidden)
        chosen = sample(logits, [self._sample_row(place) for place in places])
        scores = _scores(logits, chosen, places)
        tokens: list[int] = chosen.tolist()
        for place, token in zip(places, tokens, strict=True):
            self._last_token[place.slot] = token
            if (adjustment := self._adjustments[place.slot]) is not None:
                adjustment.add(token)
        return [
            Sampled(place.row, token, scores.get(i))
            for i, (place, token) in enumerate(zip(places, tokens, strict=True))
        ]

    def _sample_row(self, place: _Place) -> SampleRow:
        sampling, position = place.sampling, place.position
        banned, adjustment = sampling.banned(position), self._adjustments[place.slot]
        return SampleRow(sampling.params, sampling.seed, position, banned, adjustment)

    def _score(self, hidden: Tensor, scoring: Scoring) -> list[TokenLogprobs]:
        """Score the targets that follow the first of these hidden states, some at a time."""
        some = max(1, SCORED_LOGITS // self._decoder.spec.vocab_size)
        scores: list[TokenLogprobs] = []
        for first in range(0, len(scoring.targets), some):
            targets = torch.tensor(scoring.targets[first : first + some])
            logits = self._decoder.head(hidden[first : first + len(targets)])
            scores += score(logits, targets, [scoring.top] * len(targets))
        return scores

    def _layers(self, hidden: Tensor, batch: Batch, first: int, last: int) -> Tensor:
        for i in range(first, last):
            hidden = self._decoder.layer(i, hidden, batch, self._kv)
        return hidden

    def _batch(self, segments: Sequence[Segment]) -> Batch:
        return Batch.build(segments, self._page_size)


def _tokens(rows: Sequence[PromptRow]) -> Tensor:
    return torch.tensor([token for row in rows for token in row.tokens], dtype=torch.long)


def _segment(row: PromptRow) -> Segment:
    return Segment(row.start, len(row.tokens), row.pages)


def _next(i: int, row: DecodeRow, step: int) -> _Place:
    """Where a decode row samples in that step of a launch."""
    return _Place(i, row.slot, row.position + step + 1, row.sampling)


def _adjustment(place: _Place) -> Adjustment | None:
    """What the slot of a prompt that ends here needs from now on."""
    sampling = place.sampling
    if not (sampling.params.penalises or sampling.params.logit_bias):
        return None
    known = sampling.tokens[: place.position]
    n = sampling.prompt_tokens
    return Adjustment(sampling.params, known[:n], known[n:])


def _scores(logits: Tensor, chosen: Tensor, places: Sequence[_Place]) -> dict[int, TokenLogprobs]:
    """Of the rows that ask for log-probabilities, by row of the logits."""
    tops = {i: place.sampling.params.logprobs for i, place in enumerate(places)}
    asked = {i: top for i, top in tops.items() if top is not None}
    if not asked:
        return {}
    rows = list(asked)
    scores = score(logits[rows], chosen[rows], list(asked.values()))
    return dict(zip(rows, scores, strict=True))
