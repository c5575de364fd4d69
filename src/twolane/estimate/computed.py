"""Tokens as a device computes them: more than it is asked for.

On a GPU, attention of prompts computes tiles of new tokens whole, and a pass is padded to the next
number of tokens that has graphs. Up to some rows, products of decode go one way, and beyond another
(`lanes/cuda`, `kernels`). The linear models count what is computed: 1,829 tokens take as long as
2,048.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from twolane.estimate import Load
from twolane.estimate.profile import Profile

SIZES: tuple[int, ...] = (64, *range(128, 1536 + 1, 128), 1792, 2048)
"""Tokens that passes are padded to on a GPU, a simulated one, too; larger ones are not."""
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Rows that decode steps are padded to on a GPU, and from there on every 64."""
STEPS = (16, 32, 64)
"""Rows beyond which products of decode go another way, while their weights bind them."""
SLOPES = (64, 128)
"""The same from where arithmetic binds them, so that they take longer with every row."""


@dataclass(frozen=True, slots=True)
class Computed:
    """How a device counts."""

    tile: int = 1
    """New tokens of a request that attention computes together."""
    sizes: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()

    @classmethod
    def on(cls, profile: Profile) -> "Computed":
        """The device of a profile."""
        if not profile.key.device.startswith(("cuda", "simulated")):
            return cls()
        return cls(192 if profile.shape.head_dim == 64 else 128, SIZES, BUCKETS)

    def new(self, load: Load) -> int:
        """Σ n of a pass, with its padding."""
        new = load.new
        return _next(self.sizes, new) or new

    def rows(self, load: Load) -> int:
        """Of a decode step, with its padding."""
        rows = load.requests
        return _next(self.buckets, rows) or (-(-rows // 64) * 64 if self.buckets else rows)

    def pairs(self, load: Load) -> tuple[int, int]:
        """Σ n² and Σ n·r, one n of each product in whole tiles."""
        tile = self.tile
        if tile == 1:
            return load.squares, load.products
        whole = [-(-n // tile) * tile for n in load.n]
        squares = sum([n * w for n, w in zip(load.n, whole, strict=True)])
        return squares, sum([r * w for r, w in zip(load.r, whole, strict=True)])


def _next(sizes: Sequence[int], count: int) -> int:
    """The smallest of the sizes that holds so many; 0: none does."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else 0
