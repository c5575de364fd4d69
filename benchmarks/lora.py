"""LoRA adapters on one GPU: `python benchmarks/lora.py [--out FILE]`.

With dummy weights in the true shapes and adapters of rank 16 for all linear layers: decode steps of
64 rows at 2K whose requests share 1, 8 or 32 adapters, over the same steps without any; a prompt of
8K; hybrid passes; and all of it over FP8 weights. Steps without an adapter are compared with those
of a machine that serves none. See `engine.py`, whose rig this takes.

Graphs of passes are made for few sizes, so that the start takes less; none that is timed is padded.
"""

import argparse
import json
import sys
from pathlib import Path

from twolane.kernels import sizes

sizes.SIZES = (64, 512, 2048)  # before anything else reads them

from engine import HybridWork, Rig, decode_seconds, repeat  # noqa: E402
from measured import Figure, at_most, show  # noqa: E402

from twolane.results.provenance import provenance, save  # noqa: E402

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


def prompt(rig: Rig, adapters: int, new: int) -> float:
    """Return seconds of a prompt's prefill; with an adapter if there are any."""
    rig.adapters = adapters
    row = rig.prompt(new)
    seconds = repeat(
        3, lambda: rig.launch("prefill", rig.machine.partitions.units, rig.prefill(row))
    )
    rig.give_back([row])
    return seconds


def hybrid(rig: Rig, adapters: int) -> float:
    """Return seconds of a pass of decode rows and a prompt, which have so many adapters."""
    rig.adapters = adapters
    rows, row = rig.decode_rows(ROWS, CONTEXT), rig.prompt(NEW)
    work = HybridWork(rows, (row,), (rig.chunk(row),))
    seconds = repeat(5, lambda: rig.launch("device", rig.machine.partitions.units, work))
    rig.give_back([*rows, row])
    return seconds


def measured(rig: Rig, details: dict) -> list[Figure]:
    """Everything with adapters, over the same without, measured before and behind it."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--levels", type=int, nargs="*", default=[32], help="SMs of decode")
    parser.add_argument("--only", nargs="*", default=["bf16", "none", "fp8"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: list[Figure] = []
    details: dict = {}
    without, alone = [], None
    for kind in args.only:
        slots, quantization = (0 if kind == "none" else SLOTS), ("fp8" if kind == "fp8" else None)
        rig = Rig(
            args.model,
            args.levels,
            slots=ROWS + 1,
            pages=ROWS * 100,
            quantization=quantization,
            adapter_slots=slots,
        )
        details[f"start_seconds_{kind}"] = rig.start_seconds
        units = rig.machine.partitions.units
        if kind == "none":
            alone = step(rig, 0, units)
        else:
            fill(rig)
            found = measured(rig, details)
            show(found)
            figures += found
        if kind == "bf16":
            without = [step(rig, 0, units) for _ in range(2)]
        rig.close()
        print(json.dumps(details), flush=True)
        if alone is not None and without and "step_ms_without_adapters" not in details:
            details["step_ms_without_adapters"] = {"served": without, "not served": alone}
            figures.append(at_most("none active over none served", min(without) / alone, 1.01))
            show(figures[-1:])
        if args.out:
            save(args.out, provenance([args.model]), {"figures": figures, "details": details})
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
