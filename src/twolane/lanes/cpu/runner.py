"""Runs work on the model, eagerly, on the calling thread: what the CPU lanes do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twolane.devices import LaneName
from twolane.lanes.base import PromptLogprobs, Sampled, Step
from twolane.lanes.cpu.sampler import Adjustment, SampleRow, broken_rows, sample, score
from twolane.lanes.sampling_points import BatchRows, SamplingPoint, SamplingPoints, next_point
from twolane.lanes.slot_table import SlotTable
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Sampling,
    TokenMask,
    Work,
    unpack,
)
from twolane.model.attention import Batch, KVCache, Segment
from twolane.model.decoder import Decoder
from twolane.model.linear_attention import SequenceStates
from twolane.model.load.peft import read_adapter
from twolane.model.lora import AdapterPool
from twolane.model.products import Products
from twolane.sampling import TokenLogprobs

if TYPE_CHECKING:
    from twolane.lanes.cpu.compiled import CompiledLayers

SCORED_LOGITS = 2**22
"""The most logits made at a time for a prompt's log-probabilities: 16 MiB, and as much again."""
AwaitMasks = Callable[[], Sequence[TokenMask]]
"""Waits for the masks that follow a launch."""


def no_late_masks() -> Sequence[TokenMask]:
    """No masks follow."""
    return ()


@dataclass(frozen=True, slots=True)
class _Paused:
    """A prefill batch between two slices."""

    batch: BatchRows
    hidden: Tensor
    """[T, hidden]"""


@dataclass(frozen=True, slots=True)
class _PassRows:
    """The rows of one pass."""

    batch: Batch
    products: Products
    """Products of the pass, with those of its adapters."""


