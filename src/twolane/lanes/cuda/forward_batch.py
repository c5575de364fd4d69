"""The tokens of a forward pass on the GPU: prompts, decode rows, or both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twolane.kernels import fused
from twolane.kernels.decode_attention.dispatch import DecodeScratch, decode_attention
from twolane.kernels.delta_rule.convolution import PromptStates
from twolane.kernels.delta_rule.decode import decode_step
from twolane.kernels.delta_rule.prefill import PromptRoom, prompt_pass
from twolane.kernels.experts.routing import ActiveRows
from twolane.kernels.pool import Pool, WrittenPool
from twolane.kernels.prefill_attention.batch import NewKV
from twolane.kernels.prefill_attention.dispatch import PrefillPlan, prefill_attention
from twolane.kernels.short_convolution import convolve_prompts, convolve_step
from twolane.lanes.cuda.slots import Ints
from twolane.lanes.work import PromptChunk, PromptRow
from twolane.model.gpu_decoder import DeltaBuffers, GpuDecoder, GpuStatePool, PlanKey


@dataclass(frozen=True)
class PromptRows:
    """Tokens whose places in the pool are known."""

    decoder: GpuDecoder
    positions: Tensor
    """int32 [T]"""
    write_slots: Tensor
    """Place in the pool of each token's key in each table, page * page_size + offset, int32
    [tables, T]; -1 for padding."""

    @property
    def active(self) -> ActiveRows:
        """See `Rows.active`."""
        return ActiveRows(self.write_slots[0], 0)

    def write(self, qkv: Tensor, q: Tensor, layer: int, pool: WrittenPool) -> None:
        """See `KVWriter.write`."""
        places = self.write_slots[self.decoder.layout.tables[layer]]
        _write(self.decoder, layer, qkv, self.positions, q, pool, places)


@dataclass(frozen=True)
class MixedRows(PromptRows):
    """Tokens whose places the host has worked out: prompts, and hybrid batches.

    Decode rows come first, if there are any.
    """

    plans: Mapping[PlanKey, PrefillPlan]
    """Attention plans of the prompts."""
    steps: "DecodeRows | None" = None
    """The decode rows, for hybrid batches."""
    owners: Tensor | None = None
    """The request slot of each token, int32 [T], if one of the requests has an adapter."""
    prompts: Sequence[PromptStates] = ()
    """The prompts by their states, if the model has layers of linear attention."""

    def after(self, steps: "DecodeRows", page_size: int) -> "MixedRows":
        """Return decode rows and then these tokens, for one pass."""
        pages = steps.tables[:, steps.slots, steps.positions // page_size]
        write_slots = pages * page_size + steps.positions % page_size
        owners = None if self.owners is None else torch.cat([steps.slots, self.owners])
        return MixedRows(
            self.decoder,
            torch.cat([steps.positions, self.positions]),
            torch.cat([write_slots, self.write_slots], dim=1),
            self.plans,
            steps,
            owners,
            self.prompts,
        )

    def attend(self, q: Tensor, qkv: Tensor, pool: Pool, layer: int, out: Tensor) -> None:
        """See `Rows.attend`."""
        n = self.decoding
        if self.steps is not None:
            self.steps.attend(q[:n], qkv[:n], pool, layer, out[:n])
        self.attend_prompts(q[n:], self.new_kv(qkv[n:], layer), pool, layer, out[n:])

    def attend_linearly(self, layer: int, buffers: DeltaBuffers, states: GpuStatePool) -> None:
        """See `Rows.attend_linearly`."""
        n, count = self.decoding, len(buffers.x)
        if self.steps is not None:
            self.steps.attend_linearly(layer, buffers.part(0, n), states)
        self.attend_prompts_linearly(layer, buffers.part(n, count), states)

    def attend_prompts_linearly(
        self, layer: int, buffers: DeltaBuffers, states: GpuStatePool
    ) -> None:
        """Linear attention of the prompts' rows alone."""
        if self.decoder.spec.convolution is not None:
            taps, kept = self.decoder.convolution(layer, states)
            convolve_prompts(buffers.x, taps, kept, self.prompts, buffers.out)
            return
        x, rates, *room, out = buffers
        linear = self.decoder.linear(layer, states)
        prompt_pass(x, rates, linear, self.prompts, PromptRoom(*room), out)

    @property
    def decoding(self) -> int:
        """Decode rows."""
        return 0 if self.steps is None else len(self.steps.slots)

    def new_kv(self, qkv: Tensor, layer: int) -> NewKV | None:
        """Keys and values [T, kv_heads, head_dim] of prompts' rows in a layer; None: it has none of
        its own."""
        spec = self.decoder.shapes[layer]
        if not self.decoder.has_keys(layer):
            return None
        kv = qkv[:, spec.q_size : spec.q_size + 2 * spec.kv_size]
        kv = kv.view(len(qkv), 2, -1, spec.head_dim)
        return kv[:, 0], kv[:, 1]

    def attend_prompts(
        self, q: Tensor, new: NewKV | None, pool: Pool, layer: int, out: Tensor
    ) -> None:
        """Causal attention of the prompts' rows alone."""
        plan = self.plans[self.decoder.plan_key(layer)]
        prefill_attention(plan, q, pool, out, new, self.decoder.weights.layers[layer].sinks)


