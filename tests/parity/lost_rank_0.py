"""Rank 0 of two on a CPU, serving without an end: `python -m tests.parity.lost_rank_0 MODEL`.

With a second argument rank 1 computes the prompts. The process id of rank 1 is printed when both
serve.
"""

import itertools
import sys
import threading
import time
from pathlib import Path

from tests.parity.ranks import Ranks, apart, on_cpu
from twolane.engine.messages import Submit
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system


def endless(ranks: Ranks, prefix: str = "", system: str = "static-split") -> None:
    """Serve until a rank is lost."""
    for turn in itertools.count():
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        submits = [Submit(f"{prefix}{turn}-{i}", [5, 6, 7 + i], params) for i in range(4)]
        ranks.serve(make_system(system, {}), submits)


if __name__ == "__main__":
    model, disaggregated = Path(sys.argv[1]), len(sys.argv) > 2
    ranks = apart(model, 256, 16, 8) if disaggregated else on_cpu(model, 2, 256, 16, 8)
    threading.Timer(0.2, lambda: print(ranks.processes[0].pid, flush=True)).start()
    endless(ranks, system="two-stream" if disaggregated else "static-split")
    time.sleep(60)
