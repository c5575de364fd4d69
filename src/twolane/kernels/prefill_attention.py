"""Attention of a prefill batch over paged KV with reused prefixes, planned for its lane's SMs.

    plan = PrefillPlan.build(segments, tables, page_size=32, heads=32, kv_heads=8, dim=128,
                             dtype=torch.bfloat16, units=64, workspace=workspace)
    for pool in layers:
        prefill_attention(plan, q, pool, out)
    plan = plan.at(100)  # the lane changed its level between two slices

Libraries deal the tiles of a batch to all SMs of the device; in a lane with half of them, a third
round runs almost empty. A plan deals them to the lane's `units` (`prefill_attention_schedule.py`).
Two kernels take such plans: FlashInfer's FA3, whose work lists we write in its place
(`prefill_attention_flashinfer.py`), and our own in Triton, which runs everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from twolane.kernels import prefill_attention_flashinfer as fa3
from twolane.kernels.prefill_attention_batch import PrefillBatch, PrefillWorkspace
from twolane.kernels.prefill_attention_triton import TritonProgram

__all__ = ["Backend", "PrefillPlan", "PrefillWorkspace", "choose", "prefill_attention"]

Backend = Literal["flashinfer", "triton"]


class _Program(Protocol):
    def run(self, q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class PrefillPlan:
    """A batch's attention, laid out for `units` SMs and ready to be launched for each layer.

    Its work lists are uploaded on the stream that is current when it is built: run it on that
    stream, or on one that waits for it, and keep it until its launches have ended.
    """

    batch: PrefillBatch
    units: int
    backend: Backend
    why: str
    """Why this backend."""
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
    ) -> "PrefillPlan":
        """Plan a batch: host work and two uploads, no synchronisation.

        Args:
            segments: (reused, new) tokens of each sequence, in the order of the rows.
            tables: physical pages that cover each sequence's [0, reused + new), in order.
            page_size: tokens a page: 16, 32 or 64.
            heads: query heads; `kv_heads` divides them, into groups of at most 16.
            dim: of a head.
            dtype: of queries, pool and output.
            units: SMs of the lane.
            workspace: the lane's.
            window: tokens seen by each token, itself included; None: all.
            backend: None: the best there is.

        Raises:
            ValueError: an argument is out of range, or the backend cannot do it.
        """
        shape = (page_size, heads, kv_heads, dim, dtype, window)
        batch = PrefillBatch.build(segments, tables, *shape, workspace)
        best, why = choose(batch)
        if backend is not None and backend != best:
            problem = fa3.problem(batch)
            if backend == "flashinfer" and problem is not None:
                raise ValueError(f"backend='flashinfer': {problem}")
            best, why = backend, "asked for"
        return cls(batch, units, best, why, _program(batch, units, best))

    def at(self, units: int) -> "PrefillPlan":
        """The same batch on another number of SMs: host work and one upload."""
        return replace(self, units=units, _program=_program(self.batch, units, self.backend))


def prefill_attention(
    plan: PrefillPlan, q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor
) -> None:
    """Causal attention of a batch's new tokens, whose keys and values are in the pool already.

    Launches on the current stream.

    Args:
        plan: of this batch.
        q: rotated queries [T, heads, dim]; a token's heads are contiguous.
        pool: one layer's KV [pages, kv_heads, 2, page_size, dim], contiguous.
        out: [T, heads, dim]; a token's heads are contiguous. Written whole.

    Raises:
        ValueError: a shape, dtype or layout is not the plan's.
    """
    batch = plan.batch
    for name, tensor in (("q", q), ("out", out)):
        if tensor.shape != (batch.tokens, batch.heads, batch.dim):
            raise ValueError(f"{name} is {list(tensor.shape)}, not the plan's [T, heads, dim]")
        if tensor.stride()[1:] != (batch.dim, 1):
            raise ValueError(f"{name}: a token's heads must be contiguous")
    if pool.shape[1:] != (batch.kv_heads, 2, batch.page_size, batch.dim):
        raise ValueError(f"pool is {list(pool.shape)}, not [pages, kv_heads, 2, page_size, dim]")
    if not pool.is_contiguous():
        raise ValueError("pool must be contiguous")
    if not q.dtype == pool.dtype == out.dtype == batch.dtype:
        raise ValueError(f"q, pool and out must be {batch.dtype}")
    plan._program.run(q, pool, out)


def choose(batch: PrefillBatch) -> tuple[Backend, str]:
    """The backend for a batch, and why."""
    problem = fa3.problem(batch)
    if problem is not None:
        return "triton", problem
    if int(batch.segments.new.max()) * batch.group <= fa3.tile_tokens(batch.dim):
        return "triton", "few new tokens: here the heads of a group share a tile"
    return "flashinfer", "FA3 on Hopper"


def _program(batch: PrefillBatch, units: int, backend: Backend) -> _Program:
    if units < 1:
        raise ValueError(f"units={units} must be at least 1")
    if backend == "flashinfer":
        return fa3.FlashInferProgram.plan(batch, units)
    return TritonProgram.plan(batch, units)
