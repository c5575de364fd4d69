"""The lanes of dense models on one GPU: each phase alone, in one pass, and side by side.

Times are the lanes' own: from the event before a launch to the event after it. `--only` names
models or parts; what a part needs is measured with it.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness import Report, copy_rate, seconds, timed
from measured import Figure, at_least, at_most
from rig import (
    PAGE,
    Rig,
    both_lanes,
    decode_attention_of,
    decode_seconds,
    finished,
    pass_seconds,
    prompt_rates,
    prompt_seconds,
    quantiles,
)

from twolane.kernels.prefill_attention.dispatch import (
    PrefillPlan,
    PrefillWorkspace,
    prefill_attention,
)
from twolane.lanes.work import DecodeRow, DecodeWork, PromptRow


def gemms(rig: Rig, tokens: int) -> tuple[Callable[[], object], float]:
    """Return the matrix products of a pass with this many tokens, without the head, and their
    FLOPs."""
    spec, weights = rig.spec, rig.machine.decoder.weights

    def wide(width: int) -> torch.Tensor:
        return torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

    x, a, m = wide(spec.hidden_size), wide(spec.q_size), wide(spec.intermediate_size)
    qkv = wide(spec.q_size + 2 * spec.kv_size)
    gate_up, out = wide(2 * spec.intermediate_size), wide(spec.hidden_size)

    def run() -> None:
        for w in weights.layers:
            torch.mm(x, w.qkv.values.t(), out=qkv)
            torch.mm(a, w.o.values.t(), out=out)
            torch.mm(x, w.mlp.gate_up.values.t(), out=gate_up)
            torch.mm(m, w.mlp.down.values.t(), out=out)

    first = weights.layers[0]
    matrices = first.qkv, first.o, first.mlp.gate_up, first.mlp.down
    per_layer = sum(math.prod(matrix.shape) for matrix in matrices)
    return run, 2.0 * tokens * per_layer * spec.layers


def attention_flops(spec, new: int, reused: int) -> float:
    visible = new * reused + new * (new + 1) / 2
    return 4.0 * spec.layers * spec.heads * spec.head_dim * visible


def solo(rig: Rig, details: dict) -> list[Figure]:
    """Decode steps on every level and prefill on every level, one phase at a time."""
    spec, whole = rig.spec, rig.machine.partitions.units
    bandwidth = copy_rate(torch.cuda.Stream(), 1 << 31)
    rows = rig.decode_rows(64, 2048)
    kv_bytes = 64 * 2048 * spec.kv_bytes_per_token(2)
    weight_bytes = 2 * (spec.parameters - spec.vocab_size * spec.hidden_size)
    steps = {u: decode_seconds(rig, rows, u) for u in rig.machine.partitions.decode_units}
    rig.give_back(rows)
    moved = kv_bytes + weight_bytes
    details |= {
        "copy_tb_s": bandwidth / 1e12,
        "decode_step_ms_64x2048": {u: s * 1e3 for u, s in steps.items()},
        "decode_tb_s_64x2048": {u: moved / s / 1e12 for u, s in steps.items()},
    }
    prefills = details["prefill_tokens_s_8192"] = prompt_rates(rig, 8192)
    bare, flops = gemms(rig, 8192)
    bare_rate = flops / timed(bare, 3)
    rate = (flops + attention_flops(spec, 8192, 0)) * prefills[whole] / 8192
    details |= {"bare_gemm_tflops": bare_rate / 1e12, "prefill_tflops": rate / 1e12}
    few = min(steps, key=lambda u: abs(u - 32))
    step = steps[whole]
    return [
        at_most("decode step over bytes / copy bandwidth", step / (moved / bandwidth), 1.15),
        at_most(f"decode step on {few} SMs over all", steps[few] / step, 1.5),
        at_least("prefill FLOP/s over bare GEMMs", rate / bare_rate, 0.88),
        at_least("prefill of 8192", prefills[whole], 38_000, "tokens/s"),
    ]


def hybrid(rig: Rig, details: dict) -> list[Figure]:
    """64 decodes at 2K and 1,024 new tokens on 4K reused, in one pass."""
    rows = rig.decode_rows(64, 2048)
    took = pass_seconds(rig, rows, 1024, 4096)
    row = rig.prompt(1024, 4096)
    bare, _ = gemms(rig, 1088)
    parts = {"gemms": timed(bare, 7), **attention_alone(rig, rows, row)}
    details["hybrid_ms"] = {"pass": took * 1e3, **{k: v * 1e3 for k, v in parts.items()}}
    rig.give_back([*rows, row])
    return [at_most("hybrid pass over its GEMMs and attentions", took / sum(parts.values()), 1.05)]


def attention_alone(rig: Rig, rows: Sequence[DecodeRow], row: PromptRow) -> dict[str, float]:
    """Return seconds of all layers' decode attention and prefill attention, each alone."""
    spec, runner, whole = rig.spec, rig.lanes.runner, rig.machine.partitions.units
    shape = (spec.heads, spec.head_dim)
    new = row.count
    p = torch.randn(new, *shape, device="cuda", dtype=torch.bfloat16)
    p_out = torch.empty_like(p)
    plan = PrefillPlan.build(
        [(row.start, new)], [rig.held[row.slot]],
        page_size=PAGE, heads=spec.heads, kv_heads=spec.kv_heads,
        dim=spec.head_dim, dtype=p.dtype, units=whole, workspace=PrefillWorkspace("cuda"),
    )  # fmt: skip

    def prompts() -> None:
        for pool in runner.kv.layers:
            prefill_attention(plan, p, pool, p_out)

    decode = decode_attention_of(rig, rows, whole)
    return {"decode attention": timed(decode), "prefill attention": timed(prompts)}


