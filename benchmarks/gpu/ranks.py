"""One model on several GPUs of a host.

First one process a GPU times all-reduces alone (the case `all-reduce`); then the lanes are driven
without the engine. `--only alone` measures what one of the ranks takes where nothing is summed,
which tells how much of a step waits for the others. `--only passes` times hybrid passes and a
prompt by itself, as `alone` does with nothing summed. `--only beside` also takes one GPU
(`qwen3-8b 1`), to compare how much longer gaps between tokens are beside prefill.
"""

import argparse
import itertools
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
from harness import Report, read_rate
from measured import cpu_seconds
from rig import (
    SHARE,
    RankedRig,
    both_lanes,
    decode_seconds,
    finished,
    pass_seconds,
    prompt_rates,
    quantiles,
)

from twolane.devices import AllReduce
from twolane.lanes.work import DecodeWork
from twolane.model.load.hub import resolve

PASSES, PASS_ROWS = (192, 256, 320, 384, 512), 10
"""Tokens of the hybrid passes, and how many of these are decode rows."""
PATIENCE = 120.0
ONLY = ("all", "steps", "passes", "alone", "beside")
"""What to measure."""


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("model")
    add("ranks", type=int)
    add("--all-reduce", default="nccl", choices=get_args(AllReduce))
    add("--only", default="all", choices=ONLY)


def all_reduce_seconds(ranks: int, hidden: int) -> dict[tuple[int, int], float]:
    """Return the seconds of NCCL's sums alone, by rows and SMs."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sums.json"
        words = ["all-reduce", str(ranks), str(hidden), "--out", str(out)]
        subprocess.run([sys.executable, str(Path(__file__).parent), *words], timeout=PATIENCE)
        rows = json.loads(out.read_text())["rows"]
    return {
        (row["rows"], row["units"]): row["us"] * 1e-6 for row in rows if row.get("way") == "NCCL"
    }


def measure(rig: RankedRig, given: argparse.Namespace, report: Report) -> None:
    """Measure steps, and what else is asked for."""
    report.add(start_s=rig.start_seconds, load_s=rig.load_seconds)
    rows, only, parts = rig.decode_rows(64, 2048), given.only, rig.machine.partitions
    steps = {u: decode_seconds(rig, rows, u) * 1e3 for u in parts.decode_units}
    ones = {u: decode_seconds(rig, rows[:1], u) * 1e3 for u in parts.decode_units}
    report.add(decode_step_ms=steps, decode_step_of_1_ms=ones)
    if only in ("alone", "passes"):
        report.add(hybrid_ms=passes(rig, rows[:PASS_ROWS]))
    if only in ("all", "alone", "passes"):
        report.add(prefill_tokens_s_8192=prompt_rates(rig, 8192))
    if only in ("all", "alone", "beside"):
        report.add(**beside(rig, rows))
    if only == "all":
        floor(rig, steps[parts.units], given, report)
        report.add(follower_cpu=follower_use(rig, rows, parts.units))


def floor(rig: RankedRig, step: float, given: argparse.Namespace, report: Report) -> None:
    """Compare a step's milliseconds with 1.05 times the bytes that it reads and its sums."""
    spec, tp, whole = rig.spec, rig.machine.tp, rig.machine.partitions.units
    weights = 2 * (spec.parameters - spec.vocab_size * spec.hidden_size) / tp
    kv = 64 * 2048 * rig.machine.page_token_bytes
    count, rate = 2 * spec.layers, read_rate()
    sums = count * 1e3 * given.sums.get((64, whole), 0.0)
    bar = 1.05 * ((weights + kv) / rate * 1e3 / 0.82 + sums)
    report.add(
        read_tb_s=rate / 1e12,
        all_reduces=count,
        all_reduce_share=sums / step,
        bar_ms=bar,
        over_bar=step / bar,
    )


def passes(rig: RankedRig, rows: Any) -> dict[str, float]:
    """Return milliseconds of hybrid passes of the whole device, by their tokens and how many the
    prompt reuses."""
    return {
        f"{tokens} on {reused}": 1e3 * pass_seconds(rig, rows, tokens - len(rows), reused)
        for tokens, reused in itertools.product(PASSES, (0, 4096))
    }


def beside(rig: RankedRig, rows: Any) -> dict[str, Any]:
    """Return the gaps of decode steps alone, and beside prefill of 8,192 tokens."""
    alone, row = gaps(rig, rows, SHARE), rig.prompt(8192)
    level = next(level for level in rig.machine.partitions.levels if level[1] == SHARE)
    both_lanes(rig, level, rows, row, 4, 1.0)
    both = both_lanes(rig, level, rows, row, 4, 5.0)
    rig.give_back([row])
    return {
        "level": level,
        "beside_tokens_s": both.tokens_s,
        "gap_ms_alone": quantiles(alone),
        "gap_ms_beside": quantiles(both.gaps),
        "p99_beside_over_alone": float(np.percentile(both.gaps, 99) / np.percentile(alone, 99)),
        "decode_idle": both.decode_idle,
        "prefill_idle": both.prefill_idle,
    }


def gaps(rig: RankedRig, rows: Any, units: int, count: int = 300) -> np.ndarray:
    """Return seconds between the ends of steps of the decode lane alone."""
    work = DecodeWork(tuple(rows), 1)
    tickets = []
    for _ in range(count):
        tickets.append(rig.launch("decode", units, work))
        if len(tickets) > 2:
            finished(tickets[-3])
    finished(tickets[-1])
    return np.array([b.end - a.end for a, b in itertools.pairwise(tickets[10:])])


def follower_use(rig: RankedRig, rows: Any, units: int) -> dict[str, float]:
    """Return the share of a core that rank 1 uses, with steps as fast as they go and at rest."""
    pid = rig.machine.followers.processes[0].pid
    begun, used = time.monotonic(), cpu_seconds(pid)
    gaps(rig, rows, units, 200)
    took = time.monotonic() - begun
    busy = (cpu_seconds(pid) - used) / took
    time.sleep(0.2)
    used = cpu_seconds(pid)
    time.sleep(1.0)
    return {"busy": busy, "steps_s": 200 / took, "rest": cpu_seconds(pid) - used}


def main(report: Report, given: argparse.Namespace) -> None:
    """Measure one model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # tells what sums were chosen
    given.sums = {}
    if given.only == "all":
        hidden = resolve(given.model, "dummy").spec().hidden_size
        given.sums = all_reduce_seconds(given.ranks, hidden)
        report.add(all_reduce_us={f"{r} on {u}": 1e6 * s for (r, u), s in given.sums.items()})
    alone = given.only == "alone"
    rig = RankedRig(given.model, given.ranks, given.all_reduce, alone=alone)
    measure(rig, given, report)
    rig.close()
