"""Sums over the GPUs of one host: NCCL by rows and SMs, and with the norm that follows.

The norm follows NCCL's or PyTorch's two-shot sum as a kernel of its own, or is in one launch with
the sum. One process a GPU; microseconds are medians over graphs of forty, as the first rank has
timed them.
"""

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Report
from torch import Tensor
from torch import distributed as dist

from twolane.kernels import fused
from twolane.kernels.collectives.reduce_norm import flag_bytes, reduce_norm
from twolane.kernels.runtime.timing import graph_seconds
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.parallel import nccl
from twolane.parallel.two_shot import TwoShot

CALLS, REPLAYS = 40, 9
EPS = 1e-6
BLOCKS = (8, 16, 32)
SHARES = (32, 48)
"""SMs of the smaller shares."""
ROWS = (16, 64, 128, 256, 320, 512, 1024, 2048, 8192)
"""Rows of NCCL's sums."""
MANY = 512
"""Rows above which a graph has fewer calls."""


class Rig:
    """One rank's buffers for some rows.

    Args:
        rank: The rank of this process.
        ranks: The number of ranks.
        channel: The NCCL communicator of all ranks.
        store: The store through which ranks meet.
        hidden: The number of elements in a row.
        rows: The number of rows.
    """

    def __init__(
        self, rank: int, ranks: int, channel: Any, store: dist.Store, hidden: int, rows: int
    ) -> None:
        self.rank, self.ranks, self.hidden = rank, ranks, hidden
        device = torch.device("cuda", rank)
        self.nccl = channel
        here = dist.PrefixStore("two-shot", store)
        self.two_shot = TwoShot(self.nccl, here, ("joined",), flag_bytes(ranks))
        self.partial = self.two_shot.buffer(rows, hidden, torch.bfloat16, device)
        self.two_shot.choose([rows], lambda *_: 0.0)
        self.residual = torch.zeros(rows, hidden, device=device, dtype=torch.bfloat16)
        self.normal = torch.zeros_like(self.residual)
        self.weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        mapped = self.two_shot.mapped(self.partial)
        assert mapped is not None
        self._mapped = mapped

    def fused(self, blocks: int, *, early: bool = False) -> None:
        """Sum and norm in one launch."""
        rest = self.residual, self.weight, EPS, self.normal
        reduce_norm(*self._mapped, *rest, blocks=blocks, early=early)

    def norm(self) -> None:
        """The norm after a sum."""
        fused.add_rms_norm(self.partial, self.residual, self.weight, EPS, self.normal)

    def by(self, sum_up: Callable[[Tensor], None]) -> None:
        """A sum, then the norm."""
        sum_up(self.partial)
        self.norm()

    def error(self, blocks: int) -> float:
        """Largest difference of a normalised row of random ones to float32's, relative to it."""
        parts = []
        for rank in range(self.ranks):
            draw = torch.Generator("cuda").manual_seed(rank)
            parts.append(torch.randn(self.partial.shape, generator=draw, device="cuda").bfloat16())
        draw = torch.Generator("cuda").manual_seed(99)
        residual = torch.randn(self.partial.shape, generator=draw, device="cuda").bfloat16()
        self.residual.copy_(residual)
        self.partial.copy_(parts[self.rank])
        self.normal.fill_(float("nan"))
        torch.cuda.synchronize()
        self.fused(blocks)
        total = sum(part.float() for part in parts) + residual.float()
        right = total * (total.square().mean(1, keepdim=True) + EPS).rsqrt()
        torch.cuda.synchronize()
        return float(((self.normal.float() - right).norm(dim=1) / right.norm(dim=1)).max())

    def ways(self) -> dict[str, Callable[[], None]]:
        """Return what is timed."""
        self.partial.zero_()
        self.residual.zero_()
        return {
            "norm": self.norm,
            "two-shot": partial(self.two_shot.all_reduce, self.partial),
            "NCCL, norm": partial(self.by, self.nccl.all_reduce),
            "two-shot, norm": partial(self.by, self.two_shot.all_reduce),
            **{f"one launch, {n} blocks": partial(self.fused, n) for n in BLOCKS},
        }


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("ranks", type=int)
    add("hidden", type=int, help="elements of a row")
    add("--rows", type=int, default=64, help="of sums with a norm")
    add("--rank", type=int, default=0, help=argparse.SUPPRESS)
    add("--port", type=int, default=0, help=argparse.SUPPRESS)


def seconds(way: Callable[[], None], calls: int, stream: torch.cuda.Stream) -> float:
    """Return the median seconds of a sum, in a graph of so many."""

    def run() -> None:
        for _ in range(calls):
            way()

    with torch.cuda.stream(stream):
        return graph_seconds(run, REPLAYS) / calls


def times(given: argparse.Namespace, store: dist.Store) -> Iterator[dict[str, Any]]:
    """Yield the rows of the report, on every rank."""
    parts = GreenContexts(given.rank, SHARES)
    channel = nccl.join(given.rank, given.ranks, store)
    for rows, units in itertools.product(ROWS, (parts.units, *SHARES)):
        x = torch.randn(rows, given.hidden, device="cuda", dtype=torch.bfloat16)
        x.zero_()  # sums of sums of other numbers would overflow
        calls = CALLS if rows <= MANY else CALLS // 5
        took = seconds(partial(channel.all_reduce, x), calls, parts.stream("decode", units))
        yield {"way": "NCCL", "rows": rows, "units": units, "us": took * 1e6}
    rig = Rig(given.rank, given.ranks, channel, store, given.hidden, given.rows)
    for blocks in BLOCKS:
        yield {"check": f"{blocks} blocks", "rows": given.rows, "error": rig.error(blocks)}
    for units in (parts.units, *SHARES):
        stream = parts.stream("decode", units)
        for name, way in rig.ways().items():
            torch.cuda.synchronize()
            took = seconds(way, CALLS, stream)
            yield {"way": name, "rows": given.rows, "units": units, "us": took * 1e6}


def main(report: Report, given: argparse.Namespace) -> None:
    """Start a process for each other GPU, and measure on all."""
    store = dist.TCPStore("127.0.0.1", given.port, is_master=not given.rank, wait_for_workers=False)
    others = []
    if not given.rank:
        words = [str(Path(__file__).parent), "all-reduce", str(given.ranks), str(given.hidden)]
        words += ["--rows", str(given.rows), "--port", str(store.port), "--rank"]
        command, rest = [sys.executable, *words], range(1, given.ranks)
        own = {name: value for name, value in os.environ.items() if name != "OUT"}
        others = [subprocess.Popen([*command, str(rank)], env=own) for rank in rest]
    torch.cuda.set_device(given.rank)
    torch.zeros(1, device="cuda")
    for row in times(given, store):
        if not given.rank:
            report.add(**row)
    for other in others:
        other.wait(20)
    sys.stdout.flush()
    os._exit(0)
