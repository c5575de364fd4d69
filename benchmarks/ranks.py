"""Figures of one model on several GPUs: `python benchmarks/ranks.py qwen3-14b 2 [--out FILE]`.

On GPUs of one host that do nothing else, with dummy weights in the true shapes and a KV pool of
random numbers. First one process a GPU times all-reduces alone; then the lanes are driven without
the engine, as in `engine.py`. Values are medians but where a percentile is named; every ratio is of
two things measured in this run. `--only alone` measures what one of the ranks takes where nothing
is summed, which tells how much of a step waits for the others. `--only passes` times hybrid passes
and a prompt by itself, as `alone` does with nothing summed. `--only beside` also takes one GPU
(`qwen3-8b 1`), to compare how much longer gaps between tokens are beside prefill.
"""

import argparse
import itertools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from engine import Rig, both_lanes, decode_seconds, finished, repeat, timed
from measured import StartProgress, cpu_seconds
from torch import distributed as dist

from twolane.common import garbage
from twolane.engine.config import AllReduce
from twolane.lanes.cuda.decode_graphs import captured
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.ranks.cuda_machine import RankedCudaMachine, load_rank
from twolane.lanes.settings import DeviceSettings, LaneSizes
from twolane.lanes.slot_table import PendingSlotUpdates
from twolane.lanes.work import DecodeWork, HybridWork
from twolane.model.load.hub import resolve
from twolane.parallel import nccl
from twolane.parallel.channel import NullChannel
from twolane.parallel.group import CHANNELS
from twolane.results.provenance import provenance, save

PAGE = 32
POOL_TOKENS = 262_144
"""Tokens of the KV pool: 64 requests of 2K and a prompt of 8K have room."""
SLOTS = 80
"""Most concurrent requests."""
SHARE = 48
"""SMs of the decode lane beside prefill."""
ROWS = (16, 64, 128, 256, 320, 512, 1024, 2048, 8192)
"""Rows of the all-reduces that are timed alone."""
PASSES, PASS_ROWS = (192, 256, 320, 384, 512), 10
"""Tokens of the hybrid passes, and how many of these are decode rows."""
PATIENCE = 60.0
ONLY = ("all", "steps", "passes", "alone", "beside")
"""What to measure."""


