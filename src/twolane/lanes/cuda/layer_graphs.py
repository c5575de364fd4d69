"""Prefill and hybrid passes with CUDA graphs of what lies between the attentions of their prompts.

Launched kernel by kernel, a layer takes the host about 0.4 ms: longer than the GPU needs for 500
tokens, and meanwhile the host launches no decode step. Attention of prompts is planned for each
batch and cannot be replayed. All else of a layer is a matter of how many tokens there are, so it is
two graphs for each layer, number of tokens and share of the SMs: up to the attention, and from it
on. A hybrid batch's decode attention finds its rows on the device and lies in the first.

Even so a pass of 36 layers takes the host 3.5 to 10 ms, more than a bound of 9 ms has room for:
small hybrid passes are graphs as a whole, where their attention can be in one
(`hybrid_graphs.py`).

A pass is padded to the next size that has graphs. Padding is written to no page, and a row's
results are nobody else's, so what it computes does not matter. Sizes at which products are as slow
as with more rows have no graphs: layers of every size are timed before (`worth_padding_to`).
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twolane.common.files import write_cache
from twolane.common.garbage import gc_disabled
from twolane.devices import OnProgress
from twolane.kernels.experts.routing import ActiveRows
from twolane.kernels.prefill_attention.batch import PrefillWorkspace
from twolane.kernels.products.dispatch import GpuProducts, choice_file
from twolane.kernels.runtime.timing import graph_seconds
from twolane.kernels.sizes import BUCKETS, SIZES, WHOLE, padded, worth_padding_to
from twolane.lanes.cuda.decode_graphs import DecodeGraphs, captured
from twolane.lanes.cuda.forward_batch import DecodeRows, MixedRows, PromptRows
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.lanes.cuda.slots import Slots
from twolane.model.gpu_decoder import GpuDecoder, GpuKVCache, Workspace
from twolane.model.gpu_lora import GpuAdaptedProducts

log = logging.getLogger("twolane.cuda")
TIMED_LAYERS, TIMED_REPLAYS = 4, 5
"""Layers in a graph that is timed for its size, and how many of its replays count."""
LARGER: tuple[int, ...] = tuple(range(SIZES[-1] + 1, 8192 + 1, 251))
"""Tokens of the passes that are multiplied once before any is served: odd steps, for what cuBLAS
chooses depends on what their number is divisible by, too."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The graphs of one layer at one size."""

    before: torch.cuda.CUDAGraph
    after: torch.cuda.CUDAGraph
    before_hybrid: torch.cuda.CUDAGraph | None = None
    """Graph with attention of the decode rows; on the whole device alone."""


@dataclass(frozen=True)
class PassGraphs:
    """The graphs of one share of the SMs, and what they cost."""

    layers: dict[tuple[int, bool], list[_Layer]]
    """Graphs of all layers by size, and whether rows may have adapters."""
    bytes: int
    """See `LevelGraphs.bytes`."""
    seconds: float
    tuning_seconds: float
    """Seconds spent before on choosing its matrix products."""


def read_sizes(file: Path) -> tuple[int, ...]:
    """Return the sizes that an earlier start has kept in this file; empty if there are none."""
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return ()
    known = isinstance(kept, list) and {SIZES[-1], WHOLE} <= set(kept) <= set(SIZES)
    return tuple(kept) if known else ()


