"""Settings of Python's garbage collector and of malloc that keep pauses and memory small."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_CONTAINERS, OLDER_EVERY = 2_000, 500
"""Net new containers after which a collection of the young generation starts, and young collections
after which one of the middle generation does. A server's containers are open requests and prefixes
in the KV cache, hardly ever garbage; the fewer a collection visits, the shorter the pause."""
YOUNG_WITH_CLIENTS, OLDER_WITH_CLIENTS = 500, 1
"""The same in a process with connections, where an open request has 330 containers and those that
fail may leave cycles. A collection visits all that began since the last one and has not ended, so
it is short only if it comes often; the number that starts it does not bound what it visits, since
ended requests count against new ones."""
NEVER = 1 << 30
"""Collections of the middle generation before a full one where full ones are asked for."""
HEAP_KEEPS_BYTES = 1 << 20
"""Free bytes that each of malloc's heaps keeps at its end; larger allocations are mapped
separately."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of these two parameters of glibc's `mallopt` (malloc.h)."""


def freeze(*, clients: bool = False) -> None:
    """Exclude all objects that exist now from garbage collection, and make collections rare or
    small.

    Args:
        clients: True for a process with connections, whose collections are small and whose full
            ones are left to its calls of `return_free_memory`; else collections are rare, and full
            ones start by themselves, too.

    With PyTorch imported, a full collection takes 0.1 s. Beside a GPU that served 40 requests at a
    time, those of the second generation took 10 to 22 ms, twenty times a minute, and those of
    100,000 young containers 60 ms. In these nothing is launched or sent.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # the oldest are looked at by their number at the last time, which is small now
    if clients:
        gc.set_threshold(YOUNG_WITH_CLIENTS, OLDER_WITH_CLIENTS, NEVER)
    else:
        gc.set_threshold(YOUNG_CONTAINERS, OLDER_EVERY)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection within the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def bound_heaps() -> None:
    """Fix malloc's trim and mmap thresholds, which it would raise by itself.

    It raises both with the largest mapping that was ever freed, to 64 MiB at most. `malloc_trim`
    leaves the end of every heap but the main thread's as it is, so a thread that had written a
    large answer would keep as much.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's; musl has no such bounds
        mallopt(_TRIM_THRESHOLD, HEAP_KEEPS_BYTES)
        mallopt(_MMAP_THRESHOLD, HEAP_KEEPS_BYTES)


def return_free_memory(*, collects: bool = True) -> None:
    """Return free memory to the system, with that of garbage if it is collected first.

    Other threads may wait for it: 0.1 ms for each MiB that goes back, and 0.02 ms where none does.
    They always wait for a collection, about 1 µs for each container that was not frozen.
    """
    if collects:
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's; musl keeps next to nothing
        trim(0)
