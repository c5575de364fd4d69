"""Python's garbage collector stays out of the way, and serving gives it nothing to do."""

import ctypes
import gc
import subprocess
import sys

import pytest

from tests.systems.names import SYSTEM_NAMES
from tests.systems.simulation import simulate, submit
from twolane.common.garbage import gc_disabled
from twolane.systems.registry import make_system

HELD = """
from pathlib import Path

from twolane.common.garbage import return_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

before = resident()
kept = [b"x" * (1000 + i % 2) for i in range(100_000)][::1000]
held = resident() - before
assert held > 20_000, held
return_free_memory()
assert resident() - before < held / 4, (before, held, resident())
"""
THREAD = """
import os
import threading
from pathlib import Path

from twolane.common.garbage import bound_heaps, return_free_memory

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

def work():
    pieces = [b"x" * (1000 + i % 2) for i in range(20_000)]
    pieces.reverse()  # so that the last to go is beside the end of the heap
    del pieces
    done.set()
    end.wait()

{bound}
large = b"x" * (24 << 20)
del large  # from now on heaps would keep 48 MiB
before = resident()
done, end = threading.Event(), threading.Event()
threading.Thread(target=work).start()
done.wait()
return_free_memory()
print(resident() - before)
end.set()
"""
SEEN = """
import gc
from twolane.common import garbage

full = gc.get_threshold()[2]
garbage.freeze()
times = []
gc.callbacks.append(lambda phase, info: times.append(info["generation"]))
held = [[] for _ in range(500_000)]
assert 200 < len(times) < 600, "the young ones not now and then"
assert set(times) == {0}, "older ones, too, while requests were served"
held += [[] for _ in range(1_000_000)]
assert 1 in times, "the older ones never"
assert gc.get_threshold()[2] == full, "all of them never"
garbage.freeze(clients=True)
times.clear()
held += [[] for _ in range(100_000)]
assert 1 in times and 2 not in times, "all of them by themselves although they are asked for"
"""
TURNOVER = """
import gc
import random
from collections import deque

from twolane.common import garbage

garbage.freeze(clients=True)
visited, draw = [], random.Random(0)

def visits(phase, info):
    if phase == "start":
        visited.append(sum(len(gc.get_objects(each)) for each in range(info["generation"] + 1)))

gc.callbacks.append(visits)
open_requests = deque()
for _ in range(8_000):
    if len(open_requests) < 60 or len(open_requests) < 100 and draw.random() < 0.5:
        open_requests.append([[] for _ in range(330)])
    else:
        open_requests.popleft()
assert visited and max(visited) < 25 * 330, max(visited)
"""


@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_the_engine_makes_no_reference_cycles(system: str) -> None:
    """So it can do without collections, which stop every launch for 10 ms and more."""
    arrivals = [(0.02 * i, submit(f"r{i}", 50 + 40 * (i % 5), 5 + i % 7)) for i in range(40)]
    made = make_system(system, {})
    simulate(made, arrivals[:1])  # what is imported on first use makes classes, which are cycles
    gc.collect()
    with gc_disabled():
        served = simulate(made, arrivals, pages=80)  # so that prefixes are evicted
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            found = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert len(served.finish) == len(arrivals)
    assert not found


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_memory_that_is_free_between_objects_goes_back() -> None:
    subprocess.run([sys.executable, "-c", HELD], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_a_thread_keeps_no_memory_behind_what_it_has_freed() -> None:
    kept = {}
    for bound in ("", "bound_heaps()"):
        run = [sys.executable, "-c", THREAD.format(bound=bound)]
        done = subprocess.run(run, check=True, timeout=60, stdout=subprocess.PIPE)
        kept[bound] = int(done.stdout)
    assert kept["bound_heaps()"] < 4 << 20 < 16 << 20 < kept[""], kept


def test_collections_are_short() -> None:
    subprocess.run([sys.executable, "-c", SEEN], check=True, timeout=60)


def test_a_collection_visits_few_of_the_open_requests() -> None:
    """A server's requests end as fast as they begin, so their containers hardly ever add up to what
    starts a collection, which would visit those of all."""
    subprocess.run([sys.executable, "-c", TURNOVER], check=True, timeout=60)
