"""A rank that is held up now and then, on host and GPU, and tells what it has launched."""

import faulthandler
import random
import signal
import sys
import time
from collections import deque
from typing import Any

import torch

from twolane.lanes.cuda.runner import CudaRunner

HOST_SHARE, HOST_SECONDS = 0.05, 0.003
"""Share of the launches before which the host waits, and for how long at most."""
DEVICE_SHARE, DEVICE_CYCLES = 0.2, 4_000_000
"""Share of the launches before which the stream waits, and for how many clock cycles at most."""
TOLD = 24
"""Launches that a rank tells of when it is asked where it stands."""


def install(seed: int) -> None:
    """Hold launches up at random; on SIGUSR1 tell the stacks and the last launches."""
    rng, run = random.Random(seed), CudaRunner.run
    last: deque[str] = deque(maxlen=TOLD)
    signal.signal(signal.SIGUSR1, lambda *_: print(*last, sep="\n", file=sys.stderr, flush=True))
    faulthandler.register(signal.SIGUSR1, chain=True)  # tells the stacks even from within CUDA

    def late(self: CudaRunner, *args: Any) -> Any:
        work, lane, units, *_ = args
        last.append(f"{lane} {units} {work}"[:160])
        if rng.random() < HOST_SHARE:
            time.sleep(rng.random() * HOST_SECONDS)
        if rng.random() < DEVICE_SHARE:
            torch.cuda._sleep(rng.randrange(DEVICE_CYCLES))
        return run(self, *args)

    CudaRunner.run = late  # type: ignore[method-assign, assignment]
