"""Tokens as a device computes them: more than it is asked for.

On a GPU, attention of prompts computes tiles of new tokens whole, and a pass is padded to the next
number of tokens that has graphs. Up to some rows, products of decode go one way, and beyond another
(`lanes/cuda`, `kernels`). The linear models count what is computed: 1,829 tokens take as long as
2,048.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twolane.estimate import Load
from twolane.estimate.profile import Profile
from twolane.sizes import BUCKET_STEP, BUCKETS, padded, sizes_on

STEPS = (16, 32, 64)
"""Rows beyond which products of decode go another way, while their weights bind them."""
SLOPES = (64, 128)
"""The same from where arithmetic binds them, so that they take longer with every row."""


@dataclass(frozen=True, slots=True)
class Computed:
    """How a device counts."""

    tile: int = 1
    """New tokens of a request that attention computes together."""
    graphs: bool = False
    """Whether passes are padded to sizes that have graphs."""
    buckets: tuple[int, ...] = ()

    @classmethod
    def on(cls, profile: Profile) -> "Computed":
        """The device of a profile."""
        if not profile.key.device.startswith(("cuda", "simulated")):
            return cls()
        return cls(192 if profile.shape.head_dim == 64 else 128, True, BUCKETS)

    def new(self, load: Load, units: int) -> int:
        """Σ n of a pass on so many SMs, with its padding."""
        return padded(load.new, sizes_on(units)) if self.graphs else load.new

    def by_new(
        self, load: Load, units: Sequence[int], make: Callable[[int], list[float]]
    ) -> list[list[float]]:
        """What is made of Σ n on each of the units; one object where that is the same."""
        if len(units) == 1:
            return [make(self.new(load, units[0]))]
        counts = [self.new(load, each) for each in units]
        made = {count: make(count) for count in set(counts)}
        return [made[count] for count in counts]

    def rows(self, load: Load) -> int:
        """Of a decode step, with its padding."""
        return padded(load.requests, self.buckets, BUCKET_STEP if self.buckets else 1)

    def pairs(self, load: Load) -> tuple[int, int]:
        """Σ n² and Σ n·r, one n of each product in whole tiles."""
        tile = self.tile
        if tile == 1:
            return load.squares, load.products
        whole = [-(-n // tile) * tile for n in load.n]
        squares = sum([n * w for n, w in zip(load.n, whole, strict=True)])
        return squares, sum([r * w for r, w in zip(load.r, whole, strict=True)])
