"""Sizes that CUDA graphs are made for: what the lanes pad to, and those who predict it count."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache

SIZES: tuple[int, ...] = (64, *range(128, 1536 + 1, 128), 1792, 2048)
"""Tokens of prefill and hybrid passes. The products' tiles have 128 rows, so little is lost in
padding; and what is larger than the last keeps the GPU busy for longer than the host takes."""
TOKENS_PER_UNIT = 25
"""With more of them, a share of the SMs is busy for longer than the host takes to launch: no graph
is worth the 0.1 MiB that it takes on the device."""
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Rows of decode steps, and from there on every `BUCKET_STEP`."""
BUCKET_STEP = 64


@cache
def sizes_on(units: int) -> tuple[int, ...]:
    """Those of `SIZES` that a share of so many SMs has graphs for."""
    return SIZES[: bisect_right(SIZES, TOKENS_PER_UNIT * units)]


def padded(count: int, sizes: Sequence[int], step: int = 1) -> int:
    """The smallest of the sizes that holds so many; beyond the last, the next multiple of step."""
    if not sizes or count > sizes[-1]:
        return -(-count // step) * step
    return sizes[bisect_left(sizes, count)]
