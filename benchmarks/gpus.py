"""What benchmarks on GPUs share: where they ran, and commands side by side, each on one GPU."""

import contextlib
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from twolane import __version__

GRACE = 40.0
"""Seconds that a command has to stop what it started."""


def where() -> dict[str, object]:
    """The command, the commit, the GPUs and the versions, for a file of results."""
    query = "--query-gpu=name,driver_version,power.limit,clocks.max.sm"
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "rev-parse", "HEAD"),
        "gpu": _output("nvidia-smi", query, "--format=csv,noheader"),
        "versions": {
            "twolane": __version__,
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }


def _output(*words: str) -> str:
    """What a command says; nothing if there is none."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


class Command(NamedTuple):
    """What Python is called with, and where its output goes."""

    arguments: Sequence[str]
    log: Path


def run(commands: Sequence[Command], gpus: Sequence[int], seconds: float) -> None:
    """Run them in this order, one at a time on each GPU; after so many seconds those that are left
    are interrupted, as by Ctrl-C, or not begun."""
    waiting: queue.SimpleQueue[Command] = queue.SimpleQueue()
    for command in commands:
        waiting.put(command)
    end = time.monotonic() + seconds

    def work(gpu: int) -> None:
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < end:
                _run(waiting.get_nowait(), gpu, end)

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run(command: Command, gpu: int, end: float) -> None:
    command.log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    words, begun = [sys.executable, *command.arguments], time.monotonic()
    with (
        command.log.open("ab") as log,
        subprocess.Popen(words, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
    took = time.monotonic() - begun
    print(f"GPU {gpu}: {command.log}: {process.returncode} after {took:.0f} s", flush=True)
