"""A prefill pass in two halves: `python benchmarks/kernels/halves.py llama-3.1-70b 4 [--out FILE]`.

Products, norms and sums of a few layers on several GPUs, without attention: one half is summed on a
stream of its own while the other computes. The products of halves may leave some SMs to the sums
(cuBLASLt is told how many); `NCCL_MAX_CTAS` bounds the blocks of these. Milliseconds a layer are
medians, as the first rank has timed them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from twolane.kernels import fused
from twolane.kernels.products.dispatch import cublaslt
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.model.load.hub import resolve
from twolane.parallel import nccl
from twolane.results.provenance import provenance, save
from twolane.sim.operators import shapes_of

LAYERS, REPEATS = 4, 9
SHARES = (48,)
"""SMs of the decode lane, for the smaller shares of prefill."""


class Layers:
    """Some layers of one rank.

    Args:
        name: of the model.
        rank: of this process.
        ranks: their number.
        most: rows of the largest pass.
        folder: where ranks meet.
    """

    def __init__(self, name: str, rank: int, ranks: int, most: int, folder: Path) -> None:
        torch.cuda.set_device(rank)
        self.channel = nccl.join(rank, ranks, dist.FileStore(str(folder / "ids"), ranks))
        self.parts = GreenContexts(rank, SHARES)
        shapes = shapes_of(resolve(name, "dummy").spec(), ranks)
        torch.manual_seed(1)
        self.weights = [
            [self._matrix(int(n), int(k)) for k, n in shapes.products] for _ in range(LAYERS)
        ]
        self.norm = torch.ones(shapes.hidden, device="cuda", dtype=torch.bfloat16)
        self.residual, self.partial, self.x = (
            torch.randn(most, shapes.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        (_, qkv), (q, _), (_, wide), (inner, _) = (map(int, pair) for pair in shapes.products)
        rooms = {"qkv": qkv, "q": q, "wide": wide, "act": inner}
        self.room = {
            name: torch.randn(most, width, device="cuda", dtype=torch.bfloat16)
            for name, width in rooms.items()
        }
        self.events = [torch.cuda.Event() for _ in range(4)]

    def _matrix(self, n: int, k: int) -> Tensor:
        return torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(0.3 * k**-0.5)

    def into_attention(self, layer: int, rows: slice) -> None:
        """Norm behind what was summed, and queries, keys and values."""
        x = self.x[: rows.stop - rows.start]
        fused.add_rms_norm(self.partial[rows], self.residual[rows], self.norm, 1e-6, x)
        torch.mm(x, self.weights[layer][0].t(), out=self.room["qkv"][rows])

    def out_of_attention(self, layer: int, rows: slice) -> None:
        """The partial products that end attention."""
        torch.mm(self.room["q"][rows], self.weights[layer][1].t(), out=self.partial[rows])

    def mlp(self, layer: int, rows: slice) -> None:
        """Norm behind what was summed, and the MLP."""
        count = rows.stop - rows.start
        x, wide, act = self.x[:count], self.room["wide"][:count], self.room["act"][:count]
        fused.add_rms_norm(self.partial[rows], self.residual[rows], self.norm, 1e-6, x)
        torch.mm(x, self.weights[layer][2].t(), out=wide)
        fused.silu_mul(wide, act)
        torch.mm(act, self.weights[layer][3].t(), out=self.partial[rows])

    def whole(self, count: int, *, sums: bool = True) -> None:
        """All rows one block after the other."""
        rows = slice(0, count)
        for layer in range(LAYERS):
            self.into_attention(layer, rows)
            for block in (self.out_of_attention, self.mlp):
                block(layer, rows)
                if sums:
                    self.channel.all_reduce(self.partial[rows])

    def halves(self, count: int, side: torch.cuda.Stream) -> None:
        """One half is summed on `side` while the other computes."""
        main, cut = torch.cuda.current_stream(), count // 256 * 128
        parts = slice(0, cut), slice(cut, count)
        begun, ended = self.events[:2], self.events[2:]
        for event in ended:
            event.record(main)
        for layer in range(LAYERS):
            for block in (self.into_attention, self.out_of_attention, self.mlp):
                for rows, begin, end in zip(parts, begun, ended, strict=True):
                    if block != self.out_of_attention:
                        main.wait_event(end)
                    block(layer, rows)
                    if block == self.into_attention:
                        continue
                    begin.record(main)
                    side.wait_event(begin)
                    with torch.cuda.stream(side):
                        self.channel.all_reduce(self.partial[rows])
                        end.record(side)
        for event in ended:
            main.wait_event(event)

    def seconds(self, run: Callable[[], None], stream: torch.cuda.Stream) -> float:
        """Median seconds of a layer."""
        samples = []
        with torch.cuda.stream(stream):
            for turn in range(REPEATS + 2):
                self.residual.normal_()
                self.partial.normal_()
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                run()
                b.record()
                b.synchronize()
                if turn >= 2:
                    samples.append(a.elapsed_time(b) * 1e-3 / LAYERS)
        return statistics.median(samples)

    def agree(self, count: int, stream: torch.cuda.Stream, side: torch.cuda.Stream) -> float:
        """Largest relative difference of a row between the two ways."""
        results = []
        with torch.cuda.stream(stream):
            for run in (lambda: self.whole(count), lambda: self.halves(count, side)):
                torch.manual_seed(7)
                self.residual.normal_()
                self.partial.normal_().mul_(0.1)
                self.room["q"].normal_()
                run()
                results.append(self.residual[:count].float() + self.partial[:count].float())
            stream.synchronize()
        a, b = results
        return float(((a - b).norm(dim=1) / a.norm(dim=1)).max())


def measure(layers: Layers, counts: list[int], left: list[int], note: Callable[..., None]) -> None:
    """Time all ways, for each number of rows and each share."""
    parts = layers.parts
    for units in (parts.units, parts.levels[0][0]):
        stream, side = parts.stream("prefill", units), parts.capture_stream("decode", units)
        for count in counts:
            found = {"apart": layers.agree(count, stream, side)}
            found["whole"] = layers.seconds(lambda n=count: layers.whole(n), stream)
            found["unsummed"] = layers.seconds(lambda n=count: layers.whole(n, sums=False), stream)
            found["halves"] = layers.seconds(lambda n=count, s=side: layers.halves(n, s), stream)
            for less in left:
                with cublaslt(units - less):
                    took = layers.seconds(lambda n=count, s=side: layers.halves(n, s), stream)
                found[f"halves, {less} SMs left"] = took
            with cublaslt(units):
                found["whole, told"] = layers.seconds(lambda n=count: layers.whole(n), stream)
            ms = {k: round(v if k == "apart" else 1e3 * v, 4) for k, v in found.items()}
            note(f"{count} rows on {units} SMs", ms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--rows", type=int, nargs="+", default=[2304, 4096, 8192])
    parser.add_argument("--left", type=int, nargs="+", default=[0, 8, 16, 24])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder, others = args.folder, []
    if folder is None:
        folder = Path(tempfile.mkdtemp())
        command = [sys.executable, *sys.argv, "--folder", str(folder), "--rank"]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, args.ranks)]
    figures: dict[str, object] = {"nccl_max_ctas": os.environ.get("NCCL_MAX_CTAS")}
    workload = {"model": args.model, "ranks": args.ranks, "layers": LAYERS}

    def note(name: str, ms: dict[str, float]) -> None:
        figures[name] = ms
        if args.rank == 0:
            print(name, ms, flush=True)
            if args.out:
                save(args.out, provenance(workload), {"figures": figures})

    layers = Layers(args.model, args.rank, args.ranks, max(args.rows), folder)
    measure(layers, args.rows, args.left, note)
    for other in others:
        other.wait(20)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
