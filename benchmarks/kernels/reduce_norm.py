"""Sum over ranks, residual and norm in one launch: `benchmarks/kernels/reduce_norm.py 2 5120`.

Beside it, as a step computes now: NCCL's or PyTorch's two-shot sum, then the fused norm. On GPUs of
one host; microseconds are medians over graphs of forty, as the first rank has timed them.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from twolane.kernels import fused
from twolane.kernels.collectives.reduce_norm import flag_bytes, reduce_norm
from twolane.kernels.products.dispatch import Case, GpuProducts
from twolane.kernels.runtime.timing import graph_seconds
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.model.matrix import Matrix
from twolane.parallel import nccl
from twolane.parallel.two_shot import TwoShot
from twolane.results.provenance import provenance, save

CALLS, REPLAYS, COLD = 40, 9, 8
EPS = 1e-6
BLOCKS = (8, 16, 32)
SHARE = 32
"""SMs of the smaller share."""


class Rig:
    """One rank's buffers for some rows.

    Args:
        rank: of this process.
        ranks: their number.
        store: where they meet.
        hidden: numbers in a row.
        rows: of the largest sum.
    """

    def __init__(self, rank: int, ranks: int, store: dist.Store, hidden: int, rows: int) -> None:
        self.rank, self.ranks, self.hidden = rank, ranks, hidden
        device = torch.device("cuda", rank)
        self.nccl = nccl.join(rank, ranks, store)
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
        """The one launch."""
        rest = self.residual, self.weight, EPS, self.normal
        reduce_norm(*self._mapped, *rest, blocks=blocks, early=early)

    def norm(self) -> None:
        """The norm behind a sum."""
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

    def chain(
        self, width: int, units: int, stream: torch.cuda.Stream
    ) -> Iterator[tuple[str, float]]:
        """Microseconds of each way between the products that end a block and begin the next.

        Args:
            width: inputs of the first product, and outputs of the second.
            units: SMs of the stream.
            stream: where.
        """
        draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        into = [Matrix.plain(draw(self.hidden, width).mul_(0.01)) for _ in range(COLD)]
        out_of = [Matrix.plain(draw(2 * width, self.hidden).mul_(0.01)) for _ in range(COLD)]
        rows = len(self.partial)
        x, y = draw(rows, width), draw(rows, 2 * width)
        products = GpuProducts(units)
        uses = {Case.of("linear", some[0]): some for some in (into, out_of)}
        with torch.cuda.stream(stream):
            products._tune("steps", uses, [rows], products._candidates)
        for name, between in self._between().items():

            def calls(between: Callable[[], None] = between) -> None:
                for first, second in zip(into, out_of, strict=True):
                    products.linear(x, first, None, self.partial)
                    between()
                    products.linear(self.normal, second, None, y)

            with torch.cuda.stream(stream):
                yield name, round(1e6 * graph_seconds(calls, REPLAYS) / COLD, 2)

    def _between(self) -> dict[str, Callable[[], None]]:
        """What may lie between two products."""
        return {
            "nothing": lambda: None,
            "norm": self.norm,
            "NCCL, norm": partial(self.by, self.nccl.all_reduce),
            "two-shot, norm": partial(self.by, self.two_shot.all_reduce),
            **{f"one launch, {n} blocks": partial(self.fused, n) for n in BLOCKS},
            **{f"one early, {n} blocks": partial(self.fused, n, early=True) for n in BLOCKS},
        }

    def times(self, stream: torch.cuda.Stream) -> Iterator[tuple[str, float]]:
        """Microseconds of each way on this stream."""
        ways: dict[str, Callable[[], None]] = {
            "norm": self.norm,
            "NCCL": partial(self.nccl.all_reduce, self.partial),
            "two-shot": partial(self.two_shot.all_reduce, self.partial),
            "NCCL, norm": partial(self.by, self.nccl.all_reduce),
            "two-shot, norm": partial(self.by, self.two_shot.all_reduce),
            **{f"one launch, {n} blocks": partial(self.fused, n) for n in BLOCKS},
        }
        self.partial.zero_()
        self.residual.zero_()
        torch.cuda.synchronize()
        for name, way in ways.items():
            with torch.cuda.stream(stream):
                yield name, round(1e6 * _seconds(way), 2)


def _seconds(way: Callable[[], None]) -> float:
    def calls() -> None:
        for _ in range(CALLS):
            way()

    return graph_seconds(calls, REPLAYS) / CALLS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("hidden", type=int)
    parser.add_argument("--width", type=int, default=8704, help="of the products around it")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begins, others = not args.port, []
    store = dist.TCPStore("127.0.0.1", args.port, is_master=begins, wait_for_workers=False)
    if begins:
        command = [sys.executable, *sys.argv, "--port", str(store.port), "--rank"]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, args.ranks)]
    torch.cuda.set_device(args.rank)
    torch.zeros(1, device="cuda")
    parts, figures = GreenContexts(args.rank, (SHARE,)), {}

    def note(name: str, value: object) -> None:
        figures[name] = value
        if args.rank == 0:
            print(name, value, flush=True)
            if args.out:
                workload = {"ranks": args.ranks, "hidden": args.hidden, "rows": args.rows}
                save(args.out, provenance(workload), {"figures": figures})

    rig = Rig(args.rank, args.ranks, store, args.hidden, args.rows)
    for blocks in BLOCKS:
        note(f"error of {blocks} blocks", rig.error(blocks))
    for units in (parts.units, SHARE):
        for name, us in rig.times(parts.stream("decode", units)):
            note(f"{name} on {units} SMs, us", us)
    for units in (parts.units, SHARE):
        for name, us in rig.chain(args.width, units, parts.stream("decode", units)):
            note(f"between products: {name} on {units} SMs, us", us)
    for other in others:
        other.wait(20)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
