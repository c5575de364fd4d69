"""Prefill and hybrid passes with CUDA graphs of what lies between the attentions of their prompts.

Launched kernel by kernel, a layer takes the host about 0.4 ms: longer than the GPU needs for 500
tokens, and meanwhile the host launches no decode step. Attention of prompts is planned for each
batch and cannot be replayed. All else of a layer is a matter of how many tokens there are, so it is
two graphs for each layer, number of tokens and share of the SMs: up to the attention, and from it
on. A hybrid batch's decode attention finds its rows on the device and lies in the first.

Even so a pass of 36 layers takes the host 3.5 to 10 ms, more than a bound of 9 ms has room for. So
a hybrid pass of up to `WHOLE` tokens is one graph where attention can be in it: FA3's, whose lists
are then written to places that the graph knows (`Replayed`).

A pass is padded to the next size that has graphs. Padding is written to no page, and a row's
results are nobody else's, so what it computes does not matter.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twolane.garbage import uncollected
from twolane.kernels.prefill_attention import choose
from twolane.kernels.prefill_attention_batch import PrefillBatch, PrefillWorkspace
from twolane.kernels.prefill_attention_flashinfer import Replayed
from twolane.lanes.cuda.decode import DecodeSteps, captured
from twolane.lanes.cuda.green import Partitions
from twolane.lanes.cuda.rows import Placed, Written
from twolane.lanes.work import PromptRow
from twolane.model.gpu import GpuDecoder, GpuKVCache, Workspace
from twolane.sizes import SIZES, WHOLE, padded

LARGER: tuple[int, ...] = tuple(range(SIZES[-1] + 1, 8192 + 1, 251))
"""Tokens of the passes that are multiplied once before any is served: odd steps, for what cuBLAS
chooses depends on what their number is divisible by, too."""

ENDING = 32
"""Prompts that end in a slice, as many as are classified once before any is served."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer at one size."""

    before: torch.cuda.CUDAGraph
    after: torch.cuda.CUDAGraph
    before_hybrid: torch.cuda.CUDAGraph | None = None
    """With attention of the decode rows; on the whole device alone."""


@dataclass(frozen=True)
class PassGraphs:
    """The graphs of one share of the SMs, and what they cost."""

    layers: dict[int, list[_Layer]]
    """By size."""
    whole: dict[tuple[int, bool], torch.cuda.CUDAGraph]
    """Hybrid passes, by size and whether tiles of attention are split."""
    bytes: int
    """Device memory that capturing took."""
    seconds: float
    tuning_seconds: float
    """That choosing its matrix products took, before."""


