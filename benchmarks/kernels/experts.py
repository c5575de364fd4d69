"""Experts of one layer by rows, share of the SMs and way: time beside a kernel that reads.

`python benchmarks/kernels/experts.py [--model qwen3-30b-a3b] [--skew 0.0] [--out FILE]`, on one GPU
that does nothing else. Several layers' random weights take turns, so that the L2 cache serves none.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import partition, seconds
from torch import Tensor

from twolane.kernels.activations import Activations
from twolane.kernels.experts import products as experts
from twolane.kernels.experts.products import ExpertBuffers, ExpertWay, combined
from twolane.kernels.experts.routing import ActiveRows, Routing
from twolane.kernels.products.dispatch import GpuProducts, input_of
from twolane.model.matrix import Matrix, concatenated, quantised
from twolane.model.shapes import SHAPES
from twolane.model.spec import ModelSpec
from twolane.results.provenance import provenance, save

LAYERS, REPEATS = 4, 7
SHARES = {
    1: (132, 32), 8: (132, 32), 16: (132,), 32: (132, 32), 64: (132, 48, 32, 24), 128: (132, 32),
    256: (132,), 512: (132, 100), 2048: (132, 100), 8192: (132, 100),
}  # fmt: skip
"""SMs that each number of rows is measured on."""
WAYS = (
    *(ExpertWay("own", rows) for rows in (16, 24, 32, 48, 96)),
    ExpertWay("torch", 64), ExpertWay("triton", 64), ExpertWay("triton", 128),
)  # fmt: skip


class Layers:
    """Random experts of a few layers, and rows for them."""

    def __init__(self, spec: ModelSpec, skew: float, scheme: str) -> None:
        assert spec.moe is not None
        self.moe, self.hidden, self.scheme = spec.moe, spec.hidden_size, scheme
        n, inner = self.moe.experts, self.moe.intermediate_size
        self.weights = [
            (self._matrix(n * 2 * inner, self.hidden), self._matrix(n * self.hidden, inner))
            for _ in range(LAYERS)
        ]
        popularity = torch.rand(n, device="cuda").log() * -skew
        self.favour = popularity - popularity.mean()

    def _matrix(self, rows: int, columns: int) -> Matrix:
        values = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        matrix = Matrix.plain(values.normal_(0.0, columns**-0.5))
        if self.scheme == "bf16":
            return matrix
        parts = [quantised(part.float(), "fp8_channel") for part in values.chunk(16)]
        return concatenated(parts)

    def calls(self, rows: int, units: int) -> list[Callable[[], None]]:
        """One call a layer on random rows."""
        moe, hidden, inner = self.moe, self.hidden, self.moe.intermediate_size
        x, residual = (self._rows(rows, hidden) for _ in range(2))
        active = ActiveRows(torch.zeros(rows, dtype=torch.int32, device="cuda"), 0)
        lane, calls = GpuProducts(units), []
        for gate_up, down in self.weights:
            entries = rows * moe.per_token
            logits = (self._rows(rows, moe.experts).float() + self.favour).bfloat16()
            room = ExpertBuffers(
                Routing.of(moe.experts, moe.per_token, rows, torch.device("cuda")),
                logits,
                self._input(entries, hidden),
                self._rows(entries, 2 * inner),
                self._input(entries, inner),
                self._rows(entries, hidden),
            )

            def call(
                gate_up: Matrix = gate_up, down: Matrix = down, room: ExpertBuffers = room
            ) -> None:
                given = x, active, gate_up, down, room, lane
                combined(*given, normalised=moe.normalised).add_into(residual)

            self.room = room
            calls.append(call)
        return calls

    def _input(self, rows: int, width: int) -> Activations:
        return input_of(self._rows(rows, width), torch.ones(rows, 1, device="cuda"), self.scheme)

    @staticmethod
    def _rows(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, device="cuda").bfloat16()

    def active_bytes(self) -> int:
        """Bytes of the last call's experts."""
        ends = self.room.routing.ends
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        each = 3 * self.moe.intermediate_size * self.hidden * (2 if self.scheme == "bf16" else 1)
        return int((counts > 0).sum()) * each


def reading(stream: torch.cuda.Stream) -> float:
    """Bytes per second of a kernel that reads."""
    data = torch.empty(2**29, dtype=torch.float32, device="cuda").normal_()
    total = torch.empty((), device="cuda")
    took = seconds([lambda: torch.sum(data, dim=0, out=total)], stream, REPEATS)
    return data.nbytes / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--scheme", default="bf16", choices=("bf16", "fp8_channel"))
    parser.add_argument("--rows", type=int, nargs="*", default=list(SHARES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    layers = Layers(SHAPES[options.model], options.skew, options.scheme)
    chosen = experts.way
    streams = {u: partition(u).stream for u in (132, 100, 48, 32, 24)}
    rates = {units: reading(stream) for units, stream in streams.items()}
    print("reading TB/s:", {units: round(rate / 1e12, 2) for units, rate in rates.items()})
    results = []
    for rows in options.rows:
        for units in SHARES[rows]:
            calls = layers.calls(rows, units)
            found = {}
            for way in WAYS:
                if way.kernel == "own" and rows > 512:
                    continue
                experts.way = lambda *_, way=way: way
                try:
                    found[f"{way.kernel}-{way.rows}"] = seconds(calls, streams[units], REPEATS)
                except Exception as error:
                    print(f"{way}: {error!r}"[:200])
            experts.way = chosen
            found["chosen"] = seconds(calls, streams[units], REPEATS)
            floor = layers.active_bytes() / rates[units]
            results.append({"rows": rows, "units": units, "floor": floor, "seconds": found})
            times = "  ".join(f"{name} {took * 1e6:.0f}" for name, took in found.items())
            print(f"{rows:5} rows, {units:3} SMs: floor {floor * 1e6:.0f} us; {times}", flush=True)
    if options.out:
        about = provenance({name: getattr(options, name) for name in ("model", "skew", "scheme")})
        save(options.out, about, {"bytes_per_second": rates, "results": results})


if __name__ == "__main__":
    main()
