"""Runs work on the model, eagerly, on the calling thread: what the CPU lanes do."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from twolane.lanes import Sampled, Step
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptRow,
    Sampling,
    Work,
)
from twolane.model.attention import Batch, KVCache, Segment
from twolane.model.decoder import Decoder
from twolane.model.sampler import SampleRow, sample


class Runner:
    """One model, one KV pool, and the last token of every slot.

    Two lanes may run work at the same time: the engine sees to it that no slot and no page that
    one of them writes is named by the other.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, page_size: int, slots: int) -> None:
        self._decoder = decoder
        self._kv = kv
        self._page_size = page_size
        self._last_token = [0] * slots

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
        rows_to_sample = [_sample_row(row.sampling, row.position + step + 1) for _, row in alive]
        chosen = self._sample(hidden, rows_to_sample, [row.slot for _, row in alive])
        return Step([Sampled(i, token) for (i, _), token in zip(alive, chosen, strict=True)])

    def _prefill(self, work: PrefillWork) -> Step:
        batch = self._batch([_segment(row) for row in work.rows])
        hidden = self._resume(work)
        hidden = self._layers(hidden, batch, work.first, work.last)
        if not work.finishes:
            work.state.hidden, work.state.rows = hidden, work.rows
            return Step()
        work.state.hidden, work.state.rows = None, ()
        return Step(self._finish_prompts(hidden, work.rows, first_row=0))

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
        rows = [_sample_row(row.sampling, row.position + 1) for row in work.decode]
        n = len(work.decode)
        chosen = self._sample(hidden[:n], rows, [row.slot for row in work.decode])
        done = self._finish_prompts(hidden[n:], work.prompts, first_row=n)
        return Step([*map(Sampled, range(n), chosen), *done])

    def _finish_prompts(
        self, hidden: Tensor, rows: Sequence[PromptRow], first_row: int
    ) -> list[Sampled]:
        """Sample after the last token of each prompt that is complete."""
        ends, sample_rows, slots, places = [], [], [], []
        end = 0
        for i, row in enumerate(rows):
            end += len(row.tokens)
            if row.sampling is not None:
                ends.append(end - 1)
                sample_rows.append(_sample_row(row.sampling, row.start + len(row.tokens)))
                slots.append(row.slot)
                places.append(first_row + i)
        chosen = self._sample(hidden[ends], sample_rows, slots)
        return list(map(Sampled, places, chosen))

    def _sample(self, hidden: Tensor, rows: Sequence[SampleRow], slots: Sequence[int]) -> list[int]:
        if not rows:
            return []
        tokens: list[int] = sample(self._decoder.head(hidden), rows).tolist()
        for slot, token in zip(slots, tokens, strict=True):
            self._last_token[slot] = token
        return tokens

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


def _sample_row(sampling: Sampling, position: int) -> SampleRow:
    return SampleRow(sampling.params, sampling.seed, position, sampling.banned(position))