def side_by_side(
    rig: Rig, details: dict, running: int, tokens_bar: float, gap_bar: float
) -> list[Figure]:
    """48 SMs decode, the others prefill prompts of 8,192 tokens."""
    level = min(rig.machine.partitions.levels, key=lambda pd: abs(pd[1] - 48))
    rows, row = rig.decode_rows(running, 2048), rig.prompt(8192)
    both_lanes(rig, level, rows, row, 4, 1.0)
    both = both_lanes(rig, level, rows, row, 4, 6.0)
    gaps = quantiles(both.gaps)
    details[f"both_lanes_{level[0]}_{level[1]}"] = {
        "tokens_s": both.tokens_s,
        "tbt_ms": gaps,
        "decode_idle": both.decode_idle,
        "prefill_idle": both.prefill_idle,
        "launch_ms": statistics.median(both.launch_seconds) * 1e3,
    }
    rig.give_back([*rows, row])
    name = rig.name
    return [
        at_least(f"{name}: prefill beside decode", both.tokens_s, tokens_bar, "tokens/s"),
        at_most(f"{name}: P99 TBT beside prefill", gaps[99], gap_bar, "ms"),
        at_most(f"{name}: decode lane idle", both.decode_idle, 0.02),
        at_most(f"{name}: prefill lane idle", both.prefill_idle, 0.04),
    ]


def switches(rig: Rig, details: dict) -> list[Figure]:
    """Device time between two decode steps on different levels."""
    levels = [d for _, d in rig.machine.partitions.levels[1:3]]
    rows = rig.decode_rows(16, 512)
    work = DecodeWork(rows, 1)
    tickets = [rig.launch("decode", levels[i % 2], work) for i in range(60)]
    finished(tickets[-1])
    gaps = [b.start - a.end for a, b in itertools.pairwise(tickets)]
    same = [rig.launch("decode", levels[0], work) for i in range(60)]
    finished(same[-1])
    stays = [b.start - a.end for a, b in itertools.pairwise(same)]
    rig.give_back(rows)
    details["switch_us"] = {
        "switch": statistics.median(gaps) * 1e6, "same level": statistics.median(stays) * 1e6,
    }  # fmt: skip
    return [at_most("level switch", statistics.median(gaps) * 1e6, 50, "us")]


def host(rig: Rig, details: dict) -> list[Figure]:
    """Return the time of the host to launch a decode step."""
    figures = []
    for count, bar in ((64, 0.4), (256, 1.2)):
        rows = rig.decode_rows(count, 256)
        work = DecodeWork(rows, 1)
        samples = []
        for _ in range(40):
            ticket = rig.launch("decode", rig.machine.partitions.units, work)
            rig.lanes.synchronize()  # asleep: who polls takes Python's lock from who launches
            samples.append(finished(ticket).host_seconds)
        figures.append(
            at_most(f"launching a step of {count}", statistics.median(samples) * 1e3, bar, "ms")
        )
        rig.give_back(rows)
    return figures


def memory(rig: Rig, details: dict) -> list[Figure]:
    runner = rig.lanes.runner
    kinds = {"decode graphs": runner.steps.levels, "prefill graphs": runner.passes.levels}
    for kind, levels in kinds.items():
        details[kind] = {
            u: {"mib": g.bytes / 2**20, "seconds": g.seconds} for u, g in levels.items()
        }
    graphs = [g for levels in kinds.values() for g in levels.values()]
    return [
        at_most("graphs of all levels", sum(g.bytes for g in graphs) / 1e9, 2.0, "GB"),
        at_most("capture", sum(g.seconds for g in graphs), 60, "s"),
    ]


def big(rig: Rig, details: dict) -> list[Figure]:
    """34B: the solo figures."""
    whole = rig.machine.partitions.units
    rows = rig.decode_rows(32, 2048)
    step = decode_seconds(rig, rows, whole)
    rig.give_back(rows)
    return [
        at_most("34B: decode step of 32 at 2K", step * 1e3, 20.2, "ms"),
        at_least("34B: prefill of 8192", 8192 / prompt_seconds(rig, 8192), 8300, "tokens/s"),
    ]


