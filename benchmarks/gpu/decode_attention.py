"""Decode attention on shares of the SMs: first whether it is right, then bytes of KV per second.

The ceiling is a kernel that only reads, with many independent 16-byte loads in flight, the same
pages in the same random order.
"""

import argparse
import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness import LEVELS, Partition, Report, capture, partition, seconds

from twolane.kernels.decode_attention import cuda_kernels as hopper
from twolane.kernels.decode_attention import triton_kernels as portable
from twolane.kernels.decode_attention.dispatch import decode_scratch
from twolane.kernels.decode_attention.row_scores import RowScores
from twolane.kernels.pool import E4M3, Pool, RoundedPool, values_of
from twolane.kernels.runtime import nvrtc

WATCHDOG = ("-DWATCHDOG=20000000",)
EVERYTHING = 1 << 30
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}

READ = """
#define INSIDE(q) (512 * (q) + 16 * lane)  // 512 bytes in a row
#define PLACE(q) ((q) / 16 * 8192 + INSIDE((q) % 16))
struct Arguments { const char* pool; unsigned* sink; unsigned first, count, mask; };
struct alignas(16) Words { unsigned w[4]; };
extern "C" __global__ void __launch_bounds__(THREADS, 1) read(const __grid_constant__ Arguments a) {
    unsigned warps = gridDim.x * (THREADS / 32), lane = threadIdx.x % 32, x = 0;
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (unsigned i = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; i < a.count; i += warps) {
        unsigned long long page = ((a.first + i) * 2654435761u) & a.mask;
        const char* at = a.pool + page * 16384;
        for (int j = 0; j < 16384 / 512; j += UNROLL) {
            Words v[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k)
                asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32"
                             " {%0, %1, %2, %3}, [%4], %5;"
                             : "=r"(v[k].w[0]), "=r"(v[k].w[1]), "=r"(v[k].w[2]), "=r"(v[k].w[3])
                             : "l"(at + PLACE(j + k)), "l"(policy));
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) x ^= v[k].w[0] ^ v[k].w[1] ^ v[k].w[2] ^ v[k].w[3];
        }
    }
    if (x == 0x12345678) *a.sink = x;
}
"""


class _ReadArguments(ctypes.Structure):
    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("first", "count", "mask")),
    )


