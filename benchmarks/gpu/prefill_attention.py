"""Prefill attention on every level.

First correctness, against attention in float32: all kernels, over shapes, ragged batches, windows,
page sizes and dtypes, on the whole device and in green contexts. Then TFLOP/s of 8,192 new tokens
and of 1,024 over 32,768 reused ones (32 query heads, 8 KV heads of 128, or `--heads`; bf16, pages
of 32), counting 4 * dim * heads operations for every key that a token sees: `library` is
FlashInfer's FA3 as it plans itself, `planned` the same under our plan, `dense` that on keys outside
the pool, where nothing is reused, and `triton` our kernel. A share is the rate over (SMs / all SMs)
times that on all SMs. FlashInfer is found through PYTHONPATH.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import LEVELS, Partition, Report, partition, seconds

from twolane.kernels.prefill_attention import flashinfer_kernels as fa3
from twolane.kernels.prefill_attention.dispatch import (
    PrefillPlan,
    PrefillWorkspace,
    choose,
    prefill_attention,
)
from twolane.kernels.prefill_attention.triton_kernels import TritonProgram

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WORKLOADS = {"8192 new": [(0, 8192)], "1024 over 32K": [(32768, 1024)]}
OTHERS = {
    "1024 over 4K": [(4096, 1024)],
    "512 over 8K": [(8192, 512)],
    "512 over 4K": [(4096, 512)],
    "256 over 4K": [(4096, 256)],
    "ragged": [(0, 2300), (1000, 700), (6000, 1500), (0, 300), (12000, 40)],
    "2 x 64 over 16K": [(16384, 64), (16384, 64)],
    "96 over 8K": [(8192, 96)],
    "4 x 2048 new": [(0, 2048)] * 4,
    "512 new": [(0, 512)],
}
CASES = [
    # segments, heads, KV heads, dim, page size, dtype, window
    ([(0, 1000)], 32, 8, 128, 32, torch.bfloat16, None),
    (
        [(512, 300), (0, 77), (1000, 1), (40, 600), (3333, 129)],
        32,
        8,
        128,
        32,
        torch.bfloat16,
        None,
    ),
    ([(700, 333), (0, 500)], 12, 4, 64, 16, torch.bfloat16, None),
    ([(700, 333), (0, 500)], 8, 8, 128, 64, torch.bfloat16, None),
    ([(700, 333), (0, 500)], 16, 1, 64, 64, torch.bfloat16, None),
    ([(700, 333), (0, 500)], 8, 2, 128, 32, torch.float16, 256),
    ([(5000, 4), (60, 1)], 32, 8, 128, 32, torch.bfloat16, None),
    ([(300, 200)], 4, 2, 64, 16, torch.float32, None),
    ([(300, 200)], 5, 1, 96, 32, torch.bfloat16, 64),
]
KERNELS = ("planned", "dense", "triton")
Call = Callable[[], None]


class Problem:
    """Random queries, pools with pages in random order, and where the results go."""

    def __init__(
        self,
        segments: Sequence[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        dtype: torch.dtype,
        window: int | None = None,
        copies: int = 1,
    ) -> None:
        self.segments, self.window, self.page_size = list(segments), window, page_size
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        counts = [-(-(r + n) // page_size) for r, n in segments]
        order = torch.randperm(sum(counts)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        rows = sum(n for _, n in segments)
        options = {"dtype": dtype, "device": "cuda"}
        shape = (sum(counts), kv_heads, 2, page_size, dim)
        self.pools = [torch.randn(shape, **options) for _ in range(copies)]
        self.q = [torch.randn((rows, heads, dim), **options) for _ in range(copies)]
        self.out = [torch.empty_like(q) for q in self.q]
        self.new = [self._new(pool) for pool in self.pools]

    def _new(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens' keys and values, as slices of a fused projection."""
        parts = []
        for (reused, new), table in zip(self.segments, self.tables, strict=True):
            kv = pool[table].permute(0, 3, 2, 1, 4).flatten(0, 1)  # [tokens, 2, kv_heads, dim]
            parts.append(kv[reused : reused + new])
        fused = torch.cat(parts).new_empty(len(self.q[0]), self.heads + 2 * self.kv_heads, self.dim)
        fused[:, self.heads :] = torch.cat(parts).flatten(1, 2)
        k, v = fused[:, self.heads :].split(self.kv_heads, 1)
        return k, v

    @property
    def operations(self) -> int:
        """Of causal attention."""
        keys = sum(n * r + n * (n + 1) // 2 for r, n in self.segments)
        return 4 * self.dim * self.heads * keys

    def plan(
        self, units: int, workspace: PrefillWorkspace, backend: str | None, dense: bool = False
    ) -> PrefillPlan:
        """Ours."""
        return PrefillPlan.build(
            self.segments,
            self.tables,
            page_size=self.page_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            dtype=self.dtype,
            units=units,
            workspace=workspace,
            window=self.window,
            backend=backend,
            dense=dense,
        )

    def calls(self, plan: PrefillPlan) -> list[Call]:
        """One for each copy."""
        return [
            lambda i=i: prefill_attention(
                plan, self.q[i], self.pools[i], self.out[i], self.new[i] if plan.dense else None
            )
            for i in range(len(self.q))
        ]

    def reference(self) -> torch.Tensor:
        """In float32, of the first copy."""
        q, pool = self.q[0].float(), self.pools[0].float()
        out, row = torch.empty_like(q), 0
        for (reused, new), table in zip(self.segments, self.tables, strict=True):
            kv = pool[table].permute(2, 1, 0, 3, 4).reshape(2, self.kv_heads, -1, self.dim)
            kv = kv[:, :, : reused + new].repeat_interleave(self.heads // self.kv_heads, 1)
            place = torch.arange(reused, reused + new, device="cuda")[:, None]
            key = torch.arange(reused + new, device="cuda")
            seen = key <= place
            if self.window is not None:
                seen &= key > place - self.window
            score = q[row : row + new].transpose(0, 1) @ kv[0].transpose(1, 2) * self.dim**-0.5
            weight = score.masked_fill_(~seen, -torch.inf).softmax(-1)
            out[row : row + new] = (weight @ kv[1]).transpose(0, 1)
            row += new
        return out


def flashinfer_itself(problem: Problem) -> list[Call]:
    """FlashInfer's kernel under FlashInfer's plan."""
    module, why = fa3._load(problem.dtype, problem.dim)
    if module is None:
        raise RuntimeError(why)
    scratch, lists = (torch.empty(16 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    pinned = torch.empty(lists.shape, dtype=torch.uint8, pin_memory=True)
    new = [n for _, n in problem.segments]
    length = torch.tensor([r + n for r, n in problem.segments], dtype=torch.int32)
    rows = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    used = torch.tensor([0, *map(len, problem.tables)], dtype=torch.int32)
    used = used.cumsum(0, dtype=torch.int32)
    info = module.plan(
        scratch, lists, pinned, rows, used, length, sum(new), len(new), problem.heads,
        problem.kv_heads, problem.page_size, False, problem.dim, problem.dim, True, -1,
    )  # fmt: skip
    torch.cuda.synchronize()
    pages = torch.tensor(
        [page for table in problem.tables for page in table], dtype=torch.int32, device="cuda"
    )
    on_device = (rows.cuda(), used.cuda(), length.cuda())

    def run(i: int) -> None:
        pool = problem.pools[i]
        module.paged_run(
            scratch, lists, info, problem.q[i], pool[:, :, 0], pool[:, :, 1], on_device[0],
            on_device[1], pages, on_device[2], problem.out[i], None, 1, 1, -1, False, None, None,
            None, None, 0.0, problem.dim**-0.5, 1.0, 0,
        )  # fmt: skip

    return [lambda i=i: run(i) for i in range(len(problem.q))]


def check(report: Report, name: str, problem: Problem, call: Call, where: Partition) -> None:
    """Compare a call with float32."""
    problem.out[0].fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(where.stream):
        call()
    torch.cuda.synchronize()
    name = f"{name}, {where.units} SMs"
    report.check(name, problem.out[0], problem.reference(), TOLERANCE[problem.dtype])


def planned(
    problem: Problem, kernel: str, units: int, workspace: PrefillWorkspace
) -> PrefillPlan | None:
    """Our plan for `planned`, `dense` or `triton`; None where the kernel cannot do it."""
    best, _ = choose(problem.dtype, problem.dim, workspace.device, problem.window)
    if kernel != "triton" and best != "flashinfer":
        return None
    backend = "triton" if kernel == "triton" else "flashinfer"
    plan = problem.plan(units, workspace, backend, kernel == "dense")
    return None if kernel == "dense" and not plan.dense else plan


def correctness(report: Report, parts: Sequence[Partition]) -> None:
    """Every case on every kernel that can do it, each in another part of the device."""
    workspace = PrefillWorkspace("cuda")
    for index, (segments, *shape) in enumerate(CASES):
        problem = Problem(segments, *shape)
        for place, kernel in enumerate(KERNELS):
            where = parts[(index + place) % len(parts)]
            name = f"{kernel} {segments} {' '.join(map(str, shape))}"
            with report.attempt(name), torch.cuda.stream(where.stream):
                plan = planned(problem, kernel, where.units, workspace)
                if plan is not None:
                    check(report, name, problem, problem.calls(plan)[0], where)
    splits(report, workspace, parts)


def splits(report: Report, workspace: PrefillWorkspace, parts: Sequence[Partition]) -> None:
    """Batches whose tiles are split, under both kernels; FA3 with heads of 64, too."""
    for dim, segments in ((128, [(9000, 600), (0, 77)]), (64, [(9001, 200), (7000, 130)])):
        problem = Problem(segments, 8, 2, dim, 32, torch.bfloat16)
        for kernel in ("planned", "triton"):
            for where in parts:
                name = f"{kernel} split {segments} {dim}"
                with report.attempt(name), torch.cuda.stream(where.stream):
                    plan = planned(problem, kernel, where.units, workspace)
                    if plan is not None:
                        name += f": {split_tiles(plan)} tiles"
                        check(report, name, problem, problem.calls(plan)[0], where)


def split_tiles(plan: PrefillPlan) -> int:
    """How many tiles a plan splits."""
    program = plan._program
    if isinstance(program, fa3.FlashInferProgram):
        return program.fronts.merge.count if program.fronts else 0
    return program.merge.count if isinstance(program, TritonProgram) else 0


def rate(problem: Problem, calls: Sequence[Call], where: Partition, repeats: int) -> float:
    """TFLOP/s."""
    return problem.operations / seconds(calls, where.stream, repeats) / 1e12


def rates(
    report: Report, problem: Problem, name: str, where: Partition, repeats: int
) -> dict[str, float]:
    """TFLOP/s of every kernel that can do it."""
    workspace, row = PrefillWorkspace("cuda"), {}
    for kernel in ("library", *KERNELS):
        with report.attempt(f"{kernel} {name} {where.units}"):
            with torch.cuda.stream(where.stream):
                if kernel == "library":
                    calls = flashinfer_itself(problem)
                else:
                    plan = planned(problem, kernel, where.units, workspace)
                    calls = [] if plan is None else problem.calls(plan)
            if calls:
                row[kernel] = rate(problem, calls, where, repeats)
    return row


def levels(report: Report, parts: Sequence[Partition], repeats: int, heads: Sequence[int]) -> None:
    """The table: levels down, workloads and kernels across; then what it is about."""
    total = torch.cuda.get_device_properties(0).multi_processor_count
    for name, segments in WORKLOADS.items():
        problem = Problem(segments, *heads, 128, 32, torch.bfloat16, copies=2)
        whole: dict[str, float] = {}
        worst: dict[str, float] = {}
        for where in sorted(parts, key=lambda part: -part.units):
            row = rates(report, problem, name, where, repeats)
            whole = whole or row
            shares = {k: v / (whole[k] * where.units / total) for k, v in row.items() if k in whole}
            worst = {k: min(v, worst.get(k, v)) for k, v in shares.items()}
            named = {f"{kernel}_share": share for kernel, share in shares.items()}
            report.add(workload=name, units=where.units, **row, **named)
        for kernel in KERNELS:
            if kernel in worst and "library" in whole:
                versus = whole[kernel] / whole["library"]
                report.add(figure=f"{name}, {kernel}", share=worst[kernel], of_library=versus)


def others(report: Report, parts: Sequence[Partition], repeats: int, heads: Sequence[int]) -> None:
    """Other batches, on some levels, and which kernel is chosen."""
    for name, segments in OTHERS.items():
        problem = Problem(segments, *heads, 128, 32, torch.bfloat16, copies=3)
        for where in parts:
            row = rates(report, problem, name, where, repeats)
            with torch.cuda.stream(where.stream):
                plan = problem.plan(where.units, PrefillWorkspace("cuda"), None, True)
            chosen = f"{plan.backend}{' dense' if plan.dense else ''}"
            report.add(
                workload=name, units=where.units, **row, split=split_tiles(plan), chosen=chosen
            )


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("--repeats", type=int, default=7)
    add("--heads", type=int, nargs=2, default=(32, 8), help="query heads and KV heads of a rank")


def main(report: Report, given: argparse.Namespace) -> None:
    """Check, then measure."""
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = [partition(units) for units in LEVELS]
    some = [part for part in parts if part.units in (24, 84, 132)]
    report.add(flashinfer=fa3._load(torch.bfloat16, 128)[1] or "loaded")
    with report.attempt("correctness"):
        correctness(report, some)
    with report.attempt("levels"):
        levels(report, parts, given.repeats, given.heads)
    with report.attempt("others"):
        others(report, some, given.repeats, given.heads)
