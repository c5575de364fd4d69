"""The shape of layers of linear attention. No torch."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class DeltaRule:
    """The shape of layers of linear attention: a gated delta rule (arXiv:2412.06464) after a short
    causal convolution.

    A value head reads the queries and keys of one key head; the value heads of a key head are
    neighbours.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution sees, the current one among them."""

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} of linear attention must be 1 or more, not {size}")
        if self.value_heads % self.key_heads:
            pair = f"{self.value_heads} value heads cannot share {self.key_heads} key heads"
            raise ValueError(f"linear attention: {pair}")
        if self.taps < 2:
            raise ValueError(f"the convolution of linear attention needs 2 taps, not {self.taps}")

    @property
    def key_size(self) -> int:
        """Elements of one token's queries, or keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of one token's values, or of its output gates."""
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Elements of one token that the convolution mixes: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def projected(self) -> int:
        """Elements of one token that a layer projects to: those that are mixed, and the gates."""
        return self.mixed_size + self.value_size

    def parameters(self, hidden_size: int) -> int:
        """Return the weights of one layer's linear attention."""
        products = self.projected + self.value_size + 2 * self.value_heads
        vectors = self.taps * self.mixed_size + 2 * self.value_heads + self.value_dim
        return products * hidden_size + vectors

    @property
    def prompt_flops(self) -> float:
        """FLOPs of the rule for one token of a prompt, in chunks of 64 tokens: three products with
        a state, and four of the tokens of a chunk with each other."""
        within = 2 * 64 * (self.key_dim + self.value_dim)
        return 2.0 * self.value_heads * (3 * self.key_dim * self.value_dim + within)

    def state_bytes(self, itemsize: float) -> int:
        """Return the bytes of one request's state in one layer.

        The state of the rule is float32; the convolution keeps activations of `itemsize` bytes.
        """
        rule = 4 * self.value_heads * self.key_dim * self.value_dim
        return rule + round(itemsize * self.mixed_size * (self.taps - 1))


class StatePart(NamedTuple):
    """Tokens of a chunk that move a state on without a stop."""

    first: int
    """The first of them in their chunk."""
    tokens: int
    slot: int
    fresh: bool
    """Whether the sequence begins with them, and its states with zeros."""
    source: int
    """Where the states are that they begin with."""
    save: int
    """Snapshot to which the states after them are saved, too; -1: none."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Where the states after them are written."""
        return (self.slot,) if self.save < 0 else (self.slot, self.save)
