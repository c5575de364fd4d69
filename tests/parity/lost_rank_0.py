"""Rank 0 of two on a CPU, serving without an end: `python -m tests.parity.lost_rank_0 MODEL`.

It prints the process id of rank 1 when both serve.
"""

import itertools
import sys
import threading
import time
from pathlib import Path

from tests.parity.ranks import Ranks, on_cpu
from twolane.engine.messages import Submit
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system


def endless(ranks: Ranks, prefix: str = "") -> None:
    """Serve until a rank is lost."""
    for turn in itertools.count():
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        submits = [Submit(f"{prefix}{turn}-{i}", [5, 6, 7 + i], params) for i in range(4)]
        ranks.serve(make_system("static-split", {}), submits)


if __name__ == "__main__":
    ranks = on_cpu(Path(sys.argv[1]), 2, 256, 16, 8)
    threading.Timer(0.2, lambda: print(ranks.processes[0].pid, flush=True)).start()
    endless(ranks)
    time.sleep(60)
