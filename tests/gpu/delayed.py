"""A rank that is held up now and then, on its host and on its GPU."""

import random
import time
from typing import Any

import torch

from twolane.lanes.cuda.runner import CudaRunner

HOST_SHARE, HOST_SECONDS = 0.05, 0.003
"""Share of the launches before which the host waits, and for how long at most."""
DEVICE_SHARE, DEVICE_CYCLES = 0.2, 4_000_000
"""Share of the launches before which the stream waits, and for how many clock cycles at most."""


def install(seed: int) -> None:
    """Hold this process's launches up at random."""
    rng, run = random.Random(seed), CudaRunner.run

    def late(self: CudaRunner, *args: Any) -> Any:
        if rng.random() < HOST_SHARE:
            time.sleep(rng.random() * HOST_SECONDS)
        if rng.random() < DEVICE_SHARE:
            torch.cuda._sleep(rng.randrange(DEVICE_CYCLES))
        return run(self, *args)

    CudaRunner.run = late  # type: ignore[method-assign, assignment]
