"""Python's garbage collector, kept out of where it would be felt, and what it leaves free."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_CONTAINERS, OLDER_EVERY = 2_000, 500
"""Containers more than at the last collection, after which the young ones are looked at, and how
often that is before older ones are, too. A server's containers are open requests and prefixes in
the KV cache, hardly ever garbage; the fewer are looked at, the shorter it stands still."""
OLDER_BESIDE_CLIENTS = 10
"""The same number for a process with connections: each that ends leaves garbage in cycles, such as
asyncio's transport, and 20,000 containers of it are looked at in 2 ms."""
HEAP_KEEPS_BYTES = 1 << 20
"""Each of the C library's heaps keeps at most this many free bytes at its end, and an allocation of
this many bytes or more is mapped apart from them."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers by which glibc's `mallopt` knows these two bounds (malloc.h)."""


def leave_out(older: int = OLDER_EVERY) -> None:
    """What exists now is never looked at again, and the rest seldom or a little at a time.

    Args:
        older: collections of young containers after which older ones are looked at.

    With PyTorch imported, a full collection takes 0.1 s. Beside a GPU that served 40 requests at a
    time, those of the second generation took 10 to 22 ms, twenty times a minute, and those of
    100,000 young containers 60 ms. In these nothing is launched or sent.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # the oldest are looked at by their number at the last time, which is small now
    gc.set_threshold(YOUNG_CONTAINERS, older)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def bound_heaps() -> None:
    """Keep the C library from raising the bounds of what its heaps keep.

    It raises both with the largest mapping that was ever freed, to 64 MiB at most. `malloc_trim`
    leaves the end of every heap but the main thread's as it is, so a thread that had written a
    large answer would keep as much.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's; musl has no such bounds
        mallopt(_TRIM_THRESHOLD, HEAP_KEEPS_BYTES)
        mallopt(_MMAP_THRESHOLD, HEAP_KEEPS_BYTES)


def return_free_memory() -> None:
    """Collect garbage, and give the system what is free between objects that live on.

    Other threads may wait for it: 0.1 ms for each MiB that goes back, and 0.02 ms where none does.
    """
    gc.collect()  # of what lives, most was left out
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's; musl keeps next to nothing
        trim(0)
