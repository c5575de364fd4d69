"""Attention of a prefill batch over paged KV with reused prefixes, planned for its lane's SMs.

    plan = PrefillPlan.build(segments, tables, page_size=32, heads=32, kv_heads=8, dim=128,
                             dtype=torch.bfloat16, units=64, workspace=workspace)
    for pool in layers:
        prefill_attention(plan, q, pool, out)
    plan = plan.at(100)  # the lane changed its level between two slices

Libraries deal the tiles of a batch to all SMs of the device; in a lane with half of them, a third
round runs almost empty. A plan deals them to the lane's `units` (`schedule.py`).
Two kernels take such plans: FlashInfer's FA3, whose work lists we write in its place
(`flashinfer_kernels.py`), and our own in Triton, which runs everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from twolane.kernels.pool import E4M3, Pool, RoundedPool, values_of
from twolane.kernels.prefill_attention import flashinfer_kernels as fa3
from twolane.kernels.prefill_attention.batch import AttentionBatch, NewKV, PrefillWorkspace
from twolane.kernels.prefill_attention.triton_kernels import TritonProgram
from twolane.kernels.sizes import FILLED

__all__ = ["Backend", "PrefillPlan", "PrefillWorkspace", "choose", "prefill_attention"]

Backend = Literal["flashinfer", "triton"]


class _Program(Protocol):
    def run(
        self, q: Tensor, pool: Pool, out: Tensor, new: NewKV | None, sinks: Tensor | None
    ) -> None: ...


@dataclass(frozen=True)
class PrefillPlan:
    """A batch's attention, laid out for `units` SMs and ready to be launched for each layer.

    Its work lists are uploaded on the stream that is current when it is built: run it on that
    stream, or on one that waits for it, and keep it until its launches have ended.
    """

    batch: AttentionBatch
    units: int
    backend: Backend
    dense: bool
    """Whether `prefill_attention` reads `k` and `v` instead of the pool, and so needs them."""
    rounded: bool
    """Whether the pool is rounded."""
    _program: _Program

    @classmethod
    def build(
        cls,
        segments: Sequence[tuple[int, int]],
        tables: Sequence[Sequence[int]],
        *,
        page_size: int,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        units: int,
        workspace: PrefillWorkspace,
        window: int | None = None,
        backend: Backend | None = None,
        dense: bool = False,
        rounded: bool = False,
    ) -> "PrefillPlan":
        """Plan a batch: host work and two uploads, no synchronisation.

        Args:
            segments: (reused, new) tokens of each sequence, in the order of the rows.
            tables: physical pages that cover each sequence's [0, reused + new), in order.
            page_size: tokens a page: 16, 32 or 64.
            heads: query heads; `kv_heads` divides them, into groups of at most 16.
            dim: Size of a head.
            dtype: Type of queries, pool and output.
            units: SMs of the lane.
            workspace: the lane's.
            window: tokens seen by each token, itself included; None: all.
            backend: None: the best there is.
            dense: the caller can give the new tokens' keys and values to `prefill_attention`; where
                nothing is reused, FA3 reads them faster than pages.
            rounded: the pool is a `RoundedPool`.

        Raises:
            ValueError: an argument is out of range, or the backend cannot do it.
        """
        shape = (page_size, heads, kv_heads, dim, dtype, window)
        batch = AttentionBatch.build(segments, tables, *shape, workspace)
        best = _choose(batch)
        if backend is not None and backend != best:
            able, problem = choose(dtype, dim, workspace.device, batch.window)
            if backend == "flashinfer" and able != backend:
                raise ValueError(f"backend='flashinfer': {problem}")
            best = backend
        dense = dense and best == "flashinfer" and not batch.segments.reused.any()
        if rounded and not dense and best == "flashinfer" and not fa3.unpackable(batch):
            best = "triton"  # too many tokens in e4m3 to widen them
        program = _program(batch, units, best, dense, rounded)
        return cls(batch, units, best, dense, rounded, program)

    def at(self, units: int) -> "PrefillPlan":
        """Return a plan of this batch on another number of SMs: host work and one upload."""
        program = _program(self.batch, units, self.backend, self.dense, self.rounded)
        return replace(self, units=units, _program=program)


def prefill_attention(
    plan: PrefillPlan,
    q: Tensor,
    pool: Pool,
    out: Tensor,
    new: NewKV | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Causal attention of a batch's new tokens, whose keys and values are in the pool already.

    Launches on the current stream.

    Args:
        plan: The plan of this batch.
        q: rotated queries [T, heads, dim]; a token's heads are contiguous.
        pool: one layer's KV [pages, kv_heads, 2, page_size, dim], contiguous; rounded if the plan
            says so.
        out: [T, heads, dim]; a token's heads are contiguous. Written whole.
        new: the new tokens' rotated keys and their values, [T, kv_heads, dim] each, a token's heads
            contiguous. Needed and read if `plan.dense`; the pool has the same.
        sinks: float32 [heads], the score of one more token of value 0 that each head sees; None:
            there is none.

    Raises:
        ValueError: a shape, dtype or layout is not the plan's, or `new` is missing.
    """
    _check_rows(plan, q, out, new)
    batch = plan.batch
    values, dtype = values_of(pool), E4M3 if plan.rounded else batch.dtype
    if values.shape[1:] != (batch.kv_heads, 2, batch.page_size, batch.dim):
        raise ValueError(f"pool is {list(values.shape)}, not [pages, kv_heads, 2, page_size, dim]")
    if not values.is_contiguous():
        raise ValueError("pool must be contiguous")
    if values.dtype != dtype or isinstance(pool, RoundedPool) != plan.rounded:
        raise ValueError(f"pool is {values.dtype}, not {dtype}")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (batch.heads,)):
        raise ValueError(f"sinks must be float32 [{batch.heads}]")
    plan._program.run(q, pool, out, new, sinks)


