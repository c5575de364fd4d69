"""Queues work for the GPU on the current stream; nothing here waits for the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from twolane.devices import LaneName
from twolane.kernels.delta_rule.convolution import PromptStates
from twolane.kernels.delta_rule.prefill import prompt_lists
from twolane.kernels.prefill_attention.batch import upload as upload_parts
from twolane.kernels.prefill_attention.dispatch import PrefillPlan, PrefillWorkspace
from twolane.kernels.products.dispatch import GpuProducts
from twolane.kernels.sampling import Sampler, chosen
from twolane.lanes.base import PromptLogprobs, Sampled, Step
from twolane.lanes.cuda.decode_graphs import MAX_STEPS, DecodeGraphs
from twolane.lanes.cuda.device_clock import new_event
from twolane.lanes.cuda.forward_batch import DecodeRows, MixedRows, places_of, token_ids
from twolane.lanes.cuda.hybrid_graphs import HybridGraphs, served
from twolane.lanes.cuda.layer_graphs import LayerGraphs
from twolane.lanes.cuda.logit_processors import LogitProcessors, PendingScores, fetch, score
from twolane.lanes.cuda.slots import Slots, upload
from twolane.lanes.sampling_points import (
    BatchRows,
    SamplingPoint,
    SamplingPoints,
    ScoredRow,
    next_point,
)
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptRow,
    TokenMask,
    Work,
)
from twolane.model.gpu_decoder import GpuDecoder, GpuKVCache, PlanKey, Workspace
from twolane.model.gpu_lora import GpuAdaptedProducts
from twolane.model.load.peft import read_adapter
from twolane.parallel.channel import Channel

SCORED_LOGITS = 2**26
"""The most logits made at a time for a prompt's log-probabilities: 256 MiB."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was queued."""

    done: torch.cuda.Event
    """Event after which its results are in host memory; it is timed."""
    collect: Callable[[], Step]
    """Returns the results that the device wrote; called once `done` has happened."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Work that was queued."""

    steps: Sequence[PendingStep]
    kept: Sequence[object] = ()
    """Tensors of another launch, perhaps made on another lane's stream. Keep them referenced until
    this work ends: the caching allocator does not wait for readers on other streams."""
    end: "End | None" = None
    """Queues the end of the work, if that waits for masks (`constrain`): on the same stream, and
    before anything else that uses what the work does."""


End = Callable[[], Sequence[PendingStep]]
"""Queues the end of work whose forward pass is queued."""


@dataclass(slots=True, eq=False)
class _Pass:
    """A prefill batch between two slices."""

    batch: BatchRows
    tokens: Tensor
    """Token ids, int32 [T]."""
    hidden: Tensor
    """The residual stream, [T, hidden]."""
    positions: Tensor
    write_slots: Tensor
    """See `PromptRows`."""
    owners: Tensor | None
    """The request slot of each token, int32 [T], if one of the requests has an adapter."""
    prompts: Sequence[PromptStates] = ()
    """The rows by their states, if the model has layers of linear attention."""
    plans: dict[PlanKey, PrefillPlan] = field(default_factory=dict)
    """Attention plans for the lane and the SMs of the last slice."""


class _LaneMemory:
    """Memory that the launches of one lane write to, and no other lane's."""

    def __init__(self, decoder: GpuDecoder, max_rows: int, channel: Channel | None) -> None:
        self.activations = Workspace(decoder.spec, decoder.dtype, decoder.device, channel)
        self.activations.reserve_logits(max_rows)
        self.attention = PrefillWorkspace(decoder.device)
        self.sampler = Sampler(max_rows, decoder.spec.vocab_size, decoder.device)
        self.passes: LayerGraphs | None = None
        self.whole: HybridGraphs | None = None
        """Graphs of whole hybrid passes; None: these are launched layer by layer."""
        self._shape = 0 if decoder.follows else max_rows, decoder.spec.vocab_size

    @cached_property
    def logits(self) -> Tensor:
        """Logits of passes that are not decode graphs, float32 [max_rows, vocab]; rank 0 has
        them. They are allocated once, because the device stands still while the driver allocates
        more."""
        return torch.empty(self._shape, dtype=torch.float32, device=self.attention.device)


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """The units, memory and hook that a launch runs with."""

    units: int
    memory: _LaneMemory
    between: Callable[[], None] | None
    """See `CudaRunner.run`."""


