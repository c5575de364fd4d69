"""Where the time of a decode step goes, on each share of the SMs.

The step as the lane runs it; the kernels of the whole step, each with the time from the end of the
kernel before it to its own end, so that times add up although kernels start early; and of dense
models the parts alone (all products after their norms, decode attention, the head) and each product
alone, in every way.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Report, seconds
from rig import Rig, decode_attention_of, decode_seconds, finished
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from twolane.kernels.products.dispatch import GpuProducts
from twolane.lanes.work import DecodeRow, DecodeWork

SCHEMES = {"bf16": (None, "auto"), "fp8": ("fp8", "fp8"), "fp8_block128": ("fp8_block128", "fp8")}
"""Formats of the weights and of the KV cache in each scheme."""
ROWS, CONTEXT, STEPS = 64, 2048, 4


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("--scheme", nargs="+", default=["fp8"], choices=[*SCHEMES])
    add("--units", nargs="+", type=int, default=[24, 32])
    add("--rows", type=int, default=ROWS)
    add("--model", default="qwen3-8b", help="a dense model, or one with experts")
    add("--router-skew", type=float, default=0.0, help="see `twolane serve`")


def main(report: Report, given: argparse.Namespace) -> None:
    """Measure every scheme that was asked for, by SMs."""
    for scheme in given.scheme:
        weights, kv = SCHEMES[scheme]
        form = {"quantization": weights, "kv_cache_dtype": kv, "router_skew": given.router_skew}
        rig = Rig(given.model, given.units, pages=6400, **form)
        rows = rig.decode_rows(given.rows, CONTEXT)
        for units in rig.machine.partitions.decode_units:
            step = decode_seconds(rig, rows, units, STEPS)
            found: dict[str, Any] = {"scheme": scheme, "units": units, "step_ms": step * 1e3}
            with report.attempt(f"{scheme} on {units}"):
                found["kernels_us"] = kernels(rig, rows, units)
                if rig.spec.moe is None:
                    found["parts_ms"] = parts(rig, rows, units)
                    found["products"] = each_product(rig, len(rows), units)
            report.add(**found)
        rig.close()


def parts(rig: Rig, rows: Sequence[DecodeRow], units: int) -> dict[str, float]:
    """Return the milliseconds of the parts of a step, each alone."""
    machine, runner = rig.machine, rig.lanes.runner
    decoder, steps, products = machine.decoder, runner.steps, runner.steps.products(units)
    hidden = torch.randn(len(rows), rig.spec.hidden_size, dtype=torch.bfloat16, device="cuda")
    layers = rig.spec.layers
    runs: dict[str, Callable[[], object]] = {
        "products": lambda: decoder.multiply(layers, hidden, steps.workspace, products),
        "attention": decode_attention_of(rig, rows, units),
        "head": lambda: decoder.head(hidden, steps.logits[: len(rows)], steps.workspace, products),
    }
    with torch.inference_mode():
        return {name: 1e3 * seconds([run], stream(rig, units)) for name, run in runs.items()}


def stream(rig: Rig, units: int) -> torch.cuda.Stream:
    """Return a stream on this many SMs."""
    return rig.machine.partitions.capture_stream("decode", units)


def each_product(rig: Rig, rows: int, units: int) -> dict[str, dict]:
    """Return for each product after a norm the chosen kernel, and the microseconds of each
    kernel."""
    products: GpuProducts = rig.lanes.runner.steps.products(units)
    found = {}
    with torch.inference_mode(), torch.cuda.stream(stream(rig, units)):
        for case, matrices in rig.machine.decoder._uses().items():
            chosen = products.way(case.operation, rows, matrices[0])
            each = {
                way.name: round(1e6 * products._seconds(way, case, rows, matrices), 1)
                for way in {chosen: 0} | dict.fromkeys(products._candidates(case, rows))
            }
            rate = matrices[0].nbytes / each[chosen.name] / 1e6
            name = f"{case.operation} {case.n}x{case.k}"
            found[name] = {"way": chosen.name, "tb_s": round(rate, 2), "us": each}
    return found


def kernels(rig: Rig, rows: Sequence[DecodeRow], units: int) -> dict[str, float]:
    """Microseconds that each kernel of a step ends after the one before it, summed by name
    and neighbours."""
    work = DecodeWork(tuple(DecodeRow(row.slot, row.position, STEPS) for row in rows), STEPS)
    finished(rig.launch("decode", units, work))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        tickets = [rig.launch("decode", units, work) for _ in range(3)]
        finished(tickets[-1])
        rig.lanes.synchronize()
    ends = sorted(
        (event.time_range.end, event.name.split("(")[0].split("<")[0])
        for event in seen.events()
        if event.device_type == DeviceType.CUDA and "Mem" not in event.name
    )
    took: Counter[str] = Counter()
    for before, this, after in zip(ends, ends[1:], ends[2:], strict=False):
        took[f"{before[1]} > {this[1]} > {after[1]}"] += this[0] - before[0]
    steps = 3 * STEPS
    each = {name: round(us / steps, 2) for name, us in took.most_common()}
    return dict(itertools.islice(each.items(), 40))
