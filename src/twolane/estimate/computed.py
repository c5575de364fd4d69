"""Tokens as a device computes them: more than it is asked for.

On a GPU, attention of prompts computes tiles of new tokens whole, small ones by a slower kernel
where large ones would be rather empty, and a pass is padded to the next number of tokens that has
graphs. Up to some rows, products of decode go one way, and beyond another (`lanes/cuda`,
`kernels`). The linear models count what is computed: 1,829 tokens take as long as 1,920.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twolane.estimate.profile import Profile
from twolane.estimate.query import Load
from twolane.kernels import sizes

STEPS = (16, 24, 32, 40, 48, 64, 96, 128)
"""Rows beyond which products of decode go another way, while their weights bind them; beyond the
last, a library's."""
SLOPES = (64, 128)
"""Rows beyond which arithmetic binds products, so that they take longer with every row."""
BENDS = (128, 384)
"""New tokens of a pass from which on arithmetic binds some of its products, and all."""
SMALL_ROWS = (16, 64, 128)
"""Rows of the small tiles: new tokens times the query heads that share a KV head. The smallest
tile that holds the longest prompt's rows is used."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The numbers of tokens, rows and pairs that a device computes."""

    tile: int = 1
    """New tokens of a request that attention computes together."""
    group: int = 0
    """Query heads that share a KV head; 0: there are no small tiles."""
    passes: tuple[int, ...] = ()
    """Token counts that passes are padded to; empty if they are not padded."""
    buckets: tuple[int, ...] = ()
    """Row counts that decode steps are padded to; empty if they are not padded."""
    empty: float = 0.0
    """Pairs of rows and keys that large tiles may have in the graph of a pass, however empty."""
    steps: tuple[int, ...] = ()
    """`STEPS`, where products of decode go several ways."""
    heads: float = 0.0
    """Query heads of a rank, if attention may run in whole turns of tiles; 0: it does not."""
    windows: tuple[tuple[int, float], ...] = ()
    """Sliding windows, each with its share of all keys and values."""

    @classmethod
    def on(cls, profile: Profile) -> "Computed":
        """Return how the device of a profile counts."""
        shape, passes = profile.shape, profile.pass_sizes
        windows = tuple(shape.windows)
        if not passes:
            return cls(windows=windows)
        kernels = profile.machine == "cuda"  # simulated ones have no small tiles or several ways
        group = shape.heads // shape.kv_heads if kernels else 0
        tile = sizes.tile_tokens(shape.head_dim)
        heads = shape.heads / profile.key.tensor_parallel
        empty = sizes.EMPTY_KEYS * profile.key.units * tile / heads
        steps = STEPS if kernels else ()
        return cls(
            tile, group, passes, sizes.BUCKETS, empty, steps, 0.0 if kernels else heads, windows
        )

    def tokens(self, load: Load) -> int:
        """Σ n of a pass, with its padding."""
        return sizes.padded(load.new, self.passes) if self.passes else load.new

    def rows(self, load: Load) -> int:
        """Rows of a decode step, with its padding."""
        return sizes.padded(load.requests, self.buckets, sizes.BUCKET_STEP if self.buckets else 1)

    def context(self, load: Load) -> float:
        """Σ r of a decode step, as far as windows show it in a mean layer."""
        if not self.windows:
            return load.reused
        return load.reused - sum(
            share * sum([max(0, r - window) for r in load.r]) for window, share in self.windows
        )

    def _visible(self, load: Load) -> float:
        """Return the share of the pairs of tokens and earlier ones that windows show."""
        hidden = 0.0
        for window, share in self.windows:
            for n, r in zip(load.n, load.r, strict=True):
                last = max(0, r + n - window)
                partly = min(n, last)
                hidden += share * partly * (last - 0.5 * partly)
        every = load.products + 0.5 * load.squares
        return max(0.0, 1.0 - hidden / every) if hidden else 1.0

    def pairs(self, load: Load, *, rows: int = 0) -> tuple[float, float]:
        """Σ n² and Σ n·r, one n of each product in whole tiles, as far as windows show them; those
        of the slower kernel count for as many as the other would have computed meanwhile.

        `rows`: of the hybrid pass that these are the prompts of; 0: they are a prefill batch.
        """
        squares, products = self._tiled_pairs(load, rows)
        if not self.windows:
            return squares, products
        visible = self._visible(load)
        return visible * squares, visible * products

    def _tiled_pairs(self, load: Load, rows: int) -> tuple[float, float]:
        """See `pairs`, without windows."""
        squares, products = load.squares, load.products
        if self.tile == 1:
            return squares, products
        whole = _whole(load, self.tile)
        graph = 0 < rows <= sizes.WHOLE and sum(whole) <= self.empty
        if graph or not self.group or squares + products >= sizes.FILLED * sum(whole):
            return whole
        longest = max(load.n) * self.group
        small = next((each for each in SMALL_ROWS if each >= longest), SMALL_ROWS[-1])
        tile = small // self.group
        squares, products = _whole(load, tile)
        return squares / sizes.FILLED, products / sizes.FILLED

    def turns(self, n: Sequence[int], units: int) -> float:
        """Time of attention over what it would take if its tiles kept all units busy to the end.

        Each unit gets whole tiles in turn: 128 tiles take two turns on 108 units as on 92.
        """
        tiles = self.heads * sum(-(-each // self.tile) for each in n)
        return math.ceil(tiles / units) * units / tiles if tiles else 1.0


def _whole(load: Load, tile: int) -> tuple[int, int]:
    """Σ n² and Σ n·r, one n of each product in whole tiles."""
    squares = products = 0
    for n, r in zip(load.n, load.r, strict=True):
        whole = -(-n // tile) * tile
        squares += n * whole
        products += r * whole
    return squares, products
