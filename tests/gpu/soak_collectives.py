"""A million collectives with both lanes busy: `python -m tests.gpu.soak_collectives 4`.

Every rank replays the same graphs in the same order, the decode lane's on 48 SMs and the prefill
lane's on the others, and is held up now and then; every sum is compared on the device.
"""

import argparse
import faulthandler
import os
import random
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

DECODE, PREFILL = (40, 64), (10, 512)
"""Sums in a graph of each lane, and the rows of each."""
WIDTH = 4096
SHARE = 48
QUEUED = 6
"""Graphs of a lane that are queued at a time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("--count", type=int, default=1_000_000, help="sums of both lanes")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, after the start")
    parser.add_argument("--all-reduce", default="nccl", choices=("nccl", "two-shot"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds + 60, exit=True)
    store = dist.TCPStore("127.0.0.1", args.port, is_master=not args.port, wait_for_workers=False)
    others = []
    if args.rank == 0:
        command = [sys.executable, "-m", "tests.gpu.soak_collectives", *sys.argv[1:]]
        for rank in range(1, args.ranks):
            told = ["--rank", str(rank), "--port", str(store.port)]
            others.append(subprocess.Popen([*command, *told]))
    found = soak(args, store)
    print(f"rank {args.rank}: {found}", flush=True)
    codes = [other.wait(30) for other in others]
    if args.rank == 0 and args.out:
        from twolane.results.provenance import provenance, save

        workload = {"ranks": args.ranks, "all_reduce": args.all_reduce}
        save(args.out, provenance(workload), {"figures": {**found, "exit_codes": codes}})
    os._exit(int(found["wrong"] > 0 or any(codes)))


def soak(args: argparse.Namespace, store: Any) -> dict[str, Any]:
    """Sum until the count or the time is reached; what was counted on this rank."""
    from twolane.lanes.cuda.green_contexts import GreenContexts
    from twolane.parallel import nccl
    from twolane.parallel.channel import Channel
    from twolane.parallel.two_shot import TwoShot

    torch.cuda.set_device(args.rank)
    torch.zeros(1, device="cuda")
    parts = GreenContexts(args.rank, (SHARE,))
    prefill, decode = (
        nccl.join(args.rank, args.ranks, dist.PrefixStore(name, store))
        for name in ("prefill", "decode")
    )
    steps: Channel = decode
    if args.all_reduce == "two-shot":
        steps = TwoShot(decode, dist.PrefixStore("memory", store), ("two-shot",))
    level = parts.levels[0]
    lanes = [
        Lane(parts.stream("decode", level[1]), steps, *DECODE),
        Lane(parts.stream("prefill", level[0]), prefill, *PREFILL),
    ]
    order, late = random.Random(0), random.Random(args.rank + 1)
    begun = told = time.monotonic()
    done, stop = 0, torch.zeros(1, dtype=torch.int32, device="cuda")
    while done < args.count:
        for _ in range(500):
            lane = lanes[order.random() < 0.4]
            if late.random() < 0.01:
                time.sleep(late.random() * 0.002)
            lane.replay()
            done += lane.sums
        for lane in lanes:
            lane.stream.synchronize()
        stop.fill_(time.monotonic() - begun > args.seconds)  # rank 0 decides for all
        prefill.broadcast(stop)
        if args.rank == 0 and time.monotonic() - told > 5:
            told = time.monotonic()
            print(f"{told - begun:.0f} s: {done} sums", flush=True)
        if stop.item():
            break
    took = time.monotonic() - begun
    wrong = sum(int(lane.wrong.item()) for lane in lanes)
    return {"sums": done, "wrong": wrong, "seconds": round(took, 1)}


class Lane:
    """A graph of products and sums that checks itself."""

    def __init__(self, stream: torch.cuda.Stream, channel: Any, sums: int, rows: int) -> None:
        from twolane.lanes.cuda.decode_graphs import captured

        self.stream, self.sums = stream, sums
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self._open: deque[torch.cuda.Event] = deque()
        dtype, ranks = torch.bfloat16, channel.size
        x = channel.buffer(rows, WIDTH, dtype, torch.device("cuda", torch.cuda.current_device()))
        if hasattr(channel, "choose"):
            channel.choose([rows], lambda *_: 0.0)
        weight = torch.eye(WIDTH, dtype=dtype, device="cuda")
        own = torch.full((rows, WIDTH), channel.rank + 1.0, dtype=dtype, device="cuda")
        total = ranks * (ranks + 1) / 2

        def run() -> None:
            for _ in range(sums):
                torch.mm(own, weight, out=x)
                channel.all_reduce(x)
                self.wrong += (x != total).any()

        self._kept = run  # the graph reads and writes what it refers to
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        self._graph = captured(stream, None, run)

    def replay(self) -> None:
        while len(self._open) >= QUEUED:
            self._open.popleft().synchronize()
        event = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            self._graph.replay()
            event.record()
        self._open.append(event)


if __name__ == "__main__":
    sys.exit(main())
