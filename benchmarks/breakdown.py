"""Where a decode step's time goes, on one GPU: `python benchmarks/breakdown.py [--out FILE]`.

A step is captured again without one of its parts, and replayed beside the whole one: what is saved
is what the part costs, launches overlapping as they do. A trace of the replayed graph then has the
kernels of a layer in their order, each a median over layers: its time, and from its start to the
start of the next, which is what it adds to the layer. Last, the experts' products alone, by tile
and number of blocks. See `engine.py`, whose rig this takes.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine import DecodeWork, Rig, finished

from twolane.common.garbage import gc_disabled
from twolane.kernels import fused
from twolane.kernels.experts import few_rows
from twolane.kernels.experts import products as experts
from twolane.kernels.experts.routing import Combination
from twolane.kernels.products import skinny_gemm
from twolane.kernels.products.dispatch import GpuProducts
from twolane.lanes.cuda.decode_graphs import captured
from twolane.lanes.cuda.forward_batch import DecodeRows
from twolane.model.gpu_decoder import GpuDecoder
from twolane.model.mlp import Experts
from twolane.results.provenance import provenance, save

CONTEXT = 2048
REPLAYS = 12
PARTS: Mapping[str, tuple[tuple[Any, str], ...]] = {
    "experts": ((Experts, "add_into"),),
    "routing": ((experts, "route"), (experts, "gather"), (few_rows, "norm_and_route")),
    "experts' products": ((experts, "_few_rows"),),
    "combination": ((Combination, "add_into"), (Combination, "add_and_norm")),
    "attention": ((DecodeRows, "attend"),),
    "rotation": ((DecodeRows, "write"),),
    "dense products": ((GpuProducts, "linear"), (GpuProducts, "add_linear")),
    "norms": ((fused, "rms_norm"),),
    "head": ((GpuDecoder, "head"),),
}
"""Functions replaced to leave a part out of a step, by part."""
ANCHOR = "_qkv_rope_write"
"""Kernel that runs once in each layer."""


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    """Leave a part out of the steps queued within the block."""
    with contextlib.ExitStack() as stack:
        for owner, name in PARTS.get(part, ()):
            stack.enter_context(mock.patch.object(owner, name, nothing))
        yield


def nothing(*arguments: Any, **_: Any) -> Any:
    """Return a norm's output buffer unwritten, and no experts."""
    return None if isinstance(arguments[0], Experts) else arguments[-1]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute within the block, and have the CUDA C++ read again."""
    with mock.patch.object(owner, name, value):
        skinny_gemm.source.cache_clear()
        yield
    skinny_gemm.source.cache_clear()


def edited(old: str, new: str) -> Any:
    """Return the CUDA C++ of the experts' products with a change."""
    text = skinny_gemm.text()
    assert old in text, old
    return replaced(skinny_gemm, "text", lambda: text.replace(old, new))


def ways() -> dict[str, Any]:
    """Return the alternatives of a step by name."""
    groups = skinny_gemm.Groups
    return {
        "routing apart": replaced(experts, "routes_few", lambda *_: False),
        "nothing fetched early": replaced(
            skinny_gemm, "Groups", lambda *a, **k: groups(*a, **{**k, "following": None})
        ),
        "tiles in parts": edited("3 * tiles >= 2 * gridDim.x", "false"),
    }


