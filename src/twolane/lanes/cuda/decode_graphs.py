"""Decode steps as CUDA graphs: one for each number of rows and each share of the SMs.

A step is two graphs: the forward pass up to the logits, and its end: sampling, and the advance of
positions, lengths and last tokens. Both read everything that changes from device memory, so that
k steps are 2k replays with no host in between. All graphs share one memory pool: steps of the
decode lane run in order, and nothing of one step lives on into the next but the buffers here.
"""

import bisect
import gc
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twolane.common.garbage import gc_disabled
from twolane.devices import OnProgress
from twolane.kernels import fused
from twolane.kernels.decode_attention.dispatch import decode_scratch
from twolane.kernels.products.dispatch import GpuProducts
from twolane.kernels.runtime.timing import graph_seconds
from twolane.kernels.sampling import Sampler
from twolane.kernels.sizes import BUCKET_STEP, BUCKETS
from twolane.lanes.cuda.forward_batch import DecodeRows
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.lanes.cuda.slots import Slots, upload
from twolane.lanes.work import DecodeRow
from twolane.model.gpu_decoder import GpuDecoder, GpuKVCache, Workspace
from twolane.model.gpu_lora import GpuAdaptedProducts, GpuAdapterPool
from twolane.parallel.channel import Channel
from twolane.parallel.two_shot import TwoShot

MAX_STEPS = 64
"""The longest look-ahead."""
TIMED_LAYERS, TIMED_REPLAYS = 8, 7
"""Layers in a graph that is timed for its sums, and how many of its replays count."""
log = logging.getLogger("twolane.cuda")


def buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts that graphs are made for: the last one is `max_rows`."""
    every = [*BUCKETS, *range(BUCKETS[-1] + BUCKET_STEP, max_rows, BUCKET_STEP)]
    return (*(count for count in every if count < max_rows), max_rows)


def shares_to_time(shares: Sequence[int]) -> Mapping[int, int]:
    """Return on how many SMs sums are timed before the graphs of some shares are captured.

    The shares of the decode lane have the choice made on the one in the middle of them, so that the
    start is short; the whole device, which is captured last, has its own.

    Args:
        shares: SMs of each share, the whole device last.
    """
    *levels, whole = shares
    return {shares[0]: levels[len(levels) // 2] if levels else whole, whole: whole}


@dataclass(frozen=True)
class LevelGraphs:
    """The graphs of one share of the SMs, and what they cost."""

    forward: dict[tuple[int, bool], torch.cuda.CUDAGraph]
    """Graphs of forward passes by bucket, and whether rows may have adapters."""
    finish: dict[int, torch.cuda.CUDAGraph]
    """Graphs of the ends of steps by bucket."""
    bytes: int
    """By how much the device's free memory fell meanwhile: other processes' doing, too, so that it
    may be negative."""
    seconds: float
    tuning_seconds: float
    """Seconds spent before on choosing its matrix products."""


def captured(
    stream: torch.cuda.Stream, pool: Any, queue: Callable[[], None], *, later: bool = False
) -> torch.cuda.CUDAGraph:
    """Capture what `queue` launches as a graph; its kernels have been launched on this stream
    before.

    Args:
        stream: the graph keeps its share of the SMs, wherever it is replayed.
        pool: Pool of device memory, shared by graphs that never run at the same time.
        queue: launches on torch's current stream.
        later: Whether the lanes serve already: the free memory that they have kept, device and
            pinned, is left to them, or the next launches would stand still to allocate it again.
    """
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    if later:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                queue()
            finally:
                graph.capture_end()
        return graph
    # "thread_local": what other threads do meanwhile, such as asking for an event, is no error
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        queue()
    return graph


class Inputs:
    """The inputs of a decode launch, one block of int32 that is uploaded at once.

    Rows of a bucket: slots, positions, lengths and steps, each [bucket], then the step's number.
    Each begins at a multiple of 16 bytes: kernels are compiled for one alignment only.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.block = torch.zeros(4 * _aligned(max_rows) + 1, dtype=torch.int32, device=device)
        self._device = device

    def views(self, bucket: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """slots, positions, lengths, steps [bucket] each and the step's number [1]."""
        width = _aligned(bucket)
        parts = self.block[: 4 * width].view(4, width)[:, :bucket]
        return parts[0], parts[1], parts[2], parts[3], self.block[4 * width : 4 * width + 1]

    def send(self, rows: Sequence[DecodeRow], bucket: int, padding: int, first: int) -> None:
        """Upload a launch's rows as its step `first` finds them; `padding` fills the bucket."""
        width = _aligned(bucket)
        values = np.zeros(4 * width + 1, dtype=np.int32)
        parts = values[:-1].reshape(4, width)[:, :bucket]
        parts[0] = padding
        count = len(rows)
        parts[0, :count] = [row.slot for row in rows]
        parts[1, :count] = [row.position + first for row in rows]
        parts[3, :count] = [row.steps - first for row in rows]
        parts[2, :count] = np.where(parts[3, :count] > 0, parts[1, :count] + 1, 0)
        upload(values, self._device, self.block)


def _aligned(count: int) -> int:
    """Return `count` int32 rounded up to a multiple of 16 bytes."""
    return -(-count // 4) * 4


class DecodeGraphs:
    """The decode graphs of one model and the buffers that they share.

    A rank other than 0 samples nothing: rank 0 has the logits, and each step begins with the tokens
    that rank 0 has sampled.

    Args:
        decoder: the model.
        kv: The model's KV pool.
        slots: The device's memory of the requests.
        max_rows: the most rows of a step.
        units: the most SMs of a level.
        channel: Channel of the decode lane, if several ranks share the model.
        adapters: those that rows may have, if any are served.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        kv: GpuKVCache,
        slots: Slots,
        max_rows: int,
        units: int,
        channel: Channel | None = None,
        adapters: GpuAdapterPool | None = None,
    ) -> None:
        spec, device, dtype = decoder.spec, decoder.device, decoder.dtype
        self._decoder, self._kv, self._slots = decoder, kv, slots
        self.buckets = buckets(max_rows)
        self.ready: list[int] = [*self.buckets]
        """Buckets that have graphs on every share, ascending."""
        self.inputs = Inputs(max_rows, device)
        self.workspace = Workspace(spec, dtype, device, channel)
        self.workspace.reserve(max_rows)
        self.workspace.reserve_logits(max_rows)
        heads, dim = (max(getattr(at, name) for at in spec.each) for name in ("heads", "head_dim"))
        self.scratch = decode_scratch(max_rows, heads, dim, units, device)
        self._sampler = Sampler(max_rows, spec.vocab_size, device)
        self._hidden = torch.empty((max_rows, spec.hidden_size), dtype=dtype, device=device)
        shape = 0 if decoder.follows else max_rows, spec.vocab_size
        self.logits = torch.empty(shape, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._experts_read = (
            None if spec.moe is None else self.workspace.routing(max_rows).experts_read
        )
        self.ring = torch.zeros(MAX_STEPS * (max_rows + 1), dtype=torch.int32, device=device)
        """Tokens by step and row of the bucket; with experts, the number of experts that a step has
        read, summed over layers, follows its tokens."""
        self.adapters = adapters
        self._tiles = None if adapters is None else adapters.tiles(max_rows)
        self._pool = torch.cuda.graph_pool_handle()
        self.levels: dict[int, LevelGraphs] = {}
        self._products: dict[int, GpuProducts] = {}

    def capture(
        self, partitions: GreenContexts, progress: OnProgress, only: Collection[int] | None = None
    ) -> None:
        """Tune the products and make the graphs of every level.

        Args:
            partitions: The levels.
            progress: called with the stage, `kernels` or `graphs`, and the share that is done.
            only: The buckets to begin with, besides the largest; None makes the graphs of all.
        """
        if only is not None:
            self.ready = [each for each in self.buckets[:-1] if each in only] + [self.buckets[-1]]
        shares = partitions.decode_units
        gc.collect()
        with gc_disabled():  # to free device memory or events while a graph is captured ends it
            timed_on = shares_to_time(shares)
            for place, units in enumerate(shares):
                if (timed := timed_on.get(units)) is not None:
                    self._choose_sums(partitions.capture_stream("decode", timed), timed)

                def part(stage: str, done: float, place: int = place) -> None:
                    progress(stage, (place + done) / len(shares))

                stream = partitions.capture_stream("decode", units)
                self.levels[units] = self._capture_level(stream, units, part)
        progress("graphs", 1.0)

    def _choose_sums(self, stream: torch.cuda.Stream, units: int) -> None:
        """Choose how several ranks sum on a share, for each number of rows: until the next choice,
        graphs are captured with it."""
        channel = self.workspace.channel
        if not isinstance(channel, TwoShot):
            return
        self._tune(stream, units)
        with torch.cuda.stream(stream):
            times = channel.choose(self.buckets, partial(self._layer_seconds, self.products(units)))
        for rows, by_method in times.items():
            text = ", ".join(
                f"{method} {seconds * 1e6:.1f}" for method, seconds in by_method.items()
            )
            method = channel.method(rows)
            log.info("all-reduce: %d rows on %d SMs: %s; us a layer: %s", rows, units, method, text)

    def _layer_seconds(self, products: GpuProducts, rows: int) -> float:
        """Return the seconds of a layer without attention for this many rows of zeros, on torch's
        current stream."""
        hidden, layers = self._hidden[:rows], min(TIMED_LAYERS, self._decoder.spec.layers)
        hidden.zero_()
        self.workspace.get("attended", rows).zero_()
        run = partial(self._decoder.multiply, layers, hidden, self.workspace, products)
        return graph_seconds(run, TIMED_REPLAYS) / layers

    def _tune(self, stream: torch.cuda.Stream, units: int) -> None:
        """Choose the products of this share, unless that has been done."""
        with torch.cuda.stream(stream), self._decoder.in_turn(self.workspace.channel):
            adapted = self.adapters is not None
            self._decoder.tune(self.products(units), self.buckets[-1], adapted=adapted)

    def _capture_level(
        self, stream: torch.cuda.Stream, units: int, progress: OnProgress
    ) -> LevelGraphs:
        progress("kernels", 0.0)
        begun = time.monotonic()
        self._tune(stream, units)
        tuning = time.monotonic() - begun
        torch.cuda.empty_cache()  # what tuning allocated does not count, nor stay
        free, begun = torch.cuda.mem_get_info()[0], time.monotonic()
        graphs = LevelGraphs({}, {}, 0, 0.0, tuning)
        for done, bucket in enumerate(reversed(self.ready)):
            progress("graphs", done / len(self.ready))
            self._capture_bucket(stream, units, bucket, graphs)
        taken = free - torch.cuda.mem_get_info()[0]
        return replace(graphs, bytes=taken, seconds=time.monotonic() - begun)

    def capture_later(self, partitions: GreenContexts, bucket: int, units: int) -> None:
        """Make the graphs of one more bucket on one share while nothing runs."""
        stream = partitions.capture_stream("decode", units)
        with torch.cuda.stream(stream):
            self.inputs.send((), bucket, self._slots.padding, 0)  # all rows are padding
        self._capture_bucket(stream, units, bucket, self.levels[units], later=True)
        stream.synchronize()

    def _capture_bucket(
        self,
        stream: torch.cuda.Stream,
        units: int,
        bucket: int,
        graphs: LevelGraphs,
        *,
        later: bool = False,
    ) -> None:
        """Add the graphs of a bucket."""

        def made(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
            with torch.cuda.stream(stream):
                run()  # compiles kernels, sets up libraries; all rows are padding
            return captured(stream, self._pool, run, later=later)

        for adapted in (False,) if self.adapters is None else (False, True):
            run = partial(self._forward, bucket, units, adapted)
            graphs.forward[bucket, adapted] = made(run)
        graphs.finish[bucket] = made(partial(self._finish, bucket, units))

    def products(self, units: int) -> GpuProducts:
        """Matrix products on this many SMs: a level's, and those of prefill on as many."""
        return self._products.setdefault(units, GpuProducts(units))

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket with graphs that holds this many rows."""
        return self.ready[bisect.bisect_left(self.ready, rows)]

    def forward(self, units: int, bucket: int, *, adapted: bool) -> None:
        """Queue the forward pass of a step on the current stream; it ends with `logits`.

        `adapted`: a row has an adapter.
        """
        graphs = self.levels.get(units)
        if graphs is None:  # no decode lane has such a share: it is not worth graphs
            self._forward(bucket, units, adapted)
        else:
            graphs.forward[bucket, adapted].replay()

    def finish(self, units: int, bucket: int) -> None:
        """Queue the end of a step: its tokens are in `ring` and in the slots."""
        graphs = self.levels.get(units)
        if graphs is None:
            self._finish(bucket, units)
        else:
            graphs.finish[bucket].replay()

    def step_results(self, step: int, bucket: int) -> Tensor:
        """Return the tokens of a launch's step and, with experts, the number read: int32 [bucket]
        or [bucket + 1], on the device until the next launch."""
        width = bucket + (self._experts_read is not None)
        return self.ring[step * width : (step + 1) * width]

    def rows(self, bucket: int, count: int, units: int) -> DecodeRows:
        """Return the first rows of the inputs, laid out for `count`, as at each replay."""
        slots, positions, lengths = (view[:count] for view in self.inputs.views(bucket)[:3])
        tables = self._slots.tables
        return DecodeRows(self._decoder, tables, slots, positions, lengths, self.scratch, units)

    def _forward(self, bucket: int, units: int, adapted: bool) -> None:
        decoder = self._decoder
        rows = self.rows(bucket, bucket, units)
        hidden, products = self._hidden[:bucket], self.products(units)
        if adapted:
            assert self.adapters is not None and self._tiles is not None
            tiles = self._tiles.of_first(bucket)
            tiles.arrange(rows.slots, self._slots.adapters)
            products = GpuAdaptedProducts(products, self.adapters, tiles)
        last, embedding = self._slots.last_token, decoder.weights.embedding
        if (channel := self.workspace.channel) is not None:
            channel.broadcast(last)
        vocab_first, scale = decoder.shard.vocab.start, decoder.spec.stream_scale
        fused.embed(last, rows.slots, rows.lengths, embedding, hidden, vocab_first, scale)
        if channel is not None:
            channel.all_reduce(hidden)
        own = (self._kv, self.workspace, products)
        tokens = last.index_select(0, rows.slots) if decoder.spec.layer_inputs else None
        decoder.layers(0, decoder.spec.layers, hidden, rows, *own, tokens)
        decoder.head(hidden, self.logits[:bucket], self.workspace, products)

    def _finish(self, bucket: int, units: int) -> None:
        slots, positions, lengths, steps, step = self.inputs.views(bucket)
        tokens = self.tokens[:bucket]
        params = self._slots.params
        if not self._decoder.follows:
            self._sampler.sample(self.logits[:bucket], slots, positions, lengths, params, tokens)
        last = self._slots.last_token
        fused.advance(
            tokens, slots, steps, step, positions, lengths, last, self.ring, self._experts_read
        )
