"""Given sequences through a GPU's lanes: logits of all their positions."""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from twolane.devices import LaneName
from twolane.lanes.base import Ticket
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.settings import LaneSizes
from twolane.lanes.slot_table import PendingSlotUpdates
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Sampling,
    Scoring,
    SlotUpdate,
    Work,
    pack,
)
from twolane.sampling import SamplingParams

PAGE = 16
REUSED = 256
"""Tokens of every sequence but the first that a batch before has computed."""
BESIDE_TOKENS, BESIDE_STEPS = 96, 24
PATIENCE = 30.0


class Forced:
    """Three sequences of equal length over the lanes of a machine.

    Args:
        machine: with the model.
        sequences: token ids.
        prompt: how many of each are its prompt; the others go through decode steps.
    """

    def __init__(
        self, machine: CudaMachine, sequences: Sequence[Sequence[int]], prompt: int
    ) -> None:
        self.spec, self._sequences, self._prompt = machine.spec, sequences, prompt
        self._each = -(-len(sequences[0]) // PAGE)
        slots = len(sequences) + 1  # the last one is for what runs beside
        positions = self._each * PAGE
        sizes = LaneSizes(slots * self._each, PAGE, slots, positions)
        self.lanes = machine.start(sizes, lambda: None, lambda *_: None)
        self._pending = PendingSlotUpdates()
        for slot in range(slots):
            greedy = Sampling(SamplingParams(temperature=0.0), 0, 0, ())
            pages = tuple(range(slot * self._each, (slot + 1) * self._each))
            self._pending.add(SlotUpdate(slot, 0, pages, greedy))
        self._logits: list[Tensor] = []
        compute = self.lanes.runner._head

        def noted(*arguments: object) -> Tensor:
            logits = compute(*arguments)
            self._logits.append(logits.clone())  # the next pass writes there
            return logits

        self.lanes.runner._head = noted

    def run(
        self, prefill: int, decode: int, cuts: Sequence[int], *, beside: bool = False
    ) -> Tensor:
        """Logits [sequences, tokens, vocab], float32.

        Args:
            prefill: SMs of prefill.
            decode: SMs of decode.
            cuts: layers before which the slices of a batch end.
            beside: whether the other lane is at work meanwhile.
        """
        self._forget()
        first = [(0, 0, self._prompt), *((i, 0, REUSED) for i in range(1, len(self._sequences)))]
        second = [(i, REUSED, self._prompt) for i in range(1, len(self._sequences))]
        logits: list[list[Tensor]] = [[] for _ in self._sequences]
        for chunks in (first, second):
            other = self._decode_beside(decode) if beside and decode < self.lanes.units else []
            for (i, _, _), part in zip(chunks, self._prefill(chunks, prefill, cuts), strict=True):
                logits[i].append(part)
            self._wait(other)
        for position in range(self._prompt, len(self._sequences[0])):
            other = self._prefill_beside(prefill) if beside and prefill < self.lanes.units else []
            for i, row in enumerate(self._decode(position, decode)):
                logits[i].append(row[None])
            self._wait(other)
        return torch.stack([torch.cat(parts) for parts in logits])

    def hybrid(self) -> tuple[Tensor, Tensor]:
        """Logits, float32, by hybrid passes: the first sequence decodes behind the chunks of the
        others' prompts.

        Returns:
            [tokens after the prompt, vocab] of the first, [others, tokens of the prompt, vocab].
        """
        decoded, prompts = [], []
        for _ in self._hybrid(scored=True):
            *chunks, after = self._logits
            prompts.append(torch.stack(chunks))
            decoded.append(after[0])
        return torch.stack(decoded), torch.cat(prompts, dim=1)

    def sampled(self) -> tuple[list[int], list[int]]:
        """The tokens that such passes sample where nothing is scored: after each token of the
        first, and after the others' prompts."""
        steps = [[one.token for one in t.steps[0].sampled] for t in self._hybrid(scored=False)]
        return [step[0] for step in steps], steps[-1][1:]

    def _hybrid(self, *, scored: bool) -> Iterator[Ticket]:
        """Each pass when it has ended."""
        self._forget()
        self._prefill([(0, 0, self._prompt)], self.lanes.units, ())
        positions = range(self._prompt, len(self._sequences[0]))
        chunk = -(-self._prompt // len(positions))
        for i, position in enumerate(positions):
            self._give(position)
            start, end = chunk * i, min(chunk * (i + 1), self._prompt)
            ends = not scored and end == self._prompt
            others = range(1, len(self._sequences))
            rows = tuple(PromptRow(n, start, end - start, samples=ends) for n in others)
            chunks = tuple(self._chunk(n, start, end, scored=scored) for n in others)
            self._logits.clear()
            work = HybridWork((DecodeRow(0, position, 1),), rows, chunks)
            ticket = self._launch("device", self.lanes.units, work)
            self._wait([ticket])
            yield ticket

    def _forget(self) -> None:
        """Whatever is read of the pool before it is written again shows."""
        torch.cuda.synchronize()
        for layer in self.lanes.runner.kv.layers:
            layer.fill_(float("nan"))
        torch.cuda.synchronize()

    def _prefill(
        self, chunks: Sequence[tuple[int, int, int]], units: int, cuts: Sequence[int]
    ) -> list[Tensor]:
        """Logits of the tokens [start, end) of each sequence named."""
        rows = tuple(PromptRow(i, start, end - start) for i, start, end in chunks)
        tokens = tuple(self._chunk(*chunk, scored=True) for chunk in chunks)
        self._logits.clear()
        bounds = [0, *cuts, self.spec.layers]
        tickets = [
            self._launch(
                "prefill",
                units,
                PrefillWork(0, rows, a, b, b == self.spec.layers, () if a else tokens),
            )
            for a, b in pairwise(bounds)
        ]
        self._wait(tickets)
        return self._logits[: len(chunks)]

    def _chunk(self, i: int, start: int, end: int, *, scored: bool) -> PromptChunk:
        tokens, targets = self._sequences[i][start:end], self._sequences[i][start + 1 : end + 1]
        return PromptChunk(pack(tokens), Scoring(pack(targets), 0) if scored else None)

    def _decode(self, position: int, units: int) -> Tensor:
        """Logits [sequences, vocab] after the token at that position."""
        self._give(position)
        count = len(self._sequences)
        rows = [DecodeRow(i, position, 1) for i in range(count)]
        self._wait([self._launch("decode", units, DecodeWork(tuple(rows), 1))])
        return self.lanes.runner.steps.logits[:count].clone()

    def _give(self, position: int) -> None:
        """The token of each sequence there, as if it had been sampled."""
        last = self.lanes.runner.slots.last_token
        given = torch.tensor([sequence[position] for sequence in self._sequences])
        last[: len(given)] = given.to(last)
        torch.cuda.current_stream().synchronize()

    def _prefill_beside(self, units: int) -> list[Ticket]:
        """Other work for the prefill lane."""
        slot = len(self._sequences)
        row, chunk = PromptRow(slot, 0, BESIDE_TOKENS, samples=True), pack([7] * BESIDE_TOKENS)
        chunks = (PromptChunk(chunk),)
        work = PrefillWork(1, (row,), 0, self.spec.layers, finishes=True, chunks=chunks)
        return [self._launch("prefill", units, work)]

    def _decode_beside(self, units: int) -> list[Ticket]:
        """Other work for the decode lane."""
        slot = len(self._sequences)
        self._wait(self._prefill_beside(self.lanes.units))
        row = DecodeRow(slot, BESIDE_TOKENS, BESIDE_STEPS)
        return [self._launch("decode", units, DecodeWork((row,), BESIDE_STEPS))]

    def _launch(self, lane: LaneName, units: int, work: Work) -> Ticket:
        return self.lanes.launch(lane, units, self._pending.attach(work), ())

    @staticmethod
    def _wait(tickets: Sequence[Ticket]) -> None:
        end = time.monotonic() + PATIENCE
        while not all(ticket.done for ticket in tickets):
            assert time.monotonic() < end, "nothing happens any more"
            time.sleep(1e-4)
        assert not any(ticket.error for ticket in tickets)
