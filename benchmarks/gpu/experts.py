"""A model with experts on one GPU or several, beside the bytes that its steps must read.

Decode steps by rows and share of the SMs, prefill, the number of experts that steps read beside the
law that predicts it, and the cliff: what a decode step of few rows takes when prompt tokens join
its pass and wake every expert. `twolane profile` and `twolane bench estimators` tell what an
estimator says of such passes.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from harness import Report, read_rate
from measured import Figure, at_least, at_most
from rig import PAGE, RankedRig, Rig, decode_seconds, finished, pass_seconds, prompt_rates

from twolane.lanes.work import DecodeWork
from twolane.model.gpu_decoder import layer_matrices

MODEL = "qwen3-30b-a3b"
MAX_MS = {"qwen3-235b-a22b": {8: 8.0, 64: 17.6}}
"""Bars of steps by rows, in FP8 on four H200s."""
CONTEXT = 2048
ROWS = (1, 8, 16, 32, 64)
CLIFF_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (256, 512, 1024)


def step_bytes(rig: Rig, rows: int) -> float:
    """Return bytes that a decode step must read: weights of attention and active experts, head,
    KV."""
    moe, weights = rig.spec.moe, rig.machine.decoder.weights
    active = moe.active(rows) / moe.rule.stored
    moved = weights.head.nbytes + rows * CONTEXT * rig.machine.page_token_bytes
    for operation, matrix in (each for layer in weights.layers for each in layer_matrices(layer)):
        moved += matrix.nbytes * (active if operation == "experts" else 1.0)
    return moved


def fitting(rig: Rig, rows: Sequence[int]) -> list[int]:
    """Return the numbers of rows whose contexts and a prompt fit the rig's pages."""
    free = rig.pages - PROMPTS[-1] // PAGE
    most = min(rig.slots - 1, free // -(-(CONTEXT + 512) // PAGE))
    return [count for count in rows if count <= most]


def decode(rig: Rig, details: dict, rate: float) -> list[Figure]:
    """Steps by rows and share of the SMs."""
    units, figures = rig.machine.partitions.units, []
    for rows in fitting(rig, ROWS):
        asked = rig.decode_rows(rows, CONTEXT)
        steps = {u: decode_seconds(rig, asked, u) for u in rig.machine.partitions.decode_units}
        rig.give_back(asked)
        floor = step_bytes(rig, rows) / rate
        details[f"step_ms_{rows}"] = {u: s * 1e3 for u, s in steps.items()}
        details[f"floor_ms_{rows}"] = floor * 1e3
        share = floor / steps[units]
        if rows in (bars := MAX_MS.get(rig.name, {})):
            figures.append(at_most(f"step of {rows} rows", steps[units] * 1e3, bars[rows], "ms"))
        elif rig.name != MODEL:
            continue
        elif rows == 1:
            figures.append(at_most("step of 1 row", steps[units] * 1e3, 2.5, "ms"))
        else:
            bar = 0.8 if rows == 64 else 0.7
            figures.append(at_least(f"floor over step of {rows} rows", share, bar))
    return figures


def prefill(rig: Rig, details: dict) -> list[Figure]:
    """Measure prompts of 8,192 tokens."""
    rates = details["prefill_tokens_s_8192"] = prompt_rates(rig, 8192)
    bar = 45_000 if rig.name == MODEL else 40_000
    return [at_least("prefill of 8192", rates[rig.machine.partitions.units], bar, "tokens/s")]


def law(rig: Rig, details: dict) -> list[Figure]:
    """Experts that steps of some rows read in a layer, beside the law that predicts them."""
    units, errors = rig.machine.partitions.units, []
    for rows in fitting(rig, CLIFF_ROWS):
        asked = rig.decode_rows(rows, CONTEXT)
        ticket = finished(rig.launch("decode", units, DecodeWork(asked, 1)))
        rig.give_back(asked)
        read, expected = ticket.steps[0].experts_read, rig.spec.moe.active(rows)
        details[f"experts_{rows}"] = {"read": read, "expected": expected}
        errors.append(abs(read / expected - 1))
    return [at_most("experts read, worst error of the law", max(errors), 0.1)]


def cliff(rig: Rig) -> dict[str, float]:
    """Return milliseconds of passes of decode rows, alone and with the tokens of a prompt."""
    units, narrow = rig.machine.partitions.units, min(rig.machine.partitions.decode_units)
    took: dict[str, float] = {}
    for rows in fitting(rig, CLIFF_ROWS):
        asked = rig.decode_rows(rows, CONTEXT)
        for share in (units, narrow):
            took[f"{rows}+0 on {share}"] = 1e3 * decode_seconds(rig, asked, share, 1)
        for new in PROMPTS:
            took[f"{rows}+{new} on {units}"] = 1e3 * pass_seconds(rig, asked, new)
        rig.give_back(asked)
    return took


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("--model", default=MODEL)
    add("--ranks", type=int, default=1, help="GPUs that share the model")
    add("--router-skew", type=float, default=0.0, help="see `twolane serve`")
    add("--quantization", choices=("fp8", "int4", "mxfp4"), help="see `twolane serve`")
    add("--pages", type=int, default=12_000, help="pages of KV; 64 rows need 5,200")


def started(given: argparse.Namespace) -> Rig:
    """Return the rig of the options."""
    if given.ranks > 1:
        return RankedRig(given.model, given.ranks, "nccl", quantization=given.quantization)
    form = {"quantization": given.quantization, "router_skew": given.router_skew}
    return Rig(given.model, (24, 32, 48), pages=given.pages, **form)


def main(report: Report, given: argparse.Namespace) -> None:
    """Measure one model."""
    rate, rig = read_rate(), started(given)
    report.add(start_seconds=rig.start_seconds, reading_tb_s=rate / 1e12)
    details: dict[str, Any] = {}
    report.hold(*decode(rig, details, rate), *prefill(rig, details), *law(rig, details))
    report.add(**details)
    report.add(passes_ms=cliff(rig))
    rig.close()
