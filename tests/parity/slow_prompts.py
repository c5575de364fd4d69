"""A prefill process in which each layer takes its time: `python -m tests.parity.slow_prompts`."""

import sys
import time
from typing import Any

from twolane.lanes.disaggregated import cpu_prefill
from twolane.lanes.disaggregated.cpu_mirror import MirroredKVCache

SECONDS = 2.0
"""Seconds of each of four layers."""


class SlowCache(MirroredKVCache):
    def push(self, *args: Any) -> None:
        time.sleep(SECONDS)
        super().push(*args)


if __name__ == "__main__":
    cpu_prefill.MirroredKVCache = SlowCache  # type: ignore[misc]
    sys.exit(cpu_prefill.main())