class Steps:
    """Decode steps of some rows, captured again."""

    def __init__(self, rig: Rig, rows: int) -> None:
        self.rig, self.units = rig, rig.machine.partitions.units
        self.runner = rig.lanes.runner
        self.stream = rig.machine.partitions.capture_stream("decode", self.units)
        self.rows = rig.decode_rows(rows, CONTEXT)
        finished(rig.launch("decode", self.units, DecodeWork(self.rows, 1)))
        self.bucket = self.runner.steps.bucket(rows)
        with torch.cuda.stream(self.stream):
            padding = self.runner.slots.padding
            self.runner.steps.inputs.send(self.rows, self.bucket, padding, 0)

    def graph(self, queue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return a graph of the launches of `queue`."""
        with torch.cuda.stream(self.stream):
            queue()
        return captured(self.stream, torch.cuda.graph_pool_handle(), queue)

    def forward(self, part: str = "") -> torch.cuda.CUDAGraph:
        """Return the forward pass without a part."""
        steps = self.runner.steps
        with without(part):
            return self.graph(lambda: steps._forward(self.bucket, self.units, False))

    def seconds(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the median of a replay."""
        times = []
        with torch.cuda.stream(self.stream):
            for _ in range(REPLAYS + 2):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(self.stream)
                graph.replay()
                b.record(self.stream)
                b.synchronize()
                times.append(a.elapsed_time(b) * 1e-3)
        return statistics.median(times[2:])


def parts(steps: Steps) -> dict[str, float]:
    """Return the milliseconds of a step, and those saved by leaving each part out."""
    whole = steps.seconds(steps.forward())
    saved = {name: whole - steps.seconds(steps.forward(name)) for name in PARTS}
    return {"step": whole * 1e3} | {name: value * 1e3 for name, value in saved.items()}


def otherwise(steps: Steps) -> dict[str, float]:
    """Return the milliseconds of a step with each alternative."""
    took = {"step": steps.seconds(steps.forward()) * 1e3}
    for name, way in ways().items():
        with way:
            took[name] = steps.seconds(steps.forward()) * 1e3
    return took


def trace(steps: Steps) -> list[dict]:
    """Return the kernels of a replayed step, in the order of their start."""
    from torch.profiler import ProfilerActivity, profile

    graph = steps.forward()
    steps.seconds(graph)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        with torch.cuda.stream(steps.stream):
            for _ in range(2):
                graph.replay()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"]))


def layer(steps: Steps) -> list[dict]:
    """Medians of the kernels of a layer, from its rotation to the next's."""
    kernels, layers = trace(steps), steps.rig.spec.layers
    starts = [i for i, kernel in enumerate(kernels) if ANCHOR in kernel["name"]][-layers:]
    spans = list(itertools.pairwise(starts))
    usual = statistics.mode(b - a for a, b in spans)
    runs = [kernels[a : b + 1] for a, b in spans if b - a == usual]
    found = []
    for place in range(usual):
        here = [run[place] for run in runs]
        gaps = [float(run[place + 1]["ts"]) - float(run[place]["ts"]) for run in runs]
        found.append(
            {
                "kernel": here[0]["name"][:60],
                "us": statistics.median(float(kernel["dur"]) for kernel in here),
                "to_next_us": statistics.median(gaps),
                "grid": here[0]["args"].get("grid"),
                "block": here[0]["args"].get("block"),
            }
        )
    return found


def expert_products(steps: Steps) -> dict[str, float]:
    """Microseconds a layer of each product of the experts, by its tiles and blocks."""
    runner, weights = steps.runner, steps.rig.machine.decoder.weights
    steps.forward().replay()  # routes
    room = runner.steps.workspace.experts(steps.bucket, "bf16")
    few, lane = experts.ExpertWay("own", 16), runner.steps.products(steps.units)
    scratch = lane.scratch(torch.device("cuda"))
    kinds = {
        gated: [
            skinny_gemm.Variant(
                wide, few.rows, swap=True, gated=gated, dtype=room.x.dtype, grouped=True
            )
            for wide in ((128, 256) if gated else (64, 128, 256))
        ]
        for gated in (True, False)
    }
    skinny_gemm.compile_all([*kinds[True], *kinds[False]])
    found: dict[str, float] = {}
    for name, gated, x, out in (
        ("gate_up", True, room.x, room.act),
        ("down", False, room.act, room.outs),
    ):
        for kind in kinds[gated]:
            groups = skinny_gemm.Groups(room.routing.groups, room.routing.experts, False, None)
            for blocks in sorted({64, 96, 128, steps.units}):

                def queue(
                    kind=kind, blocks=blocks, gated=gated, x=x, out=out, groups=groups
                ) -> None:
                    for one in weights.layers:
                        w = one.mlp.gate_up if gated else one.mlp.down
                        skinny_gemm.launch(
                            kind, blocks, x, w.values, None, out, scratch, groups=groups
                        )

                seconds = steps.seconds(steps.graph(queue))
                found[f"{name} {kind.name} on {blocks}"] = seconds / len(weights.layers) * 1e6
    return found


PARTS_OF_A_STEP: Mapping[str, Callable[[Steps], Any]] = {
    "parts_ms": parts,
    "layer": layer,
    "otherwise_ms": otherwise,
    "expert_products_us": expert_products,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--router-skew", type=float, default=0.0, help="see `twolane serve`")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rig = Rig(args.model, (), slots=72, pages=64 * 100, router_skew=args.router_skew)
    print(f"started in {rig.start_seconds:.0f} s", flush=True)
    details: dict[str, Any] = {}
    for rows in args.rows:
        details[f"{rows} rows"] = by_parts(rig, rows)
        if args.out:
            save(args.out, provenance([args.model]), {"details": details})
    rig.close()


def by_parts(rig: Rig, rows: int) -> dict[str, Any]:
    """Return the figures of a step with this many rows; more for few rows."""
    found: dict[str, Any] = {}
    with gc_disabled():  # to free events while a graph is captured ends it
        steps = Steps(rig, rows)
        for name, part in PARTS_OF_A_STEP.items():
            if rows <= 8 or name in ("parts_ms", "layer"):
                found[name] = part(steps)
                show(found[name])
    rig.give_back(steps.rows)
    return found


def show(found: Mapping[str, float] | list[dict]) -> None:
    """Print times, or the kernels of a layer line by line."""
    if isinstance(found, Mapping):
        print({name: round(value, 3) for name, value in found.items()}, flush=True)
        return
    for kernel in found:
        line = "  {us:7.2f} {to_next_us:7.2f}  {kernel} {grid} {block}"
        print(line.format(**kernel), flush=True)


if __name__ == "__main__":
    main()
