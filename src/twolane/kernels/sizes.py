"""The sizes that kernels and CUDA graphs are made for; this module does not import torch."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

SIZES: tuple[int, ...] = (*range(64, 384 + 1, 64), 512, 576, *range(640, 2048 + 1, 128))
"""Tokens that prefill and hybrid passes may be padded to. On one H200 products of Qwen3-8B with
192, 320 or 576 rows take 8 to 12 % less time than with 64 more; with 448, 704 or 832 they take as
long. `worth_padding_to` leaves out sizes for which the latter holds where a model is served."""
WHOLE = 1024
"""Tokens of the largest hybrid pass whose layers are one graph; larger ones take the GPU several
times as long as launching takes the host."""
FILLED = 0.65
"""Attention takes large tiles if at least this share of their rows has a token: the kernel with
small tiles reaches this share of their kernel's rate."""
EMPTY_KEYS = 8192
"""The graph of a whole pass takes large tiles that are emptier than that, too, if an SM reads at
most this many keys for them. That takes a tenth of a millisecond; small tiles cannot be in a graph,
and the host takes longer to launch their layer."""
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Rows of decode steps, and from there on every `BUCKET_STEP`."""
FIRST_BUCKETS = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512)
FIRST_SIZES = (128, 256, 512, 768, 1024, 1536, 2048)
"""Rows of decode steps and tokens of passes whose graphs a server captures before it is ready; it
pads to them until the rest are captured, while nothing runs. A row more or less in a bucket costs a
step little: half of the buckets halve the time of the start that graphs take."""
BUCKET_STEP = 128
"""Rows between two sizes of large decode steps, each of which makes a start a tenth of a second
longer for every three shares."""
GRAPH_BYTES = 3 * 2**30
"""Kept free for the graphs of all levels, which are captured when the KV pool exists."""
WORKSPACE_TOKENS = 16_384
"""Tokens of the prefill batch that a lane's activations are made for; a longer prompt makes them
grow."""


def tile_tokens(head_dim: int) -> int:
    """New tokens of one head in a large tile of attention (CTA_Q of FlashInfer's FA3)."""
    return 192 if head_dim == 64 else 128


def padded(count: int, sizes: Sequence[int], step: int = 1) -> int:
    """Return the smallest size that holds `count`; beyond the last, the next multiple of `step`."""
    if not sizes or count > sizes[-1]:
        return -(-count // step) * step
    return sizes[bisect_left(sizes, count)]


def worth_padding_to(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Return the sizes that take less time than the next larger one of them, ascending.

    Libraries multiply some numbers of rows badly: more rows take no longer, so a pass of such a
    size had better be padded further, or be given more tokens. `WHOLE` is among them in any case.

    Args:
        seconds: Seconds of a pass, by its number of tokens.
    """
    kept: list[int] = []
    for size in sorted(seconds, reverse=True):
        # A size is worth padding to if it takes less than this fraction of the next larger one's
        # time.
        if not kept or size == WHOLE or seconds[size] < 0.98 * seconds[kept[-1]]:
            kept.append(size)
    return tuple(reversed(kept))


KEY_TILE = 128
"""Most tokens whose keys a block of an attention kernel with a window reads at a time, from a
multiple of their number on."""
