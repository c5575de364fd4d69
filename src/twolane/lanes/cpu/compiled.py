"""Passes over layers of few bits in compiled code (`kernels/cpu`)."""

from itertools import accumulate, groupby
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from twolane.kernels.cpu.formats import TileFormat
from twolane.kernels.cpu.instructions import CHUNK
from twolane.kernels.cpu.passes import FEW, LayerField, PassField
from twolane.kernels.cpu.product import ZEROS, bytes_of_blocks, linear, table_of
from twolane.kernels.cpu.team import Ints, own_team
from twolane.model.attention import Batch, KVCache
from twolane.model.decoder import Decoder, is_plain
from twolane.model.mlp import DenseMlp
from twolane.model.spec import ModelSpec


class CompiledLayers:
    """Layers that all are of tiles and have one shape, run in one call.

    Args:
        decoder: The model.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._spec = decoder, decoder.spec
        spec = self._spec
        self._factors = np.array(
            [spec.stream_eps, spec.norm_eps, spec.head_dim**-0.5], dtype=np.float32
        )
        alike = [[*each] for _, each in groupby(range(spec.layers), key=spec.rope_of)]
        self._runs = [(each[0], each[-1] + 1) for each in alike]
        """Layers of one rotation that follow each other: the first, and the one after the last."""
        self._tables: WeakKeyDictionary[KVCache, Ints] = WeakKeyDictionary()
        """The layers' tables with each pool."""

    def takes(self, kv: KVCache) -> bool:
        """Return whether passes can have this pool: one table of pages, in float32."""
        plain = all(isinstance(pool, Tensor) and pool.dtype == torch.float32 for pool in kv.layers)
        return plain and max(kv.layout.tables, default=0) == 0

    def run(self, first: int, last: int, hidden: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """Run layers `first:last`; see `Decoder.layer`.

        Args:
            first: The first layer.
            last: The one after the last.
            hidden: The residual stream, float32 [T, hidden]; left as it is.
            batch: The T tokens.
            kv: A pool that `takes` accepts.
        """
        layers, out = self._table(kv), hidden.clone(memory_format=torch.contiguous_format)
        rows = _PassTable(self._spec, out, batch, self._factors, own_team().threads)
        for begin, end in self._runs:
            if first < end and begin < last:
                rows.table[PassField.TURNS] = self._decoder.turn(begin, batch).data_ptr()
                start, stop = max(first, begin), min(last, end)
                count = 1 if kv.layer_by_layer else stop - start
                for i in range(start, stop, count):
                    own_team().run_layers(layers[i : i + count], rows.table)
                    kv.note_written(range(i, i + count), batch.write_slots[0])
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states; see `Decoder.head`."""
        head, spec = self._decoder.weights.head, self._spec
        if head.scheme != "tiles" or spec.logit_cap is not None:
            return self._decoder.head(hidden)
        norm = self._decoder.weights.norm
        return linear(hidden, head.values, norm, spec.stream_eps)[:, : spec.vocab_size]

    def _table(self, kv: KVCache) -> Ints:
        if kv not in self._tables:
            rows = [self._row(i, kv) for i in range(self._spec.layers)]
            self._tables[kv] = np.array(rows, np.int64)
        return self._tables[kv]

    def _row(self, i: int, kv: KVCache) -> Ints:
        pool, w = kv.layers[i], self._decoder.weights.layers[i]
        row = np.zeros(LayerField.SIZE, np.int64)
        assert isinstance(pool, Tensor)
        assert isinstance(w.mlp, DenseMlp)
        row[LayerField.POOL], row[LayerField.WINDOW] = pool.data_ptr(), self._spec.window(i) or 0
        vectors = {
            LayerField.NORM: w.input_norm,
            LayerField.MLP_NORM: w.mlp_norm,
            LayerField.BIAS: w.qkv_bias,
            LayerField.HEAD_NORM: w.qk_norm,
        }
        for field, vector in vectors.items():
            row[field] = 0 if vector is None else vector.data_ptr()
        matrices = {
            LayerField.QKV: w.qkv,
            LayerField.O: w.o,
            LayerField.GATE_UP: w.mlp.gate_up,
            LayerField.DOWN: w.mlp.down,
        }
        for field, matrix in matrices.items():
            row[field] = matrix.values.data_ptr()
            row[field + 1] = TileFormat.of(matrix.values.shape[2])
        return row


class _PassTable:
    """The table of a pass, and the memory that it names.

    Args:
        spec: The model's shape.
        hidden: The residual stream, which the pass changes.
        batch: Its tokens.
        factors: float32, as `PassField.FACTORS`.
        threads: Threads that run it.
    """

    def __init__(
        self, spec: ModelSpec, hidden: Tensor, batch: Batch, factors: np.ndarray, threads: int
    ) -> None:
        rows, width = hidden.shape
        heads = spec.heads + 2 * spec.kv_heads
        slots = batch.sequence_slots(0)
        parts = _attention_parts(batch, slots)
        scores = 16 * -(-(slots.shape[1] + 3) // 16) + 16
        scratch = max(4 * CHUNK * 64, 4 * width, 64 + 16 * (scores + spec.head_dim))
        scratch = 64 * -(-scratch // 64)
        sizes = {
            PassField.INPUT: bytes_of_blocks(rows, width),
            PassField.ATTENDED: bytes_of_blocks(rows, spec.q_size),
            PassField.ACTIVATED: bytes_of_blocks(rows, spec.intermediate_size),
            PassField.HEADS: 4 * rows * heads * spec.head_dim,
            PassField.SCRATCH: threads * scratch,
        }
        memory = torch.empty(64 * sum(-(-size // 64) for size in sizes.values()), dtype=torch.uint8)
        ends = accumulate(
            (64 * -(-size // 64) for size in sizes.values()), initial=memory.data_ptr()
        )
        values = {
            **dict(zip(sizes, ends, strict=False)),
            PassField.SLOTS: batch.write_slots[0].data_ptr(),
            PassField.HIDDEN: hidden.data_ptr(),
            PassField.ROWS: rows,
            PassField.WIDTH: width,
            PassField.INNER: spec.intermediate_size,
            PassField.QUERY_HEADS: spec.heads,
            PassField.KEY_HEADS: spec.kv_heads,
            PassField.DIM: spec.head_dim,
            PassField.SCORES: scores,
            PassField.SCRATCH_BYTES: scratch,
            PassField.PARTS: parts.ctypes.data,
            PassField.PARTS_COUNT: len(parts),
            PassField.FACTORS: factors.ctypes.data,
            PassField.ZEROS: ZEROS.ctypes.data,
        }
        self.table = table_of(values)
        self._held = memory, slots, parts, factors, hidden


def _attention_parts(batch: Batch, slots: Ints) -> Ints:
    """Return `PassField.PARTS` of a batch with the slots of each sequence, [segments, tokens]."""
    parts = [
        (offset + i, min(FEW, segment.n - i), segment.start + i, slots[place].ctypes.data)
        for place, (segment, offset) in enumerate(zip(batch.segments, batch.offsets, strict=False))
        for i in range(0, segment.n, FEW)
    ]
    return np.array(parts, np.int64)


def compiled_layers(decoder: Decoder) -> CompiledLayers | None:
    """Return a decoder's layers in the form of one call, or None if it does not compute all of
    them."""
    spec, layers = decoder.spec, decoder.weights.layers
    schemes = {matrix.scheme for layer in layers for matrix in layer.matrices}
    plain = schemes == {"tiles"} and all(is_plain(spec, i, w) for i, w in enumerate(layers))
    plain &= len({*spec.each}) == 1 and spec.head_dim % 32 == 0
    return CompiledLayers(decoder) if plain and all(w.sinks is None for w in layers) else None