class Runner:
    """A model with its KV pool and, for every slot, the last token and the penalties' state.

    Two lanes may run work at the same time: the engine sees to it that no slot and no page that
    one of them writes is named by the other.

    Args:
        decoder: the model, or this rank's part of it.
        kv: the pool.
        slots: the most requests at a time.
        adapters: the LoRA adapters that are loaded; None: none is served.
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, slots: int, adapters: AdapterPool | None = None
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._slots = SlotTable(slots)
        self._compiled = _compiled_layers(decoder)
        self._adapters = adapters or AdapterPool(decoder.weights, 0)
        self._follows = decoder.group.rank > 0
        """Whether another rank has the logits, and samples."""
        self._last_token = [0] * slots
        self._adjustments: list[Adjustment | None] = [None] * slots
        self._allowed: list[bytes | None] = [None] * slots
        """The masks of the slots that a launch constrains, until it has sampled them."""
        self._paused: dict[int, _Paused] = {}
        """Batches between two slices, by id."""

    @property
    def compiled(self) -> bool:
        """Whether decode steps are compiled, for any number of threads."""
        return self._compiled is not None

    def run(self, work: Work, masks: AwaitMasks = no_late_masks) -> Iterator[Step]:
        """Run the work and yield the results of each step when it is done.

        `masks` is called before something is sampled whose masks follow the launch.
        """
        self._slots.take(work.slots)
        self._constrain(work.masks)
        late = masks if work.late and not self._follows else no_late_masks
        if isinstance(work, DecodeWork):
            for step in range(work.k):
                yield self._decode(work.rows, step, late)
        elif isinstance(work, PrefillWork):
            yield self._prefill(work, late)
        else:
            yield self._hybrid(work, late)

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """See `Lanes.load_adapter`."""
        decoder, pool = self._decoder, self._adapters
        read = read_adapter(path, decoder.shard, decoder.dtype, pool.max_rank, digest)
        pool.put(slot, read)

    def drop_adapter(self, slot: int) -> None:
        """See `Lanes.drop_adapter`."""
        self._adapters.put(slot, None)

    def bind(self, lane: LaneName) -> None:
        """Have this thread run that lane's work from now on, on as many threads as PyTorch's."""
        self._decoder.group.bind(lane)
        if self.compiled:
            from twolane.kernels.cpu.team import set_threads

            set_threads(torch.get_num_threads())

    def drop(self, batch: int) -> None:
        """Forget the hidden states of a batch that has no further slice."""
        self._paused.pop(batch, None)

    def _constrain(self, masks: Sequence[TokenMask]) -> None:
        for mask in masks:
            self._allowed[mask.slot] = mask.allowed

    def _decode(self, rows: Sequence[DecodeRow], step: int, late: AwaitMasks) -> Step:
        alive = [i for i, row in enumerate(rows) if step < row.steps]
        points = [next_point(i, rows[i], step) for i in alive]
        places = [SequenceStates(point.slot, point.position - 1, 1) for point in points]
        hidden = self._decoder.embed(self._last_tokens([point.slot for point in points]))
        hidden = self._layers(hidden, self._rows(places), 0, self._decoder.spec.layers)
        self._constrain(late())
        return self._sample(hidden, points, alive)

    def _prefill(self, work: PrefillWork, late: AwaitMasks) -> Step:
        paused = self._resume(work)
        hidden = self._slice(work, paused.hidden)
        if not work.finishes:
            self._paused[work.batch] = _Paused(paused.batch, hidden)
            return Step()
        self.drop(work.batch)
        self._constrain(late())
        return self._finish(hidden, SamplingPoints.of((), work.rows, paused.batch.chunks))

    def _resume(self, work: PrefillWork) -> _Paused:
        """Return the batch as the last slice left it, without the rows that have left."""
        if work.first == 0:
            return _Paused(BatchRows(work.rows, work.chunks), self._begin(work))
        paused = self._paused[work.batch]
        if paused.batch.rows == work.rows:
            return paused
        batch, left = paused.batch.left(work.rows)
        return _Paused(batch, paused.hidden[torch.from_numpy(left)])

    def _begin(self, work: PrefillWork) -> Tensor:
        """Return the hidden states before a prefill batch's first layer, [T, hidden]."""
        return self._decoder.embed(_tokens(work.chunks))

    def _slice(self, work: PrefillWork, hidden: Tensor) -> Tensor:
        """Run a slice's layers on the hidden states [T, hidden]; return those after them."""
        rows = self._rows([_segment(row) for row in work.rows])
        return self._layers(hidden, rows, work.first, work.last)

    def _hybrid(self, work: HybridWork, late: AwaitMasks) -> Step:
        last = self._last_tokens([row.slot for row in work.decode])
        tokens = torch.cat([last, _tokens(work.chunks)])
        places = [SequenceStates(row.slot, row.position, 1) for row in work.decode]
        places += [_segment(row) for row in work.prompts]
        hidden = self._decoder.embed(tokens)
        hidden = self._layers(hidden, self._rows(places), 0, self._decoder.spec.layers)
        self._constrain(late())
        return self._finish(hidden, SamplingPoints.of(work.decode, work.prompts, work.chunks))

    def _finish(self, hidden: Tensor, ends: SamplingPoints) -> Step:
        """Sample and score where a pass ends; `hidden` is its last, [T, hidden]."""
        for point in ends.begun:
            self._adjustments[point.slot] = _adjustment(self._slots.sampling_of(point.slot))
        most = max(1, SCORED_LOGITS // self._decoder.spec.vocab_size)
        scored: list[PromptLogprobs] = []
        for row in ends.scored:
            scores: list[TokenLogprobs] = []
            for where, targets in row.parts(most):
                logits = self._decoder.head(hidden[where])
                if self._follows:
                    continue
                scores += score(logits, torch.tensor(targets), [row.top] * len(targets))
            scored.append(PromptLogprobs(row.row, scores))
        return self._sample(hidden[ends.where], ends.points, ends.rows, scored)

    def _sample(
        self,
        hidden: Tensor,
        points: Sequence[SamplingPoint],
        rows: Sequence[int],
        scored: Sequence[PromptLogprobs] = (),
    ) -> Step:
        """Sample after each of the hidden states [R, hidden]; `rows` are those of the work."""
        if not points:
            return Step((), scored)
        compiled = self._compiled
        logits = self._decoder.head(hidden) if compiled is None else compiled.logits(hidden)
        if self._follows:
            return Step()
        broken = {rows[i] for i in broken_rows(logits)}
        samplings = [self._slots.sampling_of(point.slot) for point in points]
        tops = {i: each.params.logprobs for i, each in enumerate(samplings)}
        asked = {i: top for i, top in tops.items() if top is not None}
        raw = logits[list(asked)] if asked else logits  # a copy: sampling changes the logits
        chosen = sample(logits, list(map(self._sample_row, points, samplings)))
        scores = _scores(raw, chosen, asked)
        embeddings = self._embeddings(hidden, samplings)
        tokens: list[int] = chosen.tolist()
        for point, token in zip(points, tokens, strict=True):
            self._last_token[point.slot] = token
            if (adjustment := self._adjustments[point.slot]) is not None:
                adjustment.add(token)
        sampled = [
            Sampled(row, token, scores.get(i), embeddings.get(i))
            for i, (row, token) in enumerate(zip(rows, tokens, strict=True))
            if row not in broken
        ]
        return Step(sampled, scored, sorted(broken))

    def _embeddings(self, hidden: Tensor, samplings: Sequence[Sampling]) -> dict[int, bytes]:
        """Return the hidden states [R, hidden] of the rows that ask for them, by row."""
        return {
            i: self._decoder.last(hidden[i : i + 1]).float().numpy().tobytes()
            for i, sampling in enumerate(samplings)
            if sampling.params.embeds
        }

    def _sample_row(self, point: SamplingPoint, sampling: Sampling) -> SampleRow:
        position = point.position
        banned, adjustment = sampling.banned(position), self._adjustments[point.slot]
        allowed, self._allowed[point.slot] = self._allowed[point.slot], None
        return SampleRow(sampling.params, sampling.seed, position, banned, adjustment, allowed)

    def _last_tokens(self, slots: Sequence[int]) -> Tensor:
        """Return the tokens sampled last in these slots, int64 [R]."""
        tokens = torch.tensor([self._last_token[slot] for slot in slots], dtype=torch.long)
        return self._decoder.group.broadcast(tokens) if slots else tokens

    def _layers(self, hidden: Tensor, rows: _PassRows, first: int, last: int) -> Tensor:
        compiled, plain = self._compiled, rows.products is self._decoder.products
        if compiled is not None and plain and compiled.takes(self._kv):
            return compiled.run(first, last, hidden, rows.batch, self._kv)
        for i in range(first, last):
            hidden = self._decoder.layer(i, hidden, rows.batch, self._kv, rows.products)
        return hidden

    def _rows(self, places: Sequence[SequenceStates]) -> _PassRows:
        """Build a pass's rows."""
        known, adapters = self._slots, self._slots.adapters
        segments = [
            Segment(p.start, p.tokens, known.pages[p.slot], p.slot, p.parts, known.windows[p.slot])
            for p in places
        ]
        batch = Batch.build(segments, self._kv.page_size)
        slots = [adapters[place.slot] for place in places]
        products = self._decoder.products
        if max(slots) >= 0:
            each = np.repeat(slots, [place.tokens for place in places])
            products = self._adapters.products(products, each)
        return _PassRows(batch, products)


def _compiled_layers(decoder: Decoder) -> "CompiledLayers | None":
    """Return the layers in compiled code, or None if they are not run in it."""
    if decoder.weights.layers[0].qkv.scheme != "tiles":
        return None
    from twolane.lanes.cpu.compiled import compiled_layers

    return compiled_layers(decoder)


def _segment(row: PromptRow) -> SequenceStates:
    return SequenceStates(row.slot, row.start, row.count, row.parts())


def _tokens(chunks: Sequence[PromptChunk]) -> Tensor:
    """Return the tokens of all chunks, int64 [T]."""
    packed = b"".join([chunk.tokens for chunk in chunks])
    return torch.tensor(np.frombuffer(packed, dtype=np.int64))


def _adjustment(sampling: Sampling) -> Adjustment | None:
    """Return the bias and penalty state of a slot whose prompt ends; None if it needs none."""
    if not (sampling.params.penalises or sampling.params.logit_bias):
        return None
    known, n = unpack(sampling.known).tolist(), sampling.prompt_tokens
    return Adjustment(sampling.params, known[:n], known[n:])


def _scores(raw: Tensor, chosen: Tensor, asked: Mapping[int, int]) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the rows that ask for them, by row of the step.

    Args:
        raw: logits of these rows as the model gave them, [P, vocab].
        chosen: tokens of all rows, [R].
        asked: number of alternatives that each of these rows wants, by row of the step.
    """
    if not asked:
        return {}
    scores = score(raw, chosen[list(asked)], list(asked.values()))
    return dict(zip(asked, scores, strict=True))
