"""Hybrid passes as two graphs each: to the last hidden states, and from there to the next tokens.

A pass of 128 to 256 rows takes the GPU 7 to 9 ms, and so must take the host less, also when it is
planned at the last moment: launched operation by operation it took 3 ms and more, most of it
waiting for Python's lock, which each operation gives up. So all that differs from pass to pass is
written to one block at fixed places, in one copy; the graphs find it there, as those of decode
steps find their rows (`decode_graphs.py`).

Attention of the prompts is FA3's, for its lists can be such places (`Replayed`). What rows want
beside sampling (`logit_processors.py`) is done without the second graph.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twolane.kernels import fused
from twolane.kernels.prefill_attention.batch import AttentionBatch, Block, laid_out
from twolane.kernels.prefill_attention.dispatch import choose
from twolane.kernels.prefill_attention.flashinfer_kernels import Replayed
from twolane.kernels.sampling import Sampler
from twolane.kernels.sizes import WHOLE, padded
from twolane.lanes.cuda.decode_graphs import DecodeGraphs, captured
from twolane.lanes.cuda.forward_batch import DecodeRows, places_of, token_ids
from twolane.lanes.cuda.layer_graphs import LayerGraphs
from twolane.lanes.cuda.slots import Ints, Slots
from twolane.lanes.sampling_points import SamplingPoints
from twolane.lanes.work import HybridWork
from twolane.model.gpu_decoder import GpuDecoder, GpuKVCache


def served(decoder: GpuDecoder) -> bool:
    """Return whether attention of this model can be in a graph."""
    spec = decoder.spec
    backend, _ = choose(decoder.dtype, spec.head_dim, decoder.device)
    plain = spec.state is None and not any(spec.window(i) for i in range(spec.layers))
    return backend == "flashinfer" and plain and spec.alike


class HybridGraphs:
    """The graphs of one model's hybrid passes of up to `WHOLE` tokens, on the whole device.

    They have buffers of `passes`, and run in its lane.

    Args:
        decoder: the model.
        kv: The model's KV pool.
        slots: The device's memory of the requests.
        steps: the decode graphs.
        passes: the layers.
        logits: float32 [most rows that are sampled, vocab], the lane's.
        sampler: the lane's.
        units: SMs of the device.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        kv: GpuKVCache,
        slots: Slots,
        steps: DecodeGraphs,
        passes: LayerGraphs,
        logits: Tensor,
        sampler: Sampler,
        units: int,
    ) -> None:
        spec, device, rows = decoder.spec, decoder.device, steps.buckets[-1]
        self._decoder, self._kv, self._slots, self._steps = decoder, kv, slots, steps
        self._passes, self._logits, self._sampler = passes, logits, sampler
        shape = kv.page_size, spec.heads, spec.kv_heads, spec.head_dim, decoder.dtype, None
        batch = AttentionBatch.build([(0, 1)], [[0]], *shape, passes.scratch)
        self._units = units
        self._attention = Replayed(batch, units, WHOLE, kv.rounded)
        self._max_pages = min(kv.pages, self._attention.max_pages or kv.pages)
        adapted = passes.kinds[-1]
        own = [3, *[rows] * 3, *[WHOLE] * 3, *[rows] * 5, 1, WHOLE if adapted else 0]
        self._block = Block([*own, *self._attention.sizes, self._max_pages], device)
        lists = self._block.lists
        self._counts, self._decode, self._prompts = lists[0], lists[1:4], lists[4:7]
        self._where, self._ends, self._step = lists[7], lists[8:12], lists[12]
        self._owners = lists[13]
        count = self._counts[2:]
        self._attention.read(self._block.memory, lists[len(own) : -1], lists[-1], count)
        self._chosen = torch.empty((rows, spec.hidden_size), dtype=decoder.dtype, device=device)
        self._sampled, self._out = (
            torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._passed: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        """By size, whether tiles of attention are split, and whether rows may have adapters."""
        self._ended: dict[int, torch.cuda.CUDAGraph] = {}
        """By bucket of rows that are sampled."""
        self._captures: tuple[torch.cuda.Stream, Any]
        """Stream and memory pool of the captures."""
        self._later = False
        """Whether the lanes serve already."""
        torch.cuda.current_stream().synchronize()  # graphs are captured on other streams

    def capture(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Make the graphs of what is ready in `passes` and `steps`, with that stream's share of the
        SMs and memory of that pool."""
        self._captures = stream, pool
        for size in [size for size in reversed(self._passes.ready) if size <= WHOLE]:
            self._capture_size(size)
        for bucket in reversed(self._steps.ready):
            self._ended[bucket] = self._made(partial(self._end, bucket))

    def capture_later(self, *, size: int = 0, bucket: int = 0) -> None:
        """Make the graphs of one more size or bucket while nothing runs."""
        self._later, (stream, _) = True, self._captures
        with torch.cuda.stream(stream):
            self._block.memory.zero_()  # all rows are padding
        if bucket:
            self._ended[bucket] = self._made(partial(self._end, bucket))
        elif size <= WHOLE:
            self._capture_size(size)
        stream.synchronize()

    def _capture_size(self, size: int) -> None:
        for split, adapted in product((False, True), self._passes.kinds):
            kind = size, split, adapted
            self._passed[kind] = self._made(partial(self._pass, *kind))

    def _made(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream, pool = self._captures
        with torch.cuda.stream(stream):
            run()  # compiles kernels; all rows are padding
        graph = captured(stream, pool, run, later=self._later)
        with torch.cuda.stream(stream):
            graph.replay()  # the first time takes longer
        return graph

    def send(self, work: HybridWork, ends: SamplingPoints, units: int) -> Tensor | None:
        """Queue a pass on the current stream, up to its last hidden states.

        Returns:
            These, [rows, hidden], until the next pass; None: there is no graph for it.
        """
        rows = len(work.decode) + sum(row.count for row in work.prompts)
        if not work.decode or rows > WHOLE or units != self._units:
            return None
        chunks = [(row.start, row.count) for row in work.prompts]
        tables = [self._slots.host.pages[row.slot] for row in work.prompts]
        segments, pages = laid_out(chunks, tables, self._kv.page_size, len(work.decode))
        attention = self._attention.parts(segments)
        if attention is None or len(pages) > self._max_pages:
            return None
        lists, split = attention
        self._slots.upload(update.slot for update in work.slots)
        counts = np.array([len(work.decode), rows, len(pages)])
        size = padded(rows, self._passes.ready)
        adapted = self._slots.adapted(work)
        own = [counts, *self._rows(work), *_ends(ends), *self._owners_of(work, size, adapted)]
        self._block.send([*own, *lists, pages])
        self._passed[size, split, adapted].replay()
        return self._passes.residual[:rows]

    def finish(self, count: int) -> Tensor:
        """Queue the end of the pass that was sent: its tokens, int32 [count], which are also in
        the slots."""
        self._ended[self._steps.bucket(count)].replay()
        return self._out[:count]

    def _rows(self, work: HybridWork) -> list[Ints]:
        """Slots, places and lengths of the decode rows; tokens, places and write slots of the
        prompts'."""
        slots = np.array([row.slot for row in work.decode])
        places = np.array([row.position for row in work.decode])
        tokens, tables = [token_ids(chunk) for chunk in work.chunks], self._slots.host.pages
        where = [places_of(row, tables[row.slot], self._kv.page_size) for row in work.prompts]
        prompts = [np.concatenate(part) for part in (tokens, *zip(*where, strict=True))]
        return [slots, places, places + 1, *prompts]

    def _owners_of(self, work: HybridWork, size: int, adapted: bool) -> Sequence[Ints]:
        """Return the request slot of each row of a padded pass; None without adapters."""
        if not adapted:
            return (np.zeros(0, dtype=np.int32),)
        rows = [(row.slot, 1) for row in work.decode]
        rows += [(row.slot, row.count) for row in work.prompts]
        rows.append((self._slots.padding, size - sum(count for _, count in rows)))
        slots, counts = zip(*rows, strict=True)
        return (np.repeat(np.array(slots, dtype=np.int32), counts),)

    def _pass(self, size: int, split: bool, adapted: bool) -> None:
        """Queue the kernels of a pass, for its graph."""
        decoder, passes, known = self._decoder, self._passes, self._slots
        slots, places, lengths = self._decode
        if (channel := passes.workspace.channel) is not None:
            channel.broadcast(known.last_token)
        fused.lay_out(
            self._counts,
            slots,
            places,
            known.last_token,
            known.tables[0],
            *self._prompts,
            page_size=self._kv.page_size,
            embedding=decoder.weights.embedding,
            residual=passes.residual[:size],
            positions=passes.positions[:size],
            write_slots=passes.write_slots[0, :size],
            vocab_first=decoder.shard.vocab.start,
            scale=decoder.spec.stream_scale,
        )
        if channel is not None:
            channel.all_reduce(passes.residual[:size])
        if adapted:
            passes.arrange(self._owners[:size])
        n, scratch = min(size, len(slots)), self._steps.scratch
        place = slots[:n], places[:n], lengths[:n]
        rows = DecodeRows(decoder, known.tables, *place, scratch, self._units)
        q, _, out = decoder.attended(0, passes.workspace, size)
        for i in range(decoder.spec.layers):
            passes.before_hybrid(self._units, size, adapted, i, rows)
            self._attention.run(split, q, self._kv.layers[i], out)
            passes.after(self._units, size, adapted, i)

    def _end(self, bucket: int) -> None:
        """Queue the kernels of a pass's end, for its graph."""
        chosen, logits = self._chosen[:bucket], self._logits[:bucket]
        torch.index_select(self._passes.residual, 0, self._where[:bucket], out=chosen)
        products = self._steps.products(self._units)
        self._decoder.head(chosen, logits, self._passes.workspace, products)
        if self._decoder.follows:
            return
        slots, positions, lengths, steps = (part[:bucket] for part in self._ends)
        sampled, known = self._sampled[:bucket], self._slots
        self._sampler.sample(logits, slots, positions, lengths, known.params, sampled)
        last, step = known.last_token, self._step
        fused.advance(sampled, slots, steps, step, positions, lengths, last, self._out)


def _ends(ends: SamplingPoints) -> Sequence[Ints]:
    """Rows of the pass that are sampled at; slots, positions, lengths and steps, as those of a
    decode step (`Inputs`), the only one; and that it is the first."""
    slots = np.array([place.slot for place in ends.points])
    positions = np.array([place.position - 1 for place in ends.points])
    once = np.ones_like(slots)
    return np.array(ends.where), slots, positions, once, once, np.zeros(1, dtype=np.int64)