class RankedRig(Rig):
    """A model on several GPUs with its lanes, driven without the engine.

    Args:
        name: of the model.
        ranks: number of GPUs.
        all_reduce: how decode steps sum.
        alone: whether this process has one rank's part, and sums nothing.
        quantization: see `DeviceSettings`.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        all_reduce: str,
        *,
        alone: bool = False,
        quantization: str | None = None,
    ) -> None:
        self.name, self.slots, self.pages = name, SLOTS, POOL_TOKENS // PAGE
        settings = DeviceSettings(
            model=name,
            load_format="dummy",
            device="cuda",
            levels=(SHARE,),
            tensor_parallel_size=ranks,
            all_reduce=all_reduce,
            quantization=quantization,
        )
        progress = StartProgress()
        if alone or ranks == 1:
            self.machine = CudaMachine(*load_rank(settings, 0, progress))
            if ranks > 1:
                self.machine.channels = dict.fromkeys(CHANNELS, NullChannel(0, ranks))
        else:
            self.machine = RankedCudaMachine(settings, progress)
        self.load_seconds = progress.seconds
        print(f"room for {self.machine.kv_bytes(40_960) / 2**30:.1f} GiB of KV", flush=True)
        sizes = LaneSizes(self.pages, PAGE, self.slots, 40_960)
        self.lanes = self.machine.start(sizes, lambda: None, progress)
        self.lanes.fill_kv()
        self.held, self.untold, self.free = {}, PendingSlotUpdates(), list(range(self.pages))
        self.start_seconds = progress.seconds
        garbage.freeze()  # as the engine does


def time_all_reduces(rank: int, ranks: int, folder: Path, hidden: int) -> dict[str, float]:
    """Measure the microseconds of an all-reduce by rows and SMs, as graphs of forty; one process
    per GPU."""
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    channel = nccl.join(rank, ranks, dist.FileStore(str(folder / "ids"), ranks))
    parts, times = GreenContexts(rank, (SHARE,)), {}
    for rows, units in itertools.product(ROWS, (parts.units, SHARE)):
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        each = 40 if rows <= 512 else 8

        def run(x: torch.Tensor = x, each: int = each) -> None:
            for _ in range(each):
                channel.all_reduce(x)

        stream = parts.stream("decode", units)
        with torch.cuda.stream(stream):
            run()
        graph = captured(stream, None, run)
        samples = []
        for _ in range(9):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                a.record()
                graph.replay()
                b.record()
            b.synchronize()
            samples.append(a.elapsed_time(b) * 1e3 / each)
            x.normal_()
        times[f"{rows} rows on {units} SMs"] = statistics.median(samples[2:])
    return times


def all_reduces(ranks: int, hidden: int) -> dict[str, float]:
    """Return the measurements of rank 0 of `time_all_reduces`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--alone", str(ranks), folder, str(hidden)]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, ranks)]
        ran = subprocess.run([*command, "0"], stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
        for other in others:
            other.wait(PATIENCE)
    pairs = (line.rsplit(": ", 1) for line in ran.stdout.splitlines() if ": " in line)
    return {name: float(value) for name, value in pairs}


def read_rate() -> float:
    """Return the bytes per second of a kernel that only reads, on all SMs."""
    x = torch.randn(1 << 31, device="cuda", dtype=torch.bfloat16).view(-1, 1 << 14)
    return x.nbytes / timed(lambda: x.view(torch.int32).amax(), 5)


class Notes:
    """Results so far, printed at once and written to a file.

    Args:
        path: of the file, or None.
        workload: what is measured.
    """

    def __init__(self, path: Path | None, workload: dict[str, object]) -> None:
        self._path, self._workload = path, workload
        self.found: dict[str, object] = {}

    def __call__(self, **values: object) -> None:
        self.found.update(values)
        print(*(f"{name} {value}" for name, value in values.items()), flush=True)
        if self._path:
            save(self._path, provenance(self._workload), {"figures": self.found})


def measure(rig: RankedRig, only: str, note: Notes) -> None:
    """The figures of issue and notes."""
    spec, tp, whole = rig.spec, rig.machine.tp, rig.machine.partitions.units
    note(start_s=round(rig.start_seconds, 1), load_s=round(rig.load_seconds, 1))
    rows = rig.decode_rows(64, 2048)
    units = rig.machine.partitions.decode_units
    steps = {u: decode_seconds(rig, rows, u) * 1e3 for u in units}
    note(decode_step_ms={u: round(ms, 3) for u, ms in steps.items()})
    ones = {u: decode_seconds(rig, rows[:1], u) * 1e3 for u in units}
    note(decode_step_of_1_ms={u: round(ms, 3) for u, ms in ones.items()})
    if only in ("alone", "passes"):
        passes(rig, rows[:PASS_ROWS], note)
    if only in ("all", "alone", "passes"):
        prefill(rig, note)
    if only in ("alone", "beside"):
        beside(rig, rows, note)
    if only != "all":
        return
    sums = note.found["all_reduce_us"]
    weights = 2 * (spec.parameters - spec.vocab_size * spec.hidden_size) / tp
    kv = 64 * 2048 * rig.machine.page_token_bytes
    count, rate = 2 * spec.layers, read_rate()
    alone = sums.get(f"64 rows on {whole} SMs", 0.0)
    floor = (weights + kv) / rate * 1e3 / 0.82 + count * alone * 1e-3
    note(
        read_tb_s=round(rate / 1e12, 3),
        all_reduces=count,
        all_reduce_share=round(count * alone * 1e-3 / steps[whole], 3),
        bar_ms=round(1.05 * floor, 3),
        over_bar=round(steps[whole] / (1.05 * floor), 3),
    )
    note(follower_cpu=follower_use(rig, rows, whole))
    beside(rig, rows, note)


def prefill(rig: RankedRig, note: Notes) -> None:
    """Tokens/s of a prompt of 8,192 by itself, on prefill's share and on the whole device."""
    parts, row = rig.machine.partitions, rig.prompt(8192)
    for units in [*(p for p, _ in parts.levels), parts.units]:
        seconds = repeat(1, lambda u=units: rig.launch("prefill", u, rig.prefill(row)))
        note(**{f"prefill_tokens_s_{units}": round(8192 / seconds)})
    rig.give_back([row])


def passes(rig: RankedRig, rows, note: Notes) -> None:
    """Hybrid passes of the whole device, by their tokens and how many the prompt reuses."""
    took = {}
    for tokens, reused in itertools.product(PASSES, (0, 4096)):
        row = rig.prompt(tokens - len(rows), reused)
        work = HybridWork(rows, (row,), (rig.chunk(row),))
        seconds = repeat(7, lambda w=work: rig.launch("device", rig.machine.partitions.units, w))
        took[f"{tokens} on {reused}"] = round(seconds * 1e3, 3)
        rig.give_back([row])
    note(hybrid_ms=took)


def beside(rig: RankedRig, rows, note: Notes) -> None:
    """Gaps of decode steps alone, and beside prefill of 8,192 tokens."""
    alone_gaps, row = gaps(rig, rows, SHARE), rig.prompt(8192)
    level = next(level for level in rig.machine.partitions.levels if level[1] == SHARE)
    both_lanes(rig, level, rows, row, 4, 1.0)
    both = both_lanes(rig, level, rows, row, 4, 5.0)
    beside = np.array(both.gaps) * 1e3
    note(
        level=level,
        beside_tokens_s=round(both.tokens_s),
        gap_ms_alone=quantiles(alone_gaps),
        gap_ms_beside=quantiles(beside),
        p99_beside_over_alone=round(
            float(np.percentile(beside, 99) / np.percentile(alone_gaps, 99)), 3
        ),
        decode_idle=round(both.decode_idle, 3),
        prefill_idle=round(both.prefill_idle, 3),
    )
    rig.give_back([row])


def quantiles(values: np.ndarray) -> dict[int, float]:
    return {q: round(float(np.percentile(values, q)), 3) for q in (50, 90, 99, 100)}


def gaps(rig: RankedRig, rows, units: int, count: int = 300) -> np.ndarray:
    """Return milliseconds between the ends of steps of the decode lane alone."""
    work = DecodeWork(tuple(rows), 1)
    tickets = []
    for _ in range(count):
        tickets.append(rig.launch("decode", units, work))
        if len(tickets) > 2:
            finished(tickets[-3])
    finished(tickets[-1])
    return np.array([b.end - a.end for a, b in itertools.pairwise(tickets[10:])]) * 1e3


def follower_use(rig: RankedRig, rows, units: int) -> dict[str, float]:
    """Return the share of a core that rank 1 uses, with steps as fast as they go and at rest."""
    pid = rig.machine.followers.processes[0].pid
    begun, used = time.monotonic(), cpu_seconds(pid)
    gaps(rig, rows, units, 200)
    took = time.monotonic() - begun
    busy = (cpu_seconds(pid) - used) / took
    time.sleep(0.2)
    used = cpu_seconds(pid)
    time.sleep(1.0)
    return {"busy": round(busy, 3), "steps_s": round(200 / took), "rest": cpu_seconds(pid) - used}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--all-reduce", default="nccl", choices=get_args(AllReduce))
    parser.add_argument("--only", default="all", choices=ONLY)
    parser.add_argument("--out", type=Path)
    if sys.argv[1:2] == ["--alone"]:
        ranks, folder, hidden, rank = sys.argv[2:]
        for name, us in time_all_reduces(int(rank), int(ranks), Path(folder), int(hidden)).items():
            print(f"{name}: {us:.1f}", flush=True)
        os._exit(0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # tells what sums were chosen
    workload = {"model": args.model, "ranks": args.ranks, "all_reduce": args.all_reduce}
    note = Notes(args.out, {**workload, "only": args.only})
    if args.only == "all":
        hidden = resolve(args.model, "dummy").spec().hidden_size
        note(all_reduce_us=all_reduces(args.ranks, hidden))
    rig = RankedRig(args.model, args.ranks, args.all_reduce, alone=args.only == "alone")
    measure(rig, args.only, note)
    rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
