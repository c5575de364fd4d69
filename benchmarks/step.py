"""Where the time of a decode step goes: `python benchmarks/step.py [--scheme fp8] [--out FILE]`.

Qwen3-8B shapes with dummy weights, 64 requests at 2,048 tokens. For each share of the SMs: the step
as the lane runs it; its parts alone (all products behind their norms, decode attention, the head);
each product alone, in every way; and the kernels of the whole step in their order,
each with the time from the end of the kernel in front of it to its own end, so that times add up
although kernels start early.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from engine import Rig, decode_attention_of, decode_seconds, finished
from kernels.common import seconds
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from twolane.kernels.products.dispatch import GpuProducts
from twolane.lanes.work import DecodeRow, DecodeWork
from twolane.results.provenance import provenance, save

SCHEMES = {"bf16": (None, "auto"), "fp8": ("fp8", "fp8"), "fp8_block128": ("fp8_block128", "fp8")}
"""The weights' and the KV cache's format of each scheme."""
ROWS, CONTEXT, STEPS = 64, 2048, 4


def main() -> None:
    """Measure every scheme that was asked for, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", nargs="+", default=["fp8"], choices=[*SCHEMES])
    parser.add_argument("--units", nargs="+", type=int, default=[24, 32])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    for scheme in given.scheme:
        weights, kv = SCHEMES[scheme]
        rig = Rig(given.model, given.units, pages=6400, quantization=weights, kv_cache_dtype=kv)
        found[scheme] = measured(rig, scheme)
        rig.close()
    if given.out:
        save(given.out, provenance(given.scheme), found)


def measured(rig: Rig, scheme: str) -> dict:
    """Return the figures of one rig, by SMs."""
    rows, found = rig.decode_rows(ROWS, CONTEXT), {}
    for units in rig.machine.partitions.decode_units:
        step = decode_seconds(rig, rows, units, STEPS)
        found[units] = {
            "step_ms": step * 1e3,
            "parts_ms": parts(rig, rows, units),
            "products": each_product(rig, units),
            "kernels_us": kernels(rig, rows, units),
        }
        print(scheme, units, json.dumps(found[units], indent=1), flush=True)
    return found


def parts(rig: Rig, rows: Sequence[DecodeRow], units: int) -> dict[str, float]:
    """Return the milliseconds of the parts of a step, each alone."""
    machine, runner = rig.machine, rig.lanes.runner
    decoder, steps, products = machine.decoder, runner.steps, runner.steps.products(units)
    hidden = torch.randn(ROWS, rig.spec.hidden_size, dtype=torch.bfloat16, device="cuda")
    layers = rig.spec.layers
    runs: dict[str, Callable[[], object]] = {
        "products": lambda: decoder.multiply(layers, hidden, steps.workspace, products),
        "attention": decode_attention_of(rig, rows, units),
        "head": lambda: decoder.head(hidden, steps.logits[:ROWS], steps.workspace, products),
    }
    with torch.inference_mode():
        return {name: 1e3 * seconds([run], stream(rig, units)) for name, run in runs.items()}


def stream(rig: Rig, units: int) -> torch.cuda.Stream:
    """Return a stream on this many SMs."""
    return rig.machine.partitions.capture_stream("decode", units)


def each_product(rig: Rig, units: int) -> dict[str, dict]:
    """Return for each product after a norm the chosen kernel, and the microseconds of each
    kernel."""
    products: GpuProducts = rig.lanes.runner.steps.products(units)
    found = {}
    with torch.inference_mode(), torch.cuda.stream(stream(rig, units)):
        for case, matrices in rig.machine.decoder._uses().items():
            chosen = products.way(case.operation, ROWS, matrices[0])
            each = {
                way.name: round(1e6 * products._seconds(way, case, ROWS, matrices), 1)
                for way in {chosen: 0} | dict.fromkeys(products._candidates(case, ROWS))
            }
            rate = matrices[0].nbytes / each[chosen.name] / 1e6
            name = f"{case.operation} {case.n}x{case.k}"
            found[name] = {"way": chosen.name, "tb_s": round(rate, 2), "us": each}
    return found


def kernels(rig: Rig, rows: Sequence[DecodeRow], units: int) -> dict[str, float]:
    """Microseconds that each kernel of a step ends behind the one in front of it, summed by name
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
    for before, this, behind in zip(ends, ends[1:], ends[2:], strict=False):
        took[f"{before[1]} > {this[1]} > {behind[1]}"] += this[0] - before[0]
    steps = 3 * STEPS
    each = {name: round(us / steps, 2) for name, us in took.most_common()}
    return dict(itertools.islice(each.items(), 40))


if __name__ == "__main__":
    main()