@dataclass(frozen=True)
class DecodeRows:
    """Decode rows: their places are worked out on the device, so a graph can be replayed."""

    decoder: GpuDecoder
    tables: Tensor
    """Pages of each slot in each table, int32 [tables, slots, max_pages]."""
    slots: Tensor
    """int32 [R]"""
    positions: Tensor
    """Position of the token that each row computes, int32 [R]."""
    lengths: Tensor
    """Tokens each row sees, itself included; 0: the row is padding or done. int32 [R]"""
    scratch: DecodeScratch
    units: int

    @property
    def active(self) -> ActiveRows:
        """See `Rows.active`."""
        return ActiveRows(self.lengths, 1)

    def write(self, qkv: Tensor, q: Tensor, layer: int, pool: WrittenPool) -> None:
        """See `Rows.write`."""
        pages = self.tables[self.decoder.layout.tables[layer]]
        places = pages, self.slots, self.lengths
        _write(self.decoder, layer, qkv, self.positions, q, pool, *places)

    def attend(self, q: Tensor, qkv: Tensor, pool: Pool, layer: int, out: Tensor) -> None:
        """See `Rows.attend`."""
        decode_attention(
            q,
            pool,
            self.tables[self.decoder.layout.tables[layer]],
            self.slots,
            self.lengths,
            out,
            self.scratch,
            units=self.units,
            window=self.decoder.spec.window(layer),
            sinks=self.decoder.weights.layers[layer].sinks,
        )

    def attend_linearly(self, layer: int, buffers: DeltaBuffers, states: GpuStatePool) -> None:
        """See `Rows.attend_linearly`; of the first rows."""
        own, rows = buffers.part(0, len(self.slots)), (self.slots, self.lengths)
        if self.decoder.spec.convolution is not None:
            convolve_step(own.x, *self.decoder.convolution(layer, states), *rows, own.out)
            return
        linear = self.decoder.linear(layer, states)
        decode_step(own.x, own.rates, linear, *rows, own.mixed, own.out, self.units)


def _write(
    decoder: GpuDecoder,
    layer: int,
    qkv: Tensor,
    positions: Tensor,
    q: Tensor,
    pool: WrittenPool,
    *places: Tensor,
) -> None:
    """See `KVWriter.write`; `places`: the last arguments of `qkv_rope_write`."""
    spec, own = decoder.spec, decoder.has_keys(layer)
    rows, last = (qkv, positions, *decoder.turning(layer), q, pool), spec.norms_rotated
    fused.qkv_rope_write(*rows, *places, norm_last=last, v_norm=spec.v_norm, own=own)


def places_of(row: PromptRow, pages: Sequence[int], page_size: int) -> tuple[Ints, Ints]:
    """Position and place in the pool of each token of a chunk, int32 [n] each."""
    positions = np.arange(row.start, row.start + row.count, dtype=np.int32)
    table = np.asarray(pages, dtype=np.int32)
    return positions, table[positions // page_size] * page_size + positions % page_size


def token_ids(chunk: PromptChunk) -> Ints:
    """Return the chunk's tokens, int32 [n]."""
    return np.frombuffer(chunk.tokens, dtype=np.int64).astype(np.int32)