class CudaRunner:
    """A model with its KV pool and memory for each lane.

    The whole device shares the prefill lane's memory: it excludes the lanes.

    Args:
        decoder: the model.
        kv: The model's KV pool.
        slots: The device's memory of the requests.
        steps: the decode graphs.
        max_batch_tokens: Tokens of the prefill batch that the workspace is made for; larger batches
            grow it.
        units: SMs of the device.
        channels: Channels of the lanes, if several ranks share the model; a rank other than 0
            carries out the same work, but samples nothing and has no steps.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        kv: GpuKVCache,
        slots: Slots,
        steps: DecodeGraphs,
        max_batch_tokens: int,
        units: int,
        channels: Mapping[LaneName, Channel | None] = MappingProxyType({}),
    ) -> None:
        self._decoder, self.kv, self.slots, self.steps = decoder, kv, slots, steps
        self._processors = LogitProcessors(slots.host, decoder.spec.vocab_size, decoder.device)
        self._paused: dict[int, _Pass] = {}
        """Batches between two slices, by id."""
        rows = steps.buckets[-1]
        self._scored_rows = rows if channels else SCORED_LOGITS
        """Most rows that are scored at a time: the channel's buffers hold no more."""
        prefill = _LaneMemory(decoder, rows, channels.get("prefill"))
        decode = _LaneMemory(decoder, rows, channels.get("decode"))
        prefill.activations.reserve(max_batch_tokens)
        prefill.passes = self.passes = LayerGraphs(decoder, kv, slots, steps, prefill.activations)
        if served(decoder):
            lane = prefill.logits, prefill.sampler
            prefill.whole = HybridGraphs(decoder, kv, slots, steps, self.passes, *lane, units)
        self.whole = prefill.whole
        self._memory: dict[LaneName, _LaneMemory] = {
            "prefill": prefill,
            "decode": decode,
            "device": prefill,
        }

    def run(
        self, work: Work, lane: LaneName, units: int, between: Callable[[], None] | None = None
    ) -> Queued:
        """Queue the work on the current stream, which has this many SMs.

        `between` is called between two layers of it that are graphs, and may run what uses nothing
        of the same (`used_by`).
        """
        place = LaunchPlace(units, self._memory[lane], between)
        self.slots.take(work.slots)
        self.constrain(work.masks)
        if isinstance(work, PrefillWork):
            return self._prefill(work, place)
        if isinstance(work, DecodeWork):
            end = self._decode(work, units)
        else:
            end = self._hybrid(work, place)
        return Queued((), end=end) if self._ends_late(work) else Queued(end())

    def constrain(self, masks: Sequence[TokenMask]) -> None:
        """Have these slots choose among some tokens the next time they are sampled."""
        self._processors.constrain(masks)

    def _ends_late(self, work: Work) -> bool:
        """Return whether the end waits for masks: other ranks sample nothing."""
        return bool(work.late) and not self._decoder.follows

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """See `Lanes.load_adapter`."""
        decoder, pool = self._decoder, self.steps.adapters
        if pool is None:
            raise ValueError("adapters are not served: start with --lora or --lora-endpoints")
        read = read_adapter(path, decoder.shard, decoder.dtype, pool.max_rank, digest)
        pool.put(slot, read)

    def drop(self, batch: int) -> None:
        """Forget the hidden states of a batch that has no further slice."""
        self._paused.pop(batch, None)

    def _decode(self, work: DecodeWork, units: int) -> End:
        """Queue the forward pass of the first step."""
        bucket = self.steps.bucket(len(work.rows))
        self.slots.upload(update.slot for update in work.slots)
        self._forward(work, 0, bucket, units)

        def end() -> list[PendingStep]:
            pending = self._finish(work, 0, bucket, units)
            for step in range(1, work.k):
                self._forward(work, step, bucket, units)
                pending += self._finish(work, step, bucket, units)
            return pending

        return end

    def _forward(self, work: DecodeWork, step: int, bucket: int, units: int) -> None:
        if step % MAX_STEPS == 0:
            self.steps.inputs.send(work.rows, bucket, self.slots.padding, step)
        self.steps.forward(units, bucket, adapted=self.slots.adapted(work))

    def _finish(self, work: DecodeWork, step: int, bucket: int, units: int) -> list[PendingStep]:
        """Sample from the logits of a step's forward pass."""
        rows, steps = work.rows, self.steps
        alive = [i for i, row in enumerate(rows) if step < row.steps]
        asked = self._processors.asked(next_point(i, rows[i], step) for i in alive)
        if self._decoder.follows:
            self._processors.skip(asked)
            steps.finish(units, bucket)
            return []
        scored = self._processors.adjust(steps.logits, asked)
        steps.finish(units, bucket)
        results = steps.step_results(step % MAX_STEPS, bucket)
        scores = scored(chosen(results[:bucket])) if asked else {}
        layers = self._decoder.spec.expert_layers if len(results) > bucket else 0
        read = results if layers else results[: len(rows)]
        return [_read(read, alive, alive, scores, layers=layers)]

    def _prefill(self, work: PrefillWork, place: LaunchPlace) -> Queued:
        adapted = self.slots.adapted(work)
        if work.first or work.finishes or adapted:  # the first of several has enough to do
            self.slots.upload(row.slot for row in work.rows)
        if work.first == 0:
            opened = BatchRows(work.rows, work.chunks)
            before, batch = None, self._open(opened, place, adapted=adapted)
        else:
            before = self._paused[work.batch]
            batch = self._resumed(before, work.rows)
        plans = self._plans(batch, place, work.first, work.last)
        placed = MixedRows(
            self._decoder, batch.positions, batch.write_slots, plans, prompts=batch.prompts
        )
        if adapted:
            placed = replace(placed, owners=batch.owners)
        self._layers(work.first, work.last, batch.hidden, batch.tokens, placed, place)
        if not work.finishes:
            self._paused[work.batch] = batch
            return Queued((), (before, batch))
        self.drop(work.batch)
        ends = SamplingPoints.of((), work.rows, batch.batch.chunks)
        self._processors.begin(ends.begun)
        end, kept = self._sample(batch.hidden, ends, place), (before, batch)
        return Queued((), kept, end) if self._ends_late(work) else Queued(end(), kept)

    def _hybrid(self, work: HybridWork, place: LaunchPlace) -> End:
        """Queue one pass of decode rows, which come first, and prompts."""
        ends = SamplingPoints.of(work.decode, work.prompts, work.chunks)
        whole = place.memory.whole
        self._processors.begin(ends.begun)
        hidden = None if whole is None else whole.send(work, ends, place.units)
        if whole is None or hidden is None:
            return self._sample(self._by_layers(work, place), ends, place)
        if work.late or self._processors.asked(ends.points) or ends.scored:
            return self._sample(hidden, ends, place)
        return partial(self._end_graph, whole, ends)

    def _end_graph(self, whole: HybridGraphs, ends: SamplingPoints) -> Sequence[PendingStep]:
        """Sample where a pass ends that needs no more than the graphs do."""
        tokens = whole.finish(len(ends.rows))
        if self._decoder.follows:
            return ()
        return [_read(tokens, range(len(ends.rows)), ends.rows, {})]

    def _by_layers(self, work: HybridWork, place: LaunchPlace) -> Tensor:
        """Return the last hidden states of a pass that is no graph as a whole, [rows, hidden]."""
        self.slots.upload(update.slot for update in work.slots)
        adapted = self.slots.adapted(work)
        batch = self._open(BatchRows(work.prompts, work.chunks), place, adapted=adapted)
        layers = self._decoder.spec.layers
        hidden, tokens = batch.hidden, batch.tokens
        plans = self._plans(batch, place, 0, layers)
        placed = MixedRows(
            self._decoder, batch.positions, batch.write_slots, plans, prompts=batch.prompts
        )
        if adapted:
            placed = replace(placed, owners=batch.owners)
        if work.decode:
            decoding = self._steps_of(work.decode, place)
            if (channel := place.memory.activations.channel) is not None:
                channel.broadcast(self.slots.last_token)
            last = self.slots.last_token[decoding.slots]
            hidden = torch.cat([self._embed(last, place), hidden])
            tokens = torch.cat([last.to(tokens.dtype), tokens])
            placed = placed.after(decoding, self.kv.page_size)
        self._layers(0, layers, hidden, tokens, placed, place)
        return hidden

    def _steps_of(self, rows: Sequence[DecodeRow], place: LaunchPlace) -> DecodeRows:
        """Decode rows for a pass that is not a graph."""
        bucket = self.steps.buckets[-1]  # as the graphs of hybrid passes find them
        self.steps.inputs.send(rows, bucket, self.slots.padding, 0)
        return self.steps.rows(bucket, len(rows), place.units)

    def _embed(self, tokens: Tensor, place: LaunchPlace) -> Tensor:
        return self._decoder.embed(tokens, place.memory.activations.channel)

    def _open(self, batch: BatchRows, place: LaunchPlace, *, adapted: bool) -> _Pass:
        """Lay out a batch, some of whose rows may be `adapted`, and embed its tokens."""
        tokens = np.concatenate([token_ids(chunk) for chunk in batch.chunks])
        table_of, size, tables = self.slots.host.table, self.kv.page_size, len(self.slots.tables)
        where = [
            [places_of(row, table_of(row.slot, table), size) for row in batch.rows]
            for table in range(tables)
        ]
        positions = np.concatenate([positions for positions, _ in where[0]])
        write_slots = np.concatenate([slots for each in where for _, slots in each])
        parts = [tokens, positions, write_slots]
        if adapted:
            counts = [row.count for row in batch.rows]
            parts.append(np.repeat([row.slot for row in batch.rows], counts))
        _, sent = upload_parts(parts, self._decoder.device)
        hidden, owners = self._embed(sent[0], place), sent[3] if adapted else None
        placed = sent[2].view(tables, -1)
        prompts = self._prompts(batch.rows)
        return _Pass(batch, sent[0], hidden, sent[1], placed, owners, prompts)

    def _prompts(self, rows: Sequence[PromptRow]) -> Sequence[PromptStates]:
        """Return the rows by their states, if the model has layers of linear attention."""
        if self._decoder.spec.state is None:
            return ()
        lists = prompt_lists([row.parts() for row in rows])
        _, sent = upload_parts([part for each in lists for part in each], self._decoder.device)
        pairs = zip(sent[::2], sent[1::2], strict=True)
        return [PromptStates(each.view(-1, 6), chunks.view(-1, 2)) for each, chunks in pairs]

    def _resumed(self, paused: _Pass, rows: Sequence[PromptRow]) -> _Pass:
        """Return the batch as the last slice left it, without the rows that have left."""
        if paused.batch.rows == rows:
            return paused
        batch, left = paused.batch.left(rows)
        index = upload(np.flatnonzero(left).astype(np.int32), self._decoder.device)
        owners = None if paused.owners is None else paused.owners[index]
        tokens, hidden = paused.tokens[index], paused.hidden[index]
        positions, slots = paused.positions[index], paused.write_slots[:, index]
        return _Pass(batch, tokens, hidden, positions, slots, owners, self._prompts(batch.rows))

    def _layers(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        tokens: Tensor,
        placed: MixedRows,
        place: LaunchPlace,
    ) -> None:
        passes, units = place.memory.passes, place.units
        of = tokens if self._decoder.spec.layer_inputs else None
        if passes is not None and passes.serves(placed, units):
            passes.layers(first, last, hidden, of, placed, units, place.between)
            return
        products, activations = self.steps.products(units), place.memory.activations
        if placed.owners is not None:
            products = self._adapted(products, placed.owners)
        self._decoder.layers(first, last, hidden, placed, self.kv, activations, products, of)

    def _adapted(self, products: GpuProducts, owners: Tensor) -> GpuProducts:
        """Return the products of a pass without a graph, some of whose requests have adapters."""
        adapters = self.steps.adapters
        assert adapters is not None
        tiles = adapters.tiles(len(owners)).of_first(len(owners))
        tiles.arrange(owners, self.slots.adapters)
        return GpuAdaptedProducts(products, adapters, tiles)

    def _plans(
        self, batch: _Pass, place: LaunchPlace, first: int, last: int
    ) -> dict[PlanKey, PrefillPlan]:
        """Return the batch's attention plans, made once for each kind of layer and lane, dealt anew
        for each level.

        A plan writes to the workspace of the lane that it was made for.
        """
        for key in set(map(self._decoder.plan_key, range(first, last))):
            plan = batch.plans.get(key)
            if plan is None or plan.batch.workspace is not place.memory.attention:
                batch.plans[key] = self._plan(batch.batch.rows, place, key)
            elif plan.units != place.units:
                batch.plans[key] = plan.at(place.units)
        return batch.plans

    def _plan(self, rows: Sequence[PromptRow], place: LaunchPlace, key: PlanKey) -> PrefillPlan:
        return PrefillPlan.build(
            [(row.start, row.count) for row in rows],
            [self.slots.host.table(row.slot, key.table) for row in rows],
            page_size=self.kv.page_size,
            heads=key.heads,
            kv_heads=key.kv_heads,
            dim=key.dim,
            dtype=self._decoder.dtype,
            units=place.units,
            workspace=place.memory.attention,
            window=key.window,
            dense=key.dense,
            rounded=self.kv.rounded,
        )

    def _sample(self, hidden: Tensor, ends: SamplingPoints, place: LaunchPlace) -> End:
        """Queue the logits where a pass ends; score what is asked for.

        All collectives are queued here, as they are on other ranks, which wait for no masks.
        """
        scored = {row.row: self._score(hidden, row, place) for row in ends.scored}
        places = ends.points
        if not places and not self._decoder.follows:
            step = _read(hidden.new_empty(0, dtype=torch.int32), (), (), {}, scored)
            return lambda: [step]
        if not places:
            return tuple
        ints = [(e, p.slot, p.position - 1) for e, p in zip(ends.where, places, strict=True)]
        _, (where, slots, positions) = upload_parts([*np.array(ints).T], self._decoder.device)
        rows = hidden[where]
        logits = self._head(rows, place.memory.logits[: len(places)], place)
        if self._decoder.follows:
            self._processors.skip(places)
            return tuple
        read = partial(_read, scored=scored, embeddings=self._embeddings(rows, places))
        return partial(self._choose, ends, logits, (slots, positions), read, place)

    def _embeddings(self, hidden: Tensor, places: Sequence[SamplingPoint]) -> dict[int, Tensor]:
        """Return the hidden states [R, hidden] asked for, by row, on their way to the host."""
        sampling_of = self.slots.host.sampling_of
        asked = [i for i, p in enumerate(places) if sampling_of(p.slot).params.embeds]
        rows = {i: hidden[i : i + 1] for i in asked}
        return {
            i: fetch(self._decoder.last(row, torch.empty_like(row)).float())
            for i, row in rows.items()
        }

    def _choose(
        self,
        ends: SamplingPoints,
        logits: Tensor,
        where: tuple[Tensor, Tensor],
        read: Callable[..., PendingStep],
        place: LaunchPlace,
    ) -> Sequence[PendingStep]:
        """Sample where a pass ends: the one step.

        Args:
            ends: where.
            logits: float32 [R, vocab], a row for each place.
            where: the rows' slots and positions, int32 [R] each.
            read: brings what it comes to to the host.
            place: Place in which the pass runs.
        """
        places, (slots, positions) = ends.points, where
        after = self._processors.adjust(logits, self._processors.asked(places))
        tokens, active = torch.empty_like(slots), torch.ones_like(slots)
        params = self.slots.params
        place.memory.sampler.sample(logits, slots, positions, active, params, tokens)
        valid = chosen(tokens)
        self.slots.last_token[slots] = valid
        return [read(tokens, range(len(places)), ends.rows, after(valid))]

    def _head(self, hidden: Tensor, logits: Tensor, place: LaunchPlace) -> Tensor:
        """Write the classifier's output into these logits."""
        products = self.steps.products(place.units)
        self._decoder.head(hidden, logits, place.memory.activations, products)
        return logits

    def _score(self, hidden: Tensor, row: ScoredRow, place: LaunchPlace) -> list[PendingScores]:
        """Score a prompt's targets, some at a time; `hidden` is the whole pass's."""
        vocab = self._decoder.spec.vocab_size
        scores = []
        for where, targets in row.parts(max(1, min(SCORED_LOGITS // vocab, self._scored_rows))):
            tokens = upload(np.array(targets, dtype=np.int32), self._decoder.device)
            room = hidden.new_empty((len(targets), vocab), dtype=torch.float32)
            logits = self._head(hidden[where], room, place)
            if self._decoder.follows:
                continue
            scores.append(score(logits, tokens, [row.top] * len(targets)))
        return scores


def _read(
    tokens: Tensor,
    which: Sequence[int],
    rows: Sequence[int],
    scores: Mapping[int, PendingScores],
    scored: Mapping[int, Sequence[PendingScores]] = MappingProxyType({}),
    layers: int = 0,
    embeddings: Mapping[int, Tensor] = MappingProxyType({}),
) -> PendingStep:
    """Bring what a step came to to the host.

    Args:
        tokens: int32, on the device; complements are of rows with broken logits.
        which: `tokens[which[i]]` is that of row `rows[i]` of the work.
        rows: those that were sampled.
        scores: log-probabilities by place in `tokens`.
        scored: those of prompts, by row of the work.
        layers: Number of layers with experts; the last of `tokens` is then the number of experts
            that they have read. 0 without experts.
        embeddings: hidden states on their way to the host, float32 [1, hidden] each, by place in
            `tokens`.
    """
    pinned = torch.empty(len(tokens), dtype=torch.int32, pin_memory=True)
    pinned.copy_(tokens, non_blocking=True)
    done = new_event(timing=True)
    done.record()

    def collect() -> Step:
        values = pinned.tolist()
        logprobs = {i: score.collect()[0] for i, score in scores.items()}
        sampled, broken = [], []
        for i, row in zip(which, rows, strict=True):
            if values[i] < 0:
                broken.append(row)
            else:
                state = embeddings.get(i)
                embedding = None if state is None else state.numpy().tobytes()
                sampled.append(Sampled(row, values[i], logprobs.get(i), embedding))
        prompts = [_joined(row, parts) for row, parts in scored.items()]
        return Step(sampled, prompts, broken, values[-1] / layers if layers else None)

    return PendingStep(done, collect)


def _joined(row: int, parts: Sequence[PendingScores]) -> PromptLogprobs:
    return PromptLogprobs(row, [each for part in parts for each in part.collect()])