@dataclass(frozen=True)
class _Pace:
    """Times of the parts of a forward pass on one rig."""

    steps: dict[int, float]
    """Seconds of a decode step of 64 at 2,048 tokens, by SMs."""
    reads: dict[int, float]
    """Bytes per second that decode attention reads, by SMs."""
    prefill: float
    """Seconds of a prompt of 8,192 tokens."""
    reused: float
    """Seconds of 4,096 tokens after 8,192 that are reused."""


def _pace(rig: Rig) -> _Pace:
    rows, units = rig.decode_rows(64, 2048), rig.machine.partitions.decode_units
    steps = {u: decode_seconds(rig, rows, u) for u in units}
    moved = 64 * 2048 * rig.machine.page_token_bytes
    reads = {}
    for u in units:
        stream = rig.machine.partitions.capture_stream("decode", u)
        reads[u] = moved / seconds([decode_attention_of(rig, rows, u)], stream)
    rig.give_back(rows)
    return _Pace(steps, reads, prompt_seconds(rig, 8192), prompt_seconds(rig, 4096, reused=8192))


def narrow(plain: Rig, details: dict) -> list[Figure]:
    """Compare FP8 weights and KV cache with bfloat16 on one GPU."""
    wide = _pace(plain)
    plain.close()
    rig = Rig(plain.name, (24, 32), pages=6400, quantization="fp8", kv_cache_dtype="fp8")
    thin = _pace(rig)
    rig.close()
    details |= {"bfloat16": asdict(wide), "fp8": asdict(thin)}
    whole = max(wide.steps)
    return [
        at_most("FP8: decode step over bfloat16's", thin.steps[whole] / wide.steps[whole], 0.62),
        at_most("FP8: the same on 32 SMs", thin.steps[32] / wide.steps[32], 0.65),
        at_least("FP8: prefill of 8192 over bfloat16's", wide.prefill / thin.prefill, 1.4),
        at_least("FP8: decode attention on 24 SMs", thin.reads[24] / 1e12, 2.1, "TB/s"),
    ]


def four_bits(plain: Rig, details: dict) -> list[Figure]:
    """Compare 4-bit weights with the other rig's on one GPU, both with KV in bfloat16."""
    wide, form = _pace(plain), plain.quantization or "bfloat16"
    plain.close()
    rig = Rig(plain.name, plain.decode_units, pages=plain.pages, quantization="int4")
    thin = _pace(rig)
    rig.close()
    details |= {form: asdict(wide), "int4": asdict(thin)}
    whole = max(wide.steps)
    return [
        at_most(f"int4: decode step over {form}'s", thin.steps[whole] / wide.steps[whole], 0.62),
        at_most("int4: the same on 32 SMs", thin.steps[32] / wide.steps[32], 0.9),
        at_least(f"int4: prefill of 8192 over {form}'s", wide.prefill / thin.prefill, 0.9),
    ]


def _rig(part: str, model: str) -> Rig:
    """Return the rig of a part."""
    if part == "fp8":
        return Rig(model, (24, 32), pages=6400)
    if part != "int4":
        return Rig(model)
    large = torch.cuda.get_device_properties(0).total_memory > 110e9
    return Rig(model, (32,), pages=5600, quantization=None if large else "fp8")


Part = Callable[[Rig, dict], list[Figure]]
PARTS: dict[str, tuple[str, dict[str, Part]]] = {
    "qwen3": (
        "qwen3-8b",
        {"memory": memory, "solo": solo, "hybrid": hybrid, "switches": switches, "host": host},
    ),
    "fp8": ("qwen3-8b", {"narrow": narrow}),
    "int4": ("codellama-34b", {"four_bits": four_bits}),
    "llama": (
        "llama-3.1-8b",
        {"both": lambda rig, details: side_by_side(rig, details, 64, 23_000, 16)},
    ),
    "codellama": (
        "codellama-34b",
        {"big": big, "both": lambda rig, details: side_by_side(rig, details, 32, 4900, 34)},
    ),
}


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("--only", nargs="*", help=f"models ({', '.join(PARTS)}), or model.part")


def main(report: Report, given: argparse.Namespace) -> None:
    """Measure the parts that are asked for, each model's on one rig."""
    for key, (model, parts) in PARTS.items():
        names = [name for name in parts if not given.only or {key, f"{key}.{name}"} & {*given.only}]
        if not names:
            continue
        rig = _rig(key, model)
        found = {"start_seconds": rig.start_seconds, "kv_tokens": rig.pages * PAGE}
        for name in names:
            begun = time.monotonic()
            with report.attempt(f"{key}.{name}"):
                report.hold(*parts[name](rig, found))
            print(f"     [{key}.{name} {time.monotonic() - begun:.1f} s]", flush=True)
        report.add(model=model, part=key, **found)
        rig.close()