@dataclass(frozen=True)
class Problem:
    """One layer's cache with sequences of given lengths, and queries."""

    q: torch.Tensor
    pool: Pool
    tables: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    tokens: int

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        kv_heads: int = 8,
        group: int = 4,
        dim: int = 128,
        page: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        pool: torch.Tensor | None = None,
    ) -> "Problem":
        """`pool`: flat memory to cut the pages from; None: new, NaN where no sequence wrote."""
        rows, used = len(lengths), [-(-n // page) for n in lengths]
        shape = (sum(used) + 1, kv_heads, 2, page, dim)
        order = torch.randperm(shape[0], device="cuda", dtype=torch.int32)
        tables = torch.full((rows + 1, max(*used, 1)), EVERYTHING, dtype=torch.int32, device="cuda")
        slots = torch.randperm(rows + 1, device="cuda", dtype=torch.int32)[:rows]
        if fresh := pool is None:
            pages = torch.randn(shape, device="cuda", dtype=dtype)
        else:
            pages = pool[: torch.Size(shape).numel()].view(shape)
        taken = 0
        for slot, count, n in zip(slots.tolist(), used, lengths, strict=True):
            tables[slot, :count] = order[taken : taken + count]
            taken += count
            if fresh and n % page:
                pages[order[taken - 1], :, :, n % page :] = torch.nan
        q = torch.randn(rows, kv_heads * group, dim, device="cuda", dtype=dtype)
        length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        return cls(q, pages, tables, slots, length, sum(lengths))

    @property
    def bytes(self) -> int:
        """Of keys, values and their exponents that must be read."""
        values = values_of(self.pool)
        _, kv_heads, _, _, dim = values.shape
        powers = int(isinstance(self.pool, RoundedPool))
        return self.tokens * 2 * kv_heads * (dim * values.element_size() + powers)

    def reference(self, window: int | None = None) -> torch.Tensor:
        """float32; rows of length 0 are 7."""
        (_, heads, dim), (_, kv_heads, _, page, _) = self.q.shape, self.pool.shape
        out = torch.full(self.q.shape, 7.0, device="cuda")
        for row, n in enumerate(self.lengths.tolist()):
            if n == 0:
                continue
            pages = self.tables[int(self.slots[row]), : -(-n // page)].long()
            kv = self.pool[pages].float().permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, dim)
            k, v = kv[:, :, max(0, n - (window or n)) : n]
            q = self.q[row].float().view(kv_heads, -1, dim)
            weights = (torch.einsum("khd,knd->khn", q, k) * dim**-0.5).softmax(-1)
            out[row] = torch.einsum("khn,knd->khd", weights, v).reshape(heads, dim)
        return out

    def cuda(
        self, units: int, extra: tuple[str, ...] = (), window: int | None = None
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """A call of the CUDA kernel with a scratch of its own, and what it writes to."""
        scratch, out = decode_scratch(*self.q.shape, units, "cuda"), torch.full_like(self.q, 7.0)
        arguments = self.q, self.pool, self.tables, self.slots, self.lengths, out, scratch.partial
        settings = {
            "units": units,
            "scores": RowScores(window or EVERYTHING, self.q.shape[2] ** -0.5, None),
            "tuned": hopper.tuning(units),
            "extra": extra,
        }
        return lambda: hopper.attend(*arguments, scratch.cuts, **settings), out

    def triton(
        self, units: int, window: int | None = None
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """A call of the Triton kernel with a scratch of its own, and what it writes to."""
        scratch, out = decode_scratch(*self.q.shape, units, "cuda"), torch.full_like(self.q, 7.0)
        arguments = self.q, self.pool, self.tables, self.slots, self.lengths, out, scratch.partial
        tile = self.pool[0, 0].numel() * self.pool.element_size()
        settings = {
            "units": units,
            "scores": RowScores(window or EVERYTHING, self.q.shape[2] ** -0.5, None),
            "tuned": portable.tuning(tile),
        }
        return lambda: portable.attend(*arguments, scratch.sums, **settings), out


def ragged(rows: int, low: int, high: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randint(low, high) for _ in range(rows)]


MIXED = [0, 1, 5000, 31, 32, 33, 0, 700, 64, 2049, 15, 16, 17, 129]
CASES: list[dict] = [
    *({"group": group} for group in (1, 2, 3, 4, 5, 7, 8, 9, 16)),
    *({"dim": 64, "group": group, "kv_heads": 3} for group in (1, 3, 8, 16)),
    *({"page": page, "dim": dim} for page in (16, 64) for dim in (64, 128)),
    *({"dtype": torch.float16, "dim": dim, "group": 7} for dim in (64, 128)),
    *({"window": window} for window in (1, 100, 1024)),
    {"window": 100, "page": 16, "dim": 64},
]


def check(report: Report, lane: Partition) -> None:
    """Every case with few and with many workers, again in a graph, again on other SMs."""
    for case in CASES:
        case = dict(case)
        window = case.pop("window", None)
        with report.attempt(f"cuda {case} window={window}"):
            problem = Problem.make(MIXED, **case)
            expected = problem.reference(window)
            for units in (3, lane.units, 132):
                name = f"cuda {case} window={window} {units}"
                call, out = problem.cuda(units, extra=WATCHDOG, window=window)
                call()
                first = out.clone()
                report.check(name, first, expected, TOLERANCE[out.dtype])
                graph = capture([call], lane.stream)
                same = not (first[problem.lengths == 0] != 7).any()
                for _ in range(20):
                    graph.replay()
                    same &= torch.equal(out, first)
                report.failures += not same
                if not same:
                    report.add(wrong=name, repeated="differs, or padding rows were written")
    for case in ({}, {"dtype": torch.float32, "group": 3}, {"dim": 64, "page": 64}):
        with report.attempt(f"triton {case}"):
            problem = Problem.make(MIXED, **case)
            call, out = problem.triton(24, window=300)
            capture([call], lane.stream).replay()
            report.check(f"triton {case}", out, problem.reference(300), TOLERANCE[out.dtype])


SHAPES = {
    "64x2K": ([2048] * 64, 4),
    "ragged": (ragged(64, 200, 8000), 2),
    "1x32K": ([32768], 16),
    "256x512": ([512] * 256, 4),
}


def layers(name: str, memory: torch.Tensor, **shape: int) -> list[Problem]:
    """As many layers of a shape as exceed the L2 cache many times."""
    lengths, count = SHAPES[name]
    size = memory.numel() // count
    return [
        Problem.make(lengths, pool=memory[i * size : (i + 1) * size], **shape) for i in range(count)
    ]


def rounded_layers(name: str) -> list[Problem]:
    """The same with pools in e4m3, whose numbers are as large as those of other pools."""

    def thin(shape: torch.Size) -> RoundedPool:
        values = torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(50).to(E4M3)
        exponents = torch.full(shape[:-1], -6, dtype=torch.int8, device="cuda")
        return RoundedPool(values, exponents)

    lengths, count = SHAPES[name]
    size = 2 * 8 * 128 * (sum(lengths) + 32 * len(lengths) + 32)
    empty = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    problems = [Problem.make(lengths, pool=empty) for _ in range(count)]
    return [replace(each, pool=thin(values_of(each.pool).shape)) for each in problems]


Make = Callable[[Problem, int], tuple[Callable[[], None], torch.Tensor]]


def rate(problems: Sequence[Problem], lane: Partition, make: Make) -> float:
    """TB/s of KV."""
    calls = [make(p, lane.units)[0] for p in problems]
    return problems[0].bytes / seconds(calls, lane.stream, 7) / 1e12


def read_rate(memory: torch.Tensor, lane: Partition, threads: int, unroll: int) -> float:
    """TB/s of a kernel that reads 537 MB in 16 KB pages in random order."""
    kernel = nvrtc.load(READ, (f"-DTHREADS={threads}", f"-DUNROLL={unroll}"), "read", 0, 0)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    pages = 1 << ((memory.numel() * memory.element_size() // 16384).bit_length() - 1)
    count = pages // 8

    def call(first: int) -> Callable[[], None]:
        arguments = _ReadArguments(memory.data_ptr(), sink.data_ptr(), first, count, pages - 1)
        return lambda: kernel.launch(lane.units, threads, 0, arguments)

    calls = [call(i * count) for i in range(8)]
    return count * 16384 / seconds(calls, lane.stream, 7) / 1e12


def speed(report: Report, memory: torch.Tensor, lanes: Sequence[Partition]) -> None:
    for name in SHAPES:
        problems, thin = layers(name, memory), rounded_layers(name)
        for lane in lanes:
            with report.attempt(f"{name} {lane.units}"):
                row: dict = {"shape": name, "units": lane.units}
                if name == "64x2K":
                    row["read"] = max(
                        read_rate(memory, lane, *v) for v in ((1024, 8), (512, 16), (1024, 16))
                    )
                row["cuda"] = rate(problems, lane, Problem.cuda)
                row["e4m3"] = rate(thin, lane, Problem.cuda)
                if name == "64x2K" or lane.units in (24, 132):
                    row["triton"] = rate(problems, lane, Problem.triton)
                if "read" in row:
                    row["share"] = row["cuda"] / row["read"]
                    row["e4m3_share"] = row["e4m3"] / row["read"]
                report.add(**row)


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("--no-check", action="store_true", help="only speed")


def main(report: Report, given: argparse.Namespace) -> None:
    """Check, then measure."""
    lanes = []
    for units in LEVELS:
        with report.attempt(f"partition {units}"):
            lanes.append(partition(units))
    if not given.no_check:
        with report.attempt("check"):
            check(report, next(lane for lane in lanes if lane.units == 24))
    memory = torch.empty((1 << 31) + (1 << 24), dtype=torch.bfloat16, device="cuda").normal_()
    speed(report, memory, lanes)
