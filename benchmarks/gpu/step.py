"""Decode steps and prompts of a model beside the bytes and FLOPs that they need.

Steps by rows, context and share of the SMs, over the time in which all SMs read the bytes that the
step must read; prompts in chunks of 8,192 tokens, over the time of their FLOPs at the rate of one
large product in bfloat16. `--passes` adds what a step takes when tokens of a prompt join its pass
and wake every expert. `--kernels` adds where the time of steps goes: the kernels of the whole step,
each with the time from the end of the kernel before it to its own end, so that times add up
although kernels start early; and of dense models the parts alone (all products after their norms,
decode attention, the head) and each product alone, in every way. Graphs are made for few sizes, so
that the start takes less; no step that is timed is padded.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from twolane.kernels import sizes

# Before anything reads them.
sizes.SIZES, sizes.BUCKETS = (64, 320, 576, 1152, 2048), (1, 8, 16, 32, 64, 128)

import torch  # noqa: E402
from harness import Report, read_rate, seconds, timed  # noqa: E402
from measured import at_most  # noqa: E402
from rig import (  # noqa: E402
    RankedRig,
    Rig,
    decode_attention_of,
    decode_seconds,
    finished,
    pass_seconds,
    prompt_flops,
    prompt_seconds,
    step_bytes,
)
from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from twolane.kernels.products.dispatch import GpuProducts  # noqa: E402
from twolane.lanes.work import DecodeRow, DecodeWork  # noqa: E402

STEPS, CHUNK, JOINED = 4, 8192, (256, 512, 1024)


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("--model", default="qwen3-8b")
    add("--quantization", help="see `twolane serve`, here and below")
    add("--kv-cache-dtype", default="auto")
    add("--router-skew", type=float, default=0.0)
    add("--ranks", type=int, default=1, help="GPUs that share the model")
    add("--pages", type=int, default=6400, help="pages of KV, 32 tokens each")
    add("--units", nargs="+", type=int, default=[32], help="SMs of decode, beside all of them")
    add("--rows", nargs="+", type=int, default=[64])
    add("--contexts", nargs="+", type=int, default=[2048])
    add("--prompts", nargs="*", type=int, default=[8192])
    add("--bar", type=float, default=1.35, help="a step on all SMs over its floor")
    add("--passes", action="store_true", help="measure passes with a prompt's tokens, too")
    add("--kernels", action="store_true", help="measure the kernels of steps, too")


def main(report: Report, given: argparse.Namespace) -> None:
    """Measure what was asked for, by rows, context and SMs."""
    rate, product, rig = read_rate(), product_rate(), started(given)
    held = torch.cuda.memory_allocated() / 2**30
    report.add(start_seconds=rig.start_seconds, gib=held, read_tb_s=rate / 1e12)
    for count, context in itertools.product(given.rows, given.contexts):
        if rig.holds(count, context):
            with report.attempt(f"{count} rows of {context}"):
                decode(report, rig, count, context, rate, given)
    for tokens in (each for each in given.prompts if rig.holds(0, 0, each)):
        with report.attempt(f"a prompt of {tokens}"):
            prompt(report, rig, tokens, product)
    rig.close()


def started(given: argparse.Namespace) -> Rig:
    """Return the rig of the options."""
    if given.ranks > 1:
        return RankedRig(given.model, given.ranks, "nccl", quantization=given.quantization)
    return Rig(
        given.model,
        given.units,
        slots=max(given.rows) + 2,
        pages=given.pages,
        longest=max(40_960, *given.prompts, *given.contexts) + CHUNK,
        quantization=given.quantization,
        kv_cache_dtype=given.kv_cache_dtype,
        router_skew=given.router_skew,
    )


def product_rate() -> float:
    """Return the FLOP/s of a large product of random matrices in bfloat16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * 8192**3 / timed(lambda: torch.mm(a, b))


def decode(
    report: Report, rig: Rig, count: int, context: int, rate: float, given: argparse.Namespace
) -> None:
    """Measure the steps of this many rows of one context on every share."""
    rows, parts_of = rig.decode_rows(count, context), rig.machine.partitions
    floor = step_bytes(rig, count, context) / rate
    took = {units: decode_seconds(rig, rows, units, STEPS) for units in parts_of.decode_units}
    over = took[parts_of.units] / floor
    ms = {units: each * 1e3 for units, each in took.items()}
    report.add(rows=count, context=context, step_ms=ms, floor_ms=floor * 1e3, over_floor=over)
    report.hold(at_most(f"step of {count} rows of {context} over its floor", over, given.bar))
    if rig.spec.moe is not None:
        ticket = finished(rig.launch("decode", parts_of.units, DecodeWork(rows, 1)))
        report.add(experts_read=ticket.steps[0].experts_read, expected=rig.spec.moe.active(count))
    for new in JOINED if given.passes and rig.holds(count, context, JOINED[-1]) else ():
        report.add(rows=count, context=context, new=new, pass_ms=pass_seconds(rig, rows, new) * 1e3)
    for units in took if given.kernels else ():
        found: dict[str, Any] = {"units": units, "kernels_us": kernels(rig, rows, units)}
        if rig.spec.moe is None and not rig.spec.kinds:
            found["parts_ms"] = parts(rig, rows, units)
            found["products"] = each_product(rig, count, units)
        report.add(**found)
    rig.give_back(rows)


def prompt(report: Report, rig: Rig, tokens: int, rate: float) -> None:
    """Measure a prompt in chunks on every share, one after another."""
    chunks = [(min(CHUNK, tokens - first), first) for first in range(0, tokens, CHUNK)]
    shares = (rig.machine.partitions.units, *(p for p, _ in rig.machine.partitions.levels if p))
    took = {
        units: sum(prompt_seconds(rig, new, units, reused, 1) for new, reused in chunks)
        for units in dict.fromkeys(shares if len(chunks) == 1 else shares[:1])
    }
    floor = prompt_flops(rig, tokens) / rate
    over = took[shares[0]] / floor
    rates = {units: tokens / each for units, each in took.items()}
    report.add(prompt=tokens, tokens_s=rates, floor_ms=floor * 1e3, over_floor=over)


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