def _check_rows(plan: PrefillPlan, q: Tensor, out: Tensor, new: NewKV | None) -> None:
    """Refuse queries, output or new keys and values that are not the plan's."""
    batch = plan.batch
    named = [("q", q, batch.heads), ("out", out, batch.heads)]
    if plan.dense and new is None:
        raise ValueError("new is missing: the plan is dense")
    if new is not None:
        named += [("k", new[0], batch.kv_heads), ("v", new[1], batch.kv_heads)]
    for name, tensor, heads in named:
        if tensor.shape != (batch.tokens, heads, batch.dim):
            raise ValueError(f"{name} is {list(tensor.shape)}, not the plan's [T, heads, dim]")
        if tensor.stride()[1:] != (batch.dim, 1) or tensor.dtype != batch.dtype:
            raise ValueError(f"{name}: {batch.dtype} is needed, a token's heads contiguous")


def choose(
    dtype: torch.dtype, dim: int, device: torch.device, window: int | None = None
) -> tuple[Backend, str]:
    """Return the backend for a model's prefill, and the reason.

    Loads FlashInfer's kernel, which may compile it for minutes: call it once before serving.
    """
    problem = fa3.problem(dtype, dim, device)
    if problem is not None:
        return "triton", problem
    if window is not None:
        return "triton", "FA3 is built without sliding windows"
    return "flashinfer", "FA3 on Hopper"


def _choose(batch: AttentionBatch) -> Backend:
    """Return `choose`'s backend, but Triton where FA3's tiles, of one head each, are sparse."""
    best, _ = choose(batch.dtype, batch.dim, batch.workspace.device, batch.window)
    if best == "flashinfer" and fa3.filled(batch) < FILLED:
        return "triton"  # whose tiles the heads of a group share
    return best


def _program(
    batch: AttentionBatch, units: int, backend: Backend, dense: bool, rounded: bool
) -> _Program:
    if units < 1:
        raise ValueError(f"units={units} must be at least 1")
    if dense:
        return fa3.DenseProgram.plan(batch, units)
    if backend == "flashinfer" and rounded:
        return fa3.UnpackingProgram.plan(batch, units)
    if backend == "flashinfer":
        return fa3.FlashInferProgram.plan(batch, units)
    return TritonProgram.plan(batch, units)