class Passes:
    """The graphs of one model's prefill and hybrid passes, and the buffers that they share.

    They belong to one lane at a time, as its workspace does.

    Args:
        decoder: the model.
        kv: its pool.
        steps: tell which rows of a hybrid pass decode.
        workspace: of the lane; it grows without these.
    """

    def __init__(
        self, decoder: GpuDecoder, kv: GpuKVCache, steps: DecodeSteps, workspace: Workspace
    ) -> None:
        workspace.reserve(SIZES[-1])
        self._decoder, self._kv, self._steps = decoder, kv, steps
        self._workspace = workspace.fixed()
        spec, device = decoder.spec, decoder.device
        self._residual = torch.zeros(
            (SIZES[-1], spec.hidden_size), dtype=decoder.dtype, device=device
        )
        self._positions = torch.zeros(SIZES[-1], dtype=torch.int32, device=device)
        self._write_slots = torch.full_like(self._positions, -1)
        self._scratch = PrefillWorkspace(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.levels: dict[int, PassGraphs] = {}
        self._whole = 0
        """SMs that hybrid batches run on."""
        self._attention: Replayed | None = None
        """Of whole passes; None: they are launched layer by layer."""

    def capture(self, partitions: Partitions, progress: Callable[[float], None]) -> None:
        """Tune the products and make the graphs of every share that prefill can have.

        `progress` is told the share that is done.
        """
        shares, self._whole = partitions.prefill_units, partitions.units
        self._attention = self._replayed()
        with uncollected():  # to free device memory or events while a graph is captured ends it
            for place, units in enumerate(shares):
                progress(place / len(shares))
                stream = partitions.capture_stream("prefill", units)
                begun = time.monotonic()
                with torch.cuda.stream(stream):
                    self._decoder.tune_passes(self._steps.products(units))
                tuning = time.monotonic() - begun
                self._load_kernels(stream, units)
                torch.cuda.empty_cache()  # what tuning allocated does not count, nor stay
                free, begun = torch.cuda.mem_get_info()[0], time.monotonic()
                # The largest first: the others find their memory.
                layers = {size: self._capture(stream, units, size) for size in reversed(SIZES)}
                whole = self._capture_whole(stream) if units == self._whole else {}
                taken, seconds = free - torch.cuda.mem_get_info()[0], time.monotonic() - begun
                self.levels[units] = PassGraphs(layers, whole, taken, seconds, tuning)
        progress(1.0)

    def serves(self, placed: Placed, units: int) -> bool:
        """Whether there are graphs for such a pass on so many SMs."""
        if placed.steps is not None and units != self._whole:
            return False
        return units in self.levels and len(placed.positions) <= SIZES[-1]

    def send(self, rows: Sequence[PromptRow], decoding: int, units: int) -> bool | None:
        """Write what attention of these prompts, behind so many decode rows, reads in the graph of
        a whole pass, on the current stream.

        Returns:
            Whether its tiles are split; None: there is no graph for them.
        """
        count = decoding + sum(len(row.tokens) for row in rows)
        if self._attention is None or units != self._whole or not decoding or count > WHOLE:
            return None
        chunks = [(row.start, len(row.tokens)) for row in rows]
        return self._attention.send(self._batch(chunks, [row.pages for row in rows], decoding))

    def layers(self, first: int, last: int, hidden: Tensor, placed: Placed, units: int) -> None:
        """Run layers `first:last` of a pass on the current stream, in place.

        Args:
            first: layer index.
            last: one past the last layer.
            hidden: [T, hidden] from the embedding or the layer before; updated.
            placed: the T tokens; its decode rows are those of `DecodeSteps.inputs` in all rows.
            units: SMs of the stream.
        """
        count, decoder = len(hidden), self._decoder
        size = padded(count, SIZES)
        residual = self._residual[:count]
        residual.copy_(hidden)
        self._positions[:count].copy_(placed.positions)
        self._write_slots[:count].copy_(placed.write_slots)
        self._write_slots[count:size].fill_(-1)
        if placed.sent is not None:
            self.levels[units].whole[size, placed.sent].replay()
            hidden.copy_(residual)
            return
        q, qkv, out = (t[placed.decoding :] for t in decoder.attended(self._workspace, count))
        new, layers = placed.new_kv(qkv), self.levels[units].layers[size]
        for i in range(first, last):
            layer = layers[i]
            before = layer.before if placed.steps is None else layer.before_hybrid
            assert before is not None
            before.replay()
            placed.attend_prompts(q, new, self._kv.layers[i], decoder.spec.window(i), out)
            layer.after.replay()
        hidden.copy_(residual)

    def _load_kernels(self, stream: torch.cuda.Stream, units: int) -> None:
        """Multiply once what has no graphs. cuBLAS has a kernel for every few sizes and shares, and
        it is loaded when it is first chosen: a millisecond or two in which nothing is launched, or
        until the device is through with what is queued (CUDA Programming Guide, Lazy Loading)."""
        counts = [n for n in LARGER if n <= self._workspace.rows]
        logits = self._steps.logits if units == self._whole else self._steps.logits[:ENDING]
        rows = max([*counts, len(logits)])
        residual = self._residual.new_zeros((rows, self._residual.shape[1]))
        products = self._steps.products(units)
        with torch.cuda.stream(stream):
            for count in counts:
                self._decoder.multiply(1, residual[:count], self._workspace, products)
            for n in range(1, len(logits) + 1):
                self._decoder.head(residual[:n], logits[:n], self._workspace, products)
        stream.synchronize()

    def _capture(self, stream: torch.cuda.Stream, units: int, size: int) -> list[_Layer]:
        parts: list[Callable[[int], None]] = [
            partial(self._before, units, size),
            partial(self._after, units, size),
        ]
        if units == self._whole:
            parts.append(partial(self._before_hybrid, units, size))
        with torch.cuda.stream(stream):
            for part in parts:
                part(0)  # compiles kernels and sets up libraries; all rows are padding

        def layer(i: int) -> _Layer:
            return _Layer(*(captured(stream, self._pool, partial(part, i)) for part in parts))

        return [layer(i) for i in range(self._decoder.spec.layers)]

    def _replayed(self) -> Replayed | None:
        spec, device = self._decoder.spec, self._decoder.device
        windows = {spec.window(i) for i in range(spec.layers)}
        backend, _ = choose(self._decoder.dtype, spec.head_dim, device)
        if backend != "flashinfer" or windows != {None}:
            return None
        batch = self._batch([(0, 1)], [[0]], 0)
        attention = Replayed(batch, self._whole, WHOLE, len(self._kv.layers[0]))
        torch.cuda.current_stream().synchronize()  # graphs are captured on other streams
        return attention

    def _batch(
        self, chunks: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], decoding: int
    ) -> PrefillBatch:
        """Chunks of prompts, (reused, new) tokens, in a hybrid pass."""
        spec, kv = self._decoder.spec, self._kv
        shape = kv.page_size, spec.heads, spec.kv_heads, spec.head_dim, self._decoder.dtype, None
        return PrefillBatch.build(chunks, tables, *shape, self._scratch, first_row=decoding)

    def _capture_whole(
        self, stream: torch.cuda.Stream
    ) -> dict[tuple[int, bool], torch.cuda.CUDAGraph]:
        if self._attention is None:
            return {}
        graphs = {}
        for size in [size for size in reversed(SIZES) if size <= WHOLE]:
            for split in (False, True):
                run = partial(self._run_whole, self._attention, size, split)
                with torch.cuda.stream(stream):
                    run()  # compiles kernels; all rows are padding
                graphs[size, split] = graph = captured(stream, self._pool, run)
                with torch.cuda.stream(stream):
                    graph.replay()  # the first time takes longer
        return graphs

    def _run_whole(self, attention: Replayed, size: int, split: bool) -> None:
        decoder = self._decoder
        q, _, out = decoder.attended(self._workspace, size)
        for i in range(decoder.spec.layers):
            self._before_hybrid(self._whole, size, i)
            attention.run(split, q, self._kv.layers[i], out)
            self._after(self._whole, size, i)

    def _before(self, units: int, size: int, i: int) -> None:
        rows = Written(self._decoder, self._positions[:size], self._write_slots[:size])
        residual, products = self._residual[:size], self._steps.products(units)
        pool = self._kv.layers[i]
        self._decoder.before_attention(i, residual, rows, pool, self._workspace, products)

    def _before_hybrid(self, units: int, size: int, i: int) -> None:
        self._before(units, size, i)
        decoder, steps = self._decoder, self._steps
        q, qkv, out = decoder.attended(self._workspace, size)
        count = min(size, steps.buckets[-1])
        rows = steps.rows(steps.buckets[-1], count, units)
        pool, window = self._kv.layers[i], decoder.spec.window(i)
        rows.attend(q[:count], qkv[:count], pool, window, out[:count])

    def _after(self, units: int, size: int, i: int) -> None:
        residual, products = self._residual[:size], self._steps.products(units)
        self._decoder.after_attention(i, residual, self._workspace, products)
