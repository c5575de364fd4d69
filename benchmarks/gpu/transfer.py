"""How fast one GPU writes into another one's KV pool.

The kernel that writes a layer's keys and values, on Qwen3-8B's shapes, into its own pool and into
both; and a plain copy of 1 GiB. Rates are of bytes that go to the other GPU. Both processes check
first what they have received.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Report
from torch import distributed as dist

from twolane.kernels import fused
from twolane.kernels.runtime.timing import graph_seconds
from twolane.lanes.disaggregated.cuda_mirror import MirroredGpuKVCache
from twolane.model.shapes import SHAPES
from twolane.parallel.group import meet
from twolane.parallel.peer_memory import PeerGroup

ROWS = (1, 16, 64, 256, 512, 2048, 8192)
PAGE, PAGES, CALLS, REPLAYS = 32, 512, 20, 7
COPIED_BYTES = 2**30
SHAPE = "qwen3-8b"


def options(add: Callable[..., Any]) -> None:
    """Add the options of the case."""
    add("--port", type=int, help=argparse.SUPPRESS)


def main(report: Report, given: argparse.Namespace) -> None:
    """Start the process of the other GPU, and measure from here."""
    rank = 0 if given.port is None else 1
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", given.port or 0, is_master=not rank, wait_for_workers=False)
    command = [sys.executable, str(Path(__file__).parent), "transfer", "--port", str(store.port)]
    own = {name: value for name, value in os.environ.items() if name != "OUT"}
    other = None if rank else subprocess.Popen(command, env=own)
    try:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            measure(rank, store, report)
    finally:
        if other is not None and sys.exc_info()[0] is not None:
            other.kill()
    if other is not None:
        assert not other.wait(30)


def measure(rank: int, store: dist.Store, report: Report) -> None:
    """Measure on rank 0; the other one waits."""
    device = torch.device("cuda", rank)
    group = PeerGroup("transfer", rank, 2, dist.PrefixStore("pools", store))
    spec = SHAPES[SHAPE]
    kv = MirroredGpuKVCache(spec, PAGES, PAGE, torch.bfloat16, device, group)
    checked(rank, store, kv)
    ours = group.empty((COPIED_BYTES,), torch.uint8, device)
    theirs = group.of(1 - rank, ours)
    if rank == 0:
        seconds = graph_seconds(lambda: theirs.copy_(ours), REPLAYS)
        report.add(copy_GB_s=COPIED_BYTES / seconds / 1e9)
        for rows in ROWS:
            report.add(rows=rows, **written(kv, spec, rows))
    torch.cuda.synchronize()
    meet(rank, 2, dist.PrefixStore("end", store), lambda: None)


def checked(rank: int, store: dist.Store, kv: MirroredGpuKVCache) -> None:
    """Write a number of this rank's into the other one's pool, and look what has come."""
    place = slice(10, 20) if rank == 0 else slice(20, 30)
    for layer in kv.other.layers:
        assert isinstance(layer, torch.Tensor)
        layer[place] = 3.0 + rank
    torch.cuda.synchronize()
    meet(rank, 2, dist.PrefixStore("written", store), lambda: None)
    come = slice(20, 30) if rank == 0 else slice(10, 20)
    for layer in kv.layers:
        assert isinstance(layer, torch.Tensor)
        assert bool((layer[come] == 4.0 - rank).all()), "another number has arrived"
    print(f"rank {rank} has received what the other one wrote", flush=True)


def written(kv: MirroredGpuKVCache, spec: Any, rows: int) -> dict[str, float]:
    """Microseconds of the kernel that writes so many rows, and what the second pool adds."""
    width = spec.q_size + 2 * spec.kv_size
    qkv = torch.randn(rows, width, device="cuda").to(torch.bfloat16)
    q = torch.empty(rows, spec.heads, spec.head_dim, dtype=torch.bfloat16, device="cuda")
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    frequencies = 10_000.0 ** (-torch.arange(0, spec.head_dim, 2, device="cuda") / spec.head_dim)
    table = fused.rotary_table(frequencies, 1.0, rows)
    norm = torch.ones(
        spec.heads + spec.kv_heads, spec.head_dim, dtype=torch.bfloat16, device="cuda"
    )

    def seconds(pools: list[Any]) -> float:
        def calls() -> None:
            for i in range(CALLS):
                pool = pools[i % len(pools)]
                fused.qkv_rope_write(qkv, positions, norm, 1e-6, table, q, pool, positions)

        return graph_seconds(calls, REPLAYS) / CALLS

    own = seconds(list(kv.layers))
    both = seconds([kv.written(i) for i in range(len(kv.layers))])
    sent = rows * 2 * spec.kv_size * 2
    rate = sent / both / 1e9
    return {"own_us": own * 1e6, "both_us": both * 1e6, "sent_KB": sent / 1e3, "GB_s": rate}
