"""Shared parts of benchmarks of servers on GPUs: options, and parallel commands, one on each
GPU."""

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from twolane.common.resources import usable_cores
from twolane.estimate.profile import SHIPPED

GRACE = 40.0
"""Seconds that a command has to stop what it started."""
POLL = 0.2
"""Seconds between two checks whether a command has ended."""
WARMUPS = 24
"""Concurrent warm-up requests: a server's and a client's first memory is slow."""


def options(description: str, work: str, out: str) -> argparse.ArgumentParser:
    """Return the options of a resumable benchmark with a folder of results."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, nargs="*", default=[0], help="no number: only what needs no GPU")
    add("--seconds", type=float, default=1e9, help="end what runs on GPUs after so long")
    add("--work", type=Path, default=Path(work), help="folder of the runs")
    add(
        "--results",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder of earlier results, which say where searches begin",
    )
    add("--out", type=Path, default=Path(__file__).parent / "results" / out, help="folder")
    return parser


def profile(model: str) -> str:
    """Return the file of a model's profile on an H200."""
    return str(SHIPPED / f"{model}-h200.json")


class Command(NamedTuple):
    """Arguments of the Python interpreter, and the file of the output."""

    arguments: Sequence[str]
    log: Path


def run(groups: Sequence[Sequence[Command]], gpus: Sequence[int], seconds: float) -> None:
    """Run them in this order, one at a time on each GPU, which has its share of the CPUs, those of
    a group on the same, for cards differ; after so many seconds, or at Ctrl-C or SIGTERM, those
    that are left are interrupted or not begun."""
    waiting: queue.SimpleQueue[Sequence[Command]] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.daemon = True
    timer.start()
    signals = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, lambda *_: stop.set()) for number in signals]

    def work(place: int, gpu: int) -> None:
        cpus = usable_cores()
        share = len(cpus) // len(gpus)
        if share and sys.platform == "linux":
            own = cpus[share * place : share * (place + 1)]
            os.sched_setaffinity(0, own)  # of this thread and its children
        with contextlib.suppress(queue.Empty):
            while True:
                for command in waiting.get_nowait():
                    if stop.is_set():
                        return
                    _run(command, gpu, stop)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, handler in zip(signals, before, strict=True):
        signal.signal(number, handler)


def _run(command: Command, gpu: int, stop: threading.Event) -> None:
    command.log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    words, begun = [sys.executable, *command.arguments], time.monotonic()
    with (
        command.log.open("ab") as log,
        subprocess.Popen(
            words,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a terminal's Ctrl-C comes once, from us
        ) as process,
    ):
        while process.poll() is None and not stop.wait(POLL):
            pass
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
    took = time.monotonic() - begun
    print(f"GPU {gpu}: {command.log}: {process.returncode} after {took:.0f} s", flush=True)
