"""Memory of two processes, the pools in it, and the pipe between them."""

import gc
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twolane.lanes.disaggregated.arrivals import LENGTH_BYTES, Arrival, Arrivals, send_arrival
from twolane.lanes.disaggregated.cpu_mirror import MirroredKVCache
from twolane.lanes.disaggregated.shared_memory import SharedMemory
from twolane.model.attention import CpuRoundedPool, Pool
from twolane.model.shapes import SHAPES
from twolane.parallel.group import RankLost

SPEC = replace(SHAPES["qwen3-8b"], layers=2, kv_heads=2, head_dim=8)
PAGES, PAGE = 4, 4


def test_all_who_have_the_file_see_the_same_tensors() -> None:
    memory = SharedMemory.new()
    other = SharedMemory(memory.file)
    whole, halves = memory.tensor((3, 5), torch.int64), memory.tensor((2,), torch.bfloat16)
    assert not whole.any()
    whole.fill_(7)
    there, halves_there = other.tensor((3, 5), torch.int64), other.tensor((2,), torch.bfloat16)
    assert there.tolist() == [[7] * 5] * 3
    halves_there[1] = 2.5
    assert halves.tolist() == [0.0, 2.5]
    memory.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_gone_with_its_tensors() -> None:
    """It has no name that could outlive the processes."""
    memory = SharedMemory.new()
    tensor = memory.tensor((1000, 1000), torch.float32)
    place = f" {os.fstat(memory.file).st_ino} "  # others' tensors may have the same name
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.file)
    tensor.fill_(1.0)
    maps = Path("/proc/self/maps")
    assert re.search(f"{place}.*memfd:twolane-kv .deleted", maps.read_text())
    del tensor
    gc.collect()
    assert not re.search(f"{place}.*memfd:twolane-kv", maps.read_text())


def numbers(pool: Pool) -> list[Tensor]:
    """What a pool keeps."""
    if isinstance(pool, CpuRoundedPool):
        return [pool.values.view(torch.int8), pool.exponents]
    return [pool]


@pytest.mark.parametrize("rounded", [False, True])
def test_both_processes_hold_what_either_writes(rounded: bool) -> None:
    first, second = SharedMemory.new(), SharedMemory.new()
    shape = SPEC, PAGES, PAGE, torch.float32
    ours = MirroredKVCache(*shape, (first, second), rounded=rounded)
    there = SharedMemory(second.file), SharedMemory(first.file)
    theirs = MirroredKVCache(*shape, there, rounded=rounded)
    for cache, layer, slot in ((ours, 0, 5), (theirs, 1, 9), (theirs, 0, 6)):
        new = torch.randn(2, 2 * SPEC.kv_heads, SPEC.head_dim)
        cache.write(layer, torch.tensor([slot, slot + 2]), new)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for here, over_there in zip(numbers(a), numbers(b), strict=True):
            assert here.data_ptr() != over_there.data_ptr()
            assert here.any()
            assert torch.equal(here, over_there)
    assert (ours.received, theirs.received) == (2, 1)
    first.close()
    second.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_come_as_they_were_sent(dtype: torch.dtype) -> None:
    read, write = os.pipe()
    arrivals, hidden = Arrivals(read), torch.randn(40, 6).to(dtype)[::2]
    send_arrival(write, Arrival.of(3, 1, None))
    send_arrival(write, Arrival.of(3, 2, hidden))
    send_arrival(write, Arrival.of(4, 2, hidden[:0]))
    assert arrivals.take(3, 1).hidden == b""
    assert torch.equal(arrivals.take(3, 2).rows(6, dtype), hidden)
    assert arrivals.take(4, 2).rows(6, dtype).shape == (0, 6)
    os.close(write)


def test_an_arrival_that_is_not_due_is_refused() -> None:
    read, write = os.pipe()
    arrivals = Arrivals(read)
    send_arrival(write, Arrival.of(3, 2, None))
    with pytest.raises(ValueError, match="up to 2 of batch 3 have arrived where those up to 1"):
        arrivals.take(3, 1)
    os.close(write)


@pytest.mark.parametrize("sent", [b"", b"\0", (9).to_bytes(LENGTH_BYTES, "little") + b"cut"])
def test_who_waits_for_a_process_that_has_ended_is_told(sent: bytes) -> None:
    """Also if it ended in the middle of an arrival."""
    read, write = os.pipe()
    arrivals = Arrivals(read)
    os.write(write, sent)
    os.close(write)
    for _ in range(2):
        with pytest.raises(RankLost, match="waited in vain for the pages of rank 1"):
            arrivals.take(0, 1)
