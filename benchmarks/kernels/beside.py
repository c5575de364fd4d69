"""Decode's products beside prefill: chosen alone, as servers choose, and chosen beside it.

    PYTHONPATH=src python benchmarks/kernels/beside.py

Microseconds of a layer's norms and products, Qwen3-8B, on the SMs of decode, with the others idle
and at work on the products of passes of 512 tokens. Weights and rows are random, and come from
memory. What is chosen is not kept on disk.
"""

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from common import Report, capture
from products import CASES, HIDDEN, INNER, LAYERS, QKV

from twolane.kernels import fused
from twolane.kernels.products import dispatch as linear
from twolane.kernels.products.dispatch import ROWS, GpuProducts
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.model.matrix import Matrix

UNITS = (48, 64, 80, 96)
TOKENS = 512
"""Of the passes beside."""
ROUNDS = 2
"""Of the other lane's work that are queued at any time."""
REPEATS, MORE = 7, 5
"""Replays that a median is of; beside the other lane, whose work differs, so many times as many."""


class Busy:
    """A lane that is at work while the other one's products are timed."""

    def __init__(self, stream: torch.cuda.Stream, queue: Callable[[], None]) -> None:
        self._graph = capture([queue], stream)
        self._stream, self._ends = stream, deque()

    def feed(self) -> None:
        """See to it that it has a round to do behind the one that it is at."""
        while self._ends and self._ends[0].query():
            self._ends.popleft()
        with torch.cuda.stream(self._stream):
            while len(self._ends) < ROUNDS:
                self._graph.replay()
                self._ends.append(torch.cuda.Event())
                self._ends[-1].record()

    def seconds(self, run: Callable[[], None], repeats: int) -> float:
        """As `graph_seconds` of `kernels/runtime/timing.py`, beside this lane."""
        stream, times = torch.cuda.current_stream(), []
        graph = capture([run], stream)
        for _ in range(MORE * repeats + 1):
            self.feed()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return statistics.median(times[1:])


def layers(
    products: GpuProducts, rows: int, weights: list[tuple[Matrix, ...]], scale: Tensor
) -> Callable[[], None]:
    """What queues the norms and products of all layers for so many random rows."""

    def made(width: int) -> Tensor:
        return torch.randn(rows, width, device="cuda").to(torch.bfloat16)

    residual, attended = made(HIDDEN), made(HIDDEN)
    norm, qkv, gate_up, act = made(HIDDEN), made(QKV), made(2 * INNER), made(INNER)

    def run() -> None:
        for first, second, third, fourth in weights:
            fused.rms_norm(residual, scale, 1e-6, norm)
            products.linear(norm, first, None, qkv)
            products.add_linear(attended, second, None, residual)
            fused.rms_norm(residual, scale, 1e-6, norm)
            products.gate_up(norm, third, None, gate_up, act)
            products.add_linear(act, fourth, None, residual)

    return run


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    report, scale = Report("beside"), torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = [
        tuple(Matrix.plain((0.02 * torch.randn(c.n, c.k, device="cuda")).bfloat16()) for c in CASES)
        for _ in range(LAYERS)
    ]
    uses = dict(zip(CASES, map(list, zip(*weights, strict=True)), strict=True))
    partitions = GreenContexts(0, UNITS)
    for prefill, units in partitions.levels:
        stream, other = partitions.stream("decode", units), partitions.stream("prefill", prefill)
        busy = Busy(other, layers(GpuProducts(prefill), TOKENS, weights, scale))
        for chosen, seconds in (("alone", linear.graph_seconds), ("beside", busy.seconds)):
            products = GpuProducts(units)
            with torch.cuda.stream(stream), patch.object(linear, "graph_seconds", seconds):
                products.tune(
                    uses, ROWS[-2], partial(layers, products, weights=weights, scale=scale)
                )
            for rows in ROWS[:-1]:
                run = layers(products, rows, weights, scale)
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    alone = 1e6 * linear.graph_seconds(run, REPEATS) / LAYERS
                    beside = 1e6 * busy.seconds(run, REPEATS) / LAYERS
                ways = [products.ways[case][rows].name for case in CASES]
                report.add(
                    decode=units, rows=rows, chosen=chosen, alone=alone, beside=beside, ways=ways
                )
    report.write()


if __name__ == "__main__":
    with (
        patch.object(linear, "read_ways", lambda *_: {}),
        patch.object(linear, "write_ways", lambda *_: None),
    ):
        main()
