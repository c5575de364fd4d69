"""Tokens as a device computes them: more than it is asked for.

On a GPU, attention of prompts computes tiles of new tokens whole, small ones by a slower kernel
where large ones would be rather empty, and a pass is padded to the next number of tokens that has
graphs. Up to some rows, products of decode go one way, and beyond another (`lanes/cuda`,
`kernels`). The linear models count what is computed: 1,829 tokens take as long as 1,920.
"""

from dataclasses import dataclass

from twolane.estimate import Load
from twolane.estimate.profile import Profile
from twolane.sizes import BUCKET_STEP, BUCKETS, SIZES, padded

STEPS = (16, 32, 64)
"""Rows beyond which products of decode go another way, while their weights bind them."""
SLOPES = (64, 128)
"""The same from where arithmetic binds them, so that they take longer with every row."""
BENDS = (128, 384)
"""New tokens of a pass from which on arithmetic binds some of its products, and all."""
FILLED = 0.65
"""Share of large tiles' rows that has a token, from which on attention takes them; and the rate of
the kernel with small ones over that of the other."""
SMALL_ROWS = (16, 64, 128)
"""Of the small tiles: new tokens times the query heads that share a KV head. As few as hold the
longest prompt's."""


@dataclass(frozen=True, slots=True)
class Computed:
    """How a device counts."""

    tile: int = 1
    """New tokens of a request that attention computes together."""
    group: int = 0
    """Query heads that share a KV head; 0: there are no small tiles."""
    graphs: bool = False
    """Whether passes are padded to sizes that have graphs."""
    buckets: tuple[int, ...] = ()

    @classmethod
    def on(cls, profile: Profile) -> "Computed":
        """The device of a profile."""
        device, shape = profile.key.device, profile.shape
        if not device.startswith(("cuda", "simulated")):
            return cls()
        group = shape.heads // shape.kv_heads if device.startswith("cuda") else 0
        return cls(192 if shape.head_dim == 64 else 128, group, True, BUCKETS)

    def tokens(self, load: Load) -> int:
        """Σ n of a pass, with its padding."""
        return padded(load.new, SIZES) if self.graphs else load.new

    def rows(self, load: Load) -> int:
        """Of a decode step, with its padding."""
        return padded(load.requests, self.buckets, BUCKET_STEP if self.buckets else 1)

    def pairs(self, load: Load, *, large: bool = False) -> tuple[float, float]:
        """Σ n² and Σ n·r, one n of each product in whole tiles; those of the slower kernel count
        for as many as the other would have computed meanwhile. `large`: there are no small tiles.
        """
        squares, products = load.squares, load.products
        if self.tile == 1:
            return squares, products
        whole = _whole(load, self.tile)
        if large or not self.group or squares + products >= FILLED * sum(whole):
            return whole
        rows = max(load.n) * self.group
        tile = next((each for each in SMALL_ROWS if each >= rows), SMALL_ROWS[-1]) // self.group
        squares, products = _whole(load, tile)
        return squares / FILLED, products / FILLED


def _whole(load: Load, tile: int) -> tuple[int, int]:
    """Σ n² and Σ n·r, one n of each product in whole tiles."""
    squares = products = 0
    for n, r in zip(load.n, load.r, strict=True):
        whole = -(-n // tile) * tile
        squares += n * whole
        products += r * whole
    return squares, products
