"""A prefill process in which each layer takes its time: `python -m tests.parity.slow_prompts`."""

import sys
import time
from typing import Any

from twolane.lanes.cpu import prompts
from twolane.transfer.mirror import MirroredCache

SECONDS = 2.0
"""Seconds of each of four layers."""


class SlowCache(MirroredCache):
    def push(self, *args: Any) -> None:
        time.sleep(SECONDS)
        super().push(*args)


if __name__ == "__main__":
    prompts.MirroredCache = SlowCache  # type: ignore[misc]
    sys.exit(prompts.main())