class LayerGraphs:
    """The graphs of one model's prefill and hybrid passes, and the buffers that they share.

    They belong to one lane at a time, as its workspace does.

    Args:
        decoder: the model.
        kv: The model's KV pool.
        slots: The device's memory of the requests.
        steps: tell which rows of a hybrid pass decode.
        workspace: Attention workspace of the lane; it grows without these.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        kv: GpuKVCache,
        slots: Slots,
        steps: DecodeGraphs,
        workspace: Workspace,
    ) -> None:
        workspace.reserve(SIZES[-1])
        self._decoder, self._kv, self._slots, self._steps = decoder, kv, slots, steps
        self.workspace = workspace.fixed()
        spec, device = decoder.spec, decoder.device
        self.residual = torch.zeros(
            (SIZES[-1], spec.hidden_size), dtype=decoder.dtype, device=device
        )
        """The residual stream of a pass, [T, hidden]."""
        self.positions = torch.zeros(SIZES[-1], dtype=torch.int32, device=device)
        """Positions of its tokens in their sequences, [T]."""
        self.tokens = torch.zeros_like(self.positions)
        """Their ids, where layers have inputs of their own, [T]."""
        self.write_slots = self.positions.new_full((len(slots.tables), SIZES[-1]), -1)
        """Places of their keys; see `PromptRows`."""
        self.owners = torch.full_like(self.positions, slots.padding)
        """The request slots that they are of, where one has an adapter, [T]."""
        self._adapters = steps.adapters
        self._tiles = None if steps.adapters is None else steps.adapters.tiles(SIZES[-1])
        self.scratch = PrefillWorkspace(device)
        """Workspace of the attention in graphs."""
        self._pool = torch.cuda.graph_pool_handle()
        self.levels: dict[int, PassGraphs] = {}
        self.sizes: Sequence[int] = SIZES
        """Tokens that passes are padded to, ascending."""
        self.ready: list[int] = [*SIZES]
        """The sizes that have graphs on every share, ascending."""
        self._whole = 0
        """SMs that hybrid batches run on."""

    def capture(
        self,
        partitions: GreenContexts,
        whole: Callable[[torch.cuda.Stream, Any], None] | None,
        progress: OnProgress,
        only: Collection[int] | None = None,
    ) -> None:
        """Tune the products and make the graphs of every share that prefill can have.

        Args:
            partitions: the shares.
            whole: makes the graphs of whole passes with a stream and a memory pool, if there are
                any; called for the share that is the whole device.
            progress: called with the stage, `kernels` or `graphs`, and the share that is done.
            only: The sizes to begin with, besides `WHOLE` and the largest; None makes the graphs of
                all.
        """
        shares, self._whole = partitions.prefill_units, partitions.units
        with gc_disabled():  # to free device memory or events while a graph is captured ends it
            progress("kernels", 0.0)
            self._choose_sizes(partitions.capture_stream("prefill", self._whole))
            first = {*(self.sizes if only is None else only), WHOLE, self.sizes[-1]}
            self.ready = [size for size in self.sizes if size in first]
            for place, units in enumerate(shares):
                progress("kernels", place / len(shares))
                stream = partitions.capture_stream("prefill", units)
                begun = time.monotonic()
                self._tune(stream, units)
                tuning = time.monotonic() - begun
                self._load_kernels(stream, units)
                torch.cuda.empty_cache()  # what tuning allocated does not count, nor stay
                free, begun = torch.cuda.mem_get_info()[0], time.monotonic()
                progress("graphs", place / len(shares))
                # The largest first: the others find their memory.
                layers = {
                    (size, adapted): self._capture(stream, units, size, adapted)
                    for size in reversed(self.ready)
                    for adapted in self.kinds
                }
                if whole is not None and units == self._whole:
                    whole(stream, self._pool)
                taken, seconds = free - torch.cuda.mem_get_info()[0], time.monotonic() - begun
                self.levels[units] = PassGraphs(layers, taken, seconds, tuning)
        progress("graphs", 1.0)

    def capture_later(self, partitions: GreenContexts, size: int, units: int) -> None:
        """Make the graphs of one more size on one share while nothing runs."""
        stream = partitions.capture_stream("prefill", units)
        with torch.cuda.stream(stream):
            self.write_slots.fill_(-1)  # all rows are padding
            self.owners.fill_(self._slots.padding)
            self._steps.inputs.send((), self._steps.buckets[-1], self._slots.padding, 0)
        for adapted in self.kinds:
            made = self._capture(stream, units, size, adapted, later=True)
            self.levels[units].layers[size, adapted] = made
        stream.synchronize()

    def _tune(self, stream: torch.cuda.Stream, units: int) -> None:
        """Choose how passes multiply on this share, unless that has been done."""
        with torch.cuda.stream(stream), self._decoder.in_turn(self.workspace.channel):
            adapted = self._adapters is not None
            self._decoder.tune_passes(self._steps.products(units), adapted=adapted)

    def _choose_sizes(self, stream: torch.cuda.Stream) -> None:
        """Choose the sizes that have graphs by layers on the whole device, for every share.

        Ranks sum rows together, so all of them have the sizes that rank 0 has chosen.
        """
        self._tune(stream, self._whole)
        device, channel = self.residual.device, self.workspace.channel
        with torch.cuda.stream(stream):
            kept = self._sizes_worth()
            if channel is not None:
                decided = torch.tensor([size in kept for size in SIZES], dtype=torch.int32)
                decided = decided.to(device)
                channel.broadcast(decided)
                kept = tuple(s for s, worth in zip(SIZES, decided.tolist(), strict=True) if worth)
        self.residual.zero_()
        self.sizes = kept
        left = [size for size in SIZES if size not in kept]
        if left:
            log.info("passes of %s tokens are padded to a larger size, which takes no longer", left)

    def _sizes_worth(self) -> tuple[int, ...]:
        """Return the sizes that are worth padding to: those that an earlier start found, if it has
        kept any, else by the times of layers on torch's current stream."""
        spec, device, own = self._decoder.spec, self.residual.device, self._decoder.shard
        made_of = (repr(spec), own.rank, own.size, SIZES)
        file = choice_file("sizes", made_of, self._whole, device) if device.type == "cuda" else None
        known = read_sizes(file) if file else ()
        if known:
            return known
        kept = worth_padding_to({size: self._layer_seconds(size) for size in SIZES})
        if file is not None:
            write_cache(file, json.dumps(kept).encode())
        return kept

    def _layer_seconds(self, size: int) -> float:
        """Return the seconds of a layer without attention for a pass of random rows, on torch's
        current stream and the whole device."""
        layers = min(TIMED_LAYERS, self._decoder.spec.layers)
        hidden, products = self.residual[:size], self._steps.products(self._whole)
        hidden.normal_()
        self.workspace.get("attended", size).normal_()
        run = partial(self._decoder.multiply, layers, hidden, self.workspace, products)
        return graph_seconds(run, TIMED_REPLAYS) / layers

    @property
    def kinds(self) -> Sequence[bool]:
        """Whether rows may have adapters, for each set of graphs."""
        return (False,) if self._adapters is None else (False, True)

    def serves(self, placed: MixedRows, units: int) -> bool:
        """Return whether there are graphs for such a pass on this many SMs."""
        if placed.steps is not None and units != self._whole:
            return False
        return units in self.levels and len(placed.positions) <= SIZES[-1]

    def layers(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        tokens: Tensor | None,
        placed: MixedRows,
        units: int,
        between: Callable[[], None] | None,
    ) -> None:
        """Run layers `first:last` of a pass on the current stream, in place.

        Args:
            first: layer index.
            last: one past the last layer.
            hidden: [T, hidden] from the embedding or the layer before; updated.
            tokens: The ids of the T tokens, if layers have inputs of their own.
            placed: the T tokens; its decode rows are those of `DecodeGraphs.inputs` in all rows.
            units: SMs of the stream.
            between: called before each layer; may run what has nothing of these buffers.
        """
        count = len(hidden)
        size = padded(count, self.ready)
        residual = self.residual[:count]
        residual.copy_(hidden)
        self.positions[:count].copy_(placed.positions)
        if tokens is not None:
            self.tokens[:count].copy_(tokens)
        self.write_slots[:, :count].copy_(placed.write_slots)
        self.write_slots[:, count:size].fill_(-1)
        adapted = placed.owners is not None
        if placed.owners is not None:
            self.owners[:count].copy_(placed.owners)
            self.owners[count:size].fill_(self._slots.padding)
            self.arrange(self.owners[:size])
        layers = self.levels[units].layers[size, adapted]
        for i in range(first, last):
            if between is not None:
                between()
            layer = layers[i]
            before = layer.before if placed.steps is None else layer.before_hybrid
            assert before is not None
            before.replay()
            self._attend_prompts(i, placed, count)
            layer.after.replay()
        hidden.copy_(residual)

    def _attend_prompts(self, i: int, placed: MixedRows, count: int) -> None:
        """Queue the attention of the prompts of a pass of `count` rows in layer i."""
        decoder, first = self._decoder, placed.decoding
        if decoder.spec.is_linear(i):
            buffers = self.workspace.delta(count).part(first, count)
            placed.attend_prompts_linearly(i, buffers, self._kv.states)
            return
        q, qkv, out = (t[first:] for t in decoder.attended(i, self.workspace, count))
        placed.attend_prompts(q, placed.new_kv(qkv, i), self._kv.layers[i], i, out)

    def arrange(self, owners: Tensor) -> None:
        """Queue the tiles of a pass by adapter.

        `owners`: the request slot of each row, int32 [rows of the pass].
        """
        assert self._tiles is not None
        self._tiles.of_first(len(owners)).arrange(owners, self._slots.adapters)

    def _products(self, units: int, size: int, adapted: bool) -> GpuProducts:
        """Return the products of a pass of `size` rows, whose tiles are arranged before it."""
        products = self._steps.products(units)
        if not adapted:
            return products
        assert self._adapters is not None and self._tiles is not None
        return GpuAdaptedProducts(products, self._adapters, self._tiles.of_first(size))

    def _load_kernels(self, stream: torch.cuda.Stream, units: int) -> None:
        """Multiply once what has no graphs. cuBLAS has a kernel for every few sizes and shares, and
        it is loaded when it is first chosen: a millisecond or two in which nothing is launched, or
        until the device is through with what is queued (CUDA Programming Guide, Lazy Loading)."""
        counts = [n for n in LARGER if n <= self.workspace.rows]
        residual = self.residual.new_zeros((max(counts, default=0), self.residual.shape[1]))
        products = self._steps.products(units)
        with torch.cuda.stream(stream):
            for count in counts:
                self._decoder.multiply(1, residual[:count], self.workspace, products)
        most = min(BUCKETS[-1], self._steps.buckets[-1])
        # Prompts that end in a slice, as many as are classified once before any is served.
        self.load_heads(stream, units, most if units == self._whole else min(32, most))

    def load_heads(self, stream: torch.cuda.Stream, units: int, most: int) -> None:
        """Classify once as many rows as prompts may end in a slice, up to `most`; see
        `_load_kernels`."""
        rows = self.residual.new_zeros((most, self.residual.shape[1]))
        products = self._steps.products(units)
        with torch.cuda.stream(stream):
            for n in range(1, most + 1):
                self._decoder.head(rows[:n], self._steps.logits[:n], self.workspace, products)
        stream.synchronize()

    def _capture(
        self,
        stream: torch.cuda.Stream,
        units: int,
        size: int,
        adapted: bool,
        *,
        later: bool = False,
    ) -> list[_Layer]:
        kind = units, size, adapted
        parts: list[Callable[[int], None]] = [
            partial(self._before, *kind),
            partial(self.after, *kind),
        ]
        if units == self._whole:
            most = self._steps.buckets[-1]
            rows = self._steps.rows(most, min(size, most), units)
            parts.append(partial(self.before_hybrid, *kind, rows=rows))
        with torch.cuda.stream(stream):
            if adapted:
                self.arrange(self.owners[:size])
            for i, part in product(self._decoder.spec.kind_examples, parts):
                part(i)  # compiles kernels and sets up libraries; all rows are padding

        def layer(i: int) -> _Layer:
            runs = [partial(part, i) for part in parts]
            return _Layer(*(captured(stream, self._pool, run, later=later) for run in runs))

        return [layer(i) for i in range(self._decoder.spec.layers)]

    def before_hybrid(self, units: int, size: int, adapted: bool, i: int, rows: DecodeRows) -> None:
        """Queue layer i of a hybrid pass up to the attention of its prompts, for a graph.

        Args:
            units: SMs.
            size: rows of the pass.
            adapted: Whether rows may have adapters.
            i: layer index.
            rows: the first ones, as many as may decode.
        """
        self._before(units, size, adapted, i)
        count = len(rows.slots)  # rows without a request of its own move and write nothing
        self._decoder.attention(i, count, rows, self._kv, self.workspace)

    def after(self, units: int, size: int, adapted: bool, i: int) -> None:
        """Queue layer i from its attention on, for a graph; see `before_hybrid`."""
        residual, products = self.residual[:size], self._products(units, size, adapted)
        active = ActiveRows(self.write_slots[0, :size], 0)
        own = (self.workspace, products, self.tokens[:size])
        pending = self._decoder.after_attention(i, residual, active, *own)
        if pending is not None:
            pending.add_into(residual)

    def _before(self, units: int, size: int, adapted: bool, i: int) -> None:
        rows = PromptRows(self._decoder, self.positions[:size], self.write_slots[:, :size])
        residual, products = self.residual[:size], self._products(units, size, adapted)
        pool = self._kv.written(i)
        self._decoder.before_attention(i, residual, rows, pool, self.workspace, products)
