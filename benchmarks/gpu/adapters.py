"""LoRA adapters of rank 16 for all linear layers, on one GPU.

Decode steps of 64 rows at 2K whose requests share 1, 8 or 32 adapters, over the same steps without
any; prompts of 512 and 8,192 tokens; hybrid passes; and all of it over FP8 weights. Steps without
an adapter are compared with those of a machine that serves none. Graphs of passes are made for few
sizes, so that the start takes less; none that is timed is padded.
"""

import argparse
from collections.abc import Callable
from typing import Any

from twolane.kernels import sizes

sizes.SIZES = (64, 512, 2048)  # before anything else reads them

from harness import Report  # noqa: E402
from measured import Figure, at_most  # noqa: E402
from rig import Rig, decode_seconds, pass_seconds, prompt_seconds  # noqa: E402

ROWS, CONTEXT, SLOTS, RANK = 64, 2048, 32, 16
NUMBERS = (1, 8, 32)
"""Numbers of adapters in a batch."""
NEW = 448
"""Prompt tokens of a hybrid pass, which with 64 decode rows has a size of its own."""


def fill(rig: Rig) -> None:
    """Give all adapters of the pool random numbers."""
    pool = rig.machine.adapters
    assert pool is not None
    for each in pool.matrices.values():
        each.a.normal_(std=each.a.shape[2] ** -0.5)
        each.b.normal_(std=0.01)
        each.ranks.fill_(RANK)


def step(rig: Rig, adapters: int, units: int) -> float:
    """Return seconds of a step whose rows have so many adapters in turn."""
    rig.adapters = adapters
    rows = rig.decode_rows(ROWS, CONTEXT)
    seconds = decode_seconds(rig, rows, units)
    rig.give_back(rows)
    print(f"step, {adapters} adapters, {units} SMs: {seconds * 1e3:.3f} ms", flush=True)
    return seconds


def hybrid(rig: Rig, adapters: int) -> float:
    """Return seconds of a pass of decode rows and a prompt, which have so many adapters."""
    rig.adapters = adapters
    rows = rig.decode_rows(ROWS, CONTEXT)
    seconds = pass_seconds(rig, rows, NEW)
    rig.give_back(rows)
    return seconds


def prompt(rig: Rig, adapters: int, new: int) -> float:
    """Return seconds of a prompt's prefill; with an adapter if there are any."""
    rig.adapters = adapters
    return prompt_seconds(rig, new)


def measured(rig: Rig, details: dict) -> list[Figure]:
    """Everything with adapters, over the same without, measured before and after it."""
    name, figures = rig.quantization or "bf16", []
    for units in sorted(rig.machine.partitions.decode_units, reverse=True):
        base = [step(rig, 0, units)]
        steps = {number: step(rig, number, units) for number in NUMBERS}
        base.append(step(rig, 0, units))
        details[f"{name}_step_ms_{units}"] = {0: [s * 1e3 for s in base]} | {
            number: s * 1e3 for number, s in steps.items()
        }
        for number, seconds in steps.items():
            ratio = seconds / (sum(base) / 2)
            figures.append(at_most(f"{name}: step, {number} adapters, {units} SMs", ratio, 1.15))
    for new in (512, 8192):
        plain, adapted = prompt(rig, 0, new), prompt(rig, 1, new)
        details[f"{name}_prefill_ms_{new}"] = [plain * 1e3, adapted * 1e3]
        figures.append(at_most(f"{name}: prefill of {new}", adapted / plain, 1.15))
    passes = {number: hybrid(rig, number) * 1e3 for number in (0, *NUMBERS)}
    details[f"{name}_hybrid_ms_{ROWS}+{NEW}"] = passes
    figures.append(at_most(f"{name}: hybrid pass, 32 adapters", passes[32] / passes[0], 1.15))
    return figures


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("--model", default="qwen3-8b")
    add("--levels", type=int, nargs="*", default=[32], help="SMs of decode")
    add("--only", nargs="*", default=["bf16", "none", "fp8"])


def main(report: Report, given: argparse.Namespace) -> None:
    """Measure each kind of weights, and a machine without adapters."""
    without: list[float] = []
    for kind in given.only:
        slots, quantization = (0 if kind == "none" else SLOTS), ("fp8" if kind == "fp8" else None)
        rig = Rig(
            given.model,
            given.levels,
            slots=ROWS + 1,
            pages=ROWS * 100,
            quantization=quantization,
            adapter_slots=slots,
        )
        units = rig.machine.partitions.units
        details: dict[str, Any] = {"kind": kind, "start_seconds": rig.start_seconds}
        if kind == "none":
            alone = details["step_ms_not_served"] = step(rig, 0, units)
            if without:
                report.hold(at_most("none active over none served", min(without) / alone, 1.01))
        else:
            fill(rig)
            report.hold(*measured(rig, details))
        if kind == "bf16":
            without = details["step_ms_served"] = [step(rig, 0, units) for _ in range(2)]
        report.add(**details)
        rig.close()
