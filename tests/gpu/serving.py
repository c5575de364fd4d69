"""A model on the GPU, and the real engine in this process over its lanes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from tests.parity.serving import Served, serve_on
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.messages import Submit, Vocabulary
from twolane.kernels.pool import RoundedPool
from twolane.lanes.cuda.lanes import CudaLanes
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.settings import LaneSizes
from twolane.parallel.peer_memory import PeerGroup
from twolane.systems.base import System

LEVELS = (16, 48, 96)
"""SMs for decode: few, some and most."""
PAGE = 16


def needs_to_map_memory() -> None:
    """Skip the test if this process has mapped other GPUs' memory, which it does once."""
    if PeerGroup.made:
        pytest.skip("needs a process of its own: run this test alone")


def lanes_on(
    machine: CudaMachine,
    pages: int,
    running: int,
    page_size: int = PAGE,
    *,
    windows: bool = False,
    snapshots: int = 0,
) -> Callable[[Callable[[], None]], CudaLanes]:
    """Lanes over a pool that shows what nobody wrote; with `windows`, layers with a window have
    pages of their own."""

    def make(wake: Callable[[], None]) -> CudaLanes:
        tables = machine.page_layout.window_tables if windows else 0
        pool = pages * (1 + tables), page_size, running, machine.spec.max_positions
        sizes = LaneSizes(*pool, snapshots=snapshots, window_tables=tables)
        lanes = machine.start(sizes, wake, lambda *_: None)
        states = lanes.runner.kv.states.layers.values()
        mark_unwritten([*lanes.runner.kv.layers, *(part for each in states for part in each)])
        return lanes

    return make


def mark_unwritten(layers: Iterable[Tensor | RoundedPool]) -> None:
    """Let a pool have no number where nobody writes, so that what reads it shows."""
    for layer in layers:
        if isinstance(layer, RoundedPool):
            layer.values.view(torch.uint8).fill_(0x7F)  # NaN, and any exponent
            layer.exponents.fill_(77)
        else:
            layer.fill_(float("nan"))
    torch.cuda.synchronize()


def serve(
    machine: CudaMachine,
    system: System,
    submits: Sequence[Submit],
    *,
    pages: int,
    running: int,
    prefix_cache: bool,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    vocabulary: Vocabulary | None = None,
) -> Served:
    """See `serve_on`."""
    layout = machine.page_layout
    # One is read while another one is written.
    snapshots = None if machine.spec.state is None else running + 1
    books = KVCacheManager(
        pages * (1 + layout.window_tables),
        PAGE,
        running,
        prefix_cache=prefix_cache,
        snapshots=snapshots,
        window=layout.window,
        window_tables=layout.window_tables,
    )
    lanes = lanes_on(machine, pages, running, windows=True, snapshots=snapshots or 0)
    return serve_on(lanes, machine.spec, books, system, submits, adapters, vocabulary)
