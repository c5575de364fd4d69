"""Python's garbage collector, kept out of where it would be felt."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def leave_out() -> None:
    """What exists now is never looked at again: with PyTorch imported, a full collection takes
    0.1 s, in which nothing is served or measured."""
    gc.collect()
    gc.freeze()


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
