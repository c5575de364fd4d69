"""A model with experts on one GPU: `python benchmarks/experts.py [--router-skew S]
[--out FILE]`.

With dummy weights in the true shapes: decode steps beside the bytes that they must read, prefill,
and the cliff: what a decode step of few rows takes when prompt tokens join its pass and wake every
expert. See `engine.py`, whose rig this takes.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from breakdown import by_parts
from engine import HybridWork, Rig, decode_seconds, repeat, timed
from measured import Figure, at_least, at_most, show

from twolane.model.spec import ModelSpec
from twolane.results.provenance import provenance, save

CONTEXT = 2048
ROWS = (1, 8, 16, 32, 64)
PROMPTS = (256, 512, 1024)
SHORT = 8
"""Tokens of each prompt that joins a pass."""


def step_bytes(spec: ModelSpec, rows: int) -> float:
    """Bytes that a decode step must read: weights of attention and active experts, head, KV."""
    assert spec.moe is not None
    expert = 3 * spec.moe.intermediate_size * spec.hidden_size
    attention = (2 * spec.q_size + 2 * spec.kv_size) * spec.hidden_size
    router = spec.moe.experts * spec.hidden_size
    layer = attention + router + spec.moe.active(rows) * expert
    weights = 2 * (spec.layers * layer + spec.vocab_size * spec.hidden_size)
    return weights + rows * CONTEXT * spec.kv_bytes_per_token(2)


def reading_rate() -> float:
    """Bytes per second of a kernel that reads."""
    data = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    view = data.view(torch.float32)
    total = torch.empty((), device="cuda")
    return data.nbytes / timed(lambda: torch.sum(view, dim=0, out=total))


def decode(rig: Rig, details: dict, rate: float) -> list[Figure]:
    """Steps by rows and share of the SMs."""
    units, figures = rig.machine.partitions.units, []
    for rows in ROWS:
        asked = rig.decode_rows(rows, CONTEXT)
        steps = {u: decode_seconds(rig, asked, u) for u in rig.machine.partitions.decode_units}
        rig.give_back(asked)
        floor = step_bytes(rig.spec, rows) / rate
        details[f"step_ms_{rows}"] = {u: s * 1e3 for u, s in steps.items()}
        details[f"floor_ms_{rows}"] = floor * 1e3
        share = floor / steps[units]
        if rows == 1:
            figures.append(at_most("step of 1 row", steps[units] * 1e3, 2.5, "ms"))
        else:
            bar = 0.8 if rows == 64 else 0.7
            figures.append(at_least(f"floor over step of {rows} rows", share, bar))
    return figures


def prefill(rig: Rig, details: dict) -> list[Figure]:
    """Prompts of 8,192 tokens."""
    row, units = rig.prompt(8192), rig.machine.partitions.units
    took = {
        share: repeat(3, lambda share=share: rig.launch("prefill", share, rig.prefill(row)))
        for share in [*(p for p, _ in rig.machine.partitions.levels), units]
    }
    rig.give_back([row])
    details["prefill_tokens_s_8192"] = {share: 8192 / s for share, s in took.items()}
    return [at_least("prefill of 8192", 8192 / took[units], 45_000, "tokens/s")]


def cliff(rig: Rig, details: dict) -> None:
    """Passes of decode rows with and without prompt tokens.

    The tokens are those of many short prompts: with random weights the tokens of one prompt
    resemble each other, and so do their experts.
    """
    units = rig.machine.partitions.units
    for rows in (8, 64):
        asked = rig.decode_rows(rows, CONTEXT)
        for new in PROMPTS:
            prompts = [
                rig.prompt(SHORT, slot=rig.slots - 1 - number) for number in range(new // SHORT)
            ]
            work = HybridWork(asked, tuple(prompts), tuple(map(rig.chunk, prompts)))
            seconds = repeat(5, lambda work=work: rig.launch("device", units, work))
            details[f"hybrid_ms_{rows}+{new}"] = seconds * 1e3
            rig.give_back(prompts)
        rig.give_back(asked)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--router-skew", type=float, default=0.0, help="see `twolane serve`")
    parser.add_argument("--parts", action="store_true", help="and one row's time, by breakdown.py")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rate, details = reading_rate(), {}
    rig = Rig(args.model, (24, 32, 48), pages=64 * 100, router_skew=args.router_skew)
    details |= {"start_seconds": rig.start_seconds, "reading_tb_s": rate / 1e12}
    figures = decode(rig, details, rate)
    show(figures)
    figures += prefill(rig, details)
    show(figures[-1:])
    cliff(rig, details)
    print(json.dumps(details, default=float), flush=True)

    def keep() -> None:
        if args.out:
            save(args.out, provenance([args.model]), {"figures": figures, "details": details})

    keep()
    if args.parts:
        details["1 row"] = by_parts(rig, 1)
        keep()
    rig.close()
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
