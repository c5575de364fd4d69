"""What decode attention makes of the products of queries and keys."""

from typing import NamedTuple

from torch import Tensor

LOG2E = 1.4426950408889634
"""Binary logarithm of e, since kernels take powers of two."""


class RowScores(NamedTuple):
    """The scores of a row's tokens."""

    window: int
    """The last tokens that are seen."""
    scale: float
    """Factor of the scores."""
    sinks: Tensor | None
    """float32 [heads], the score of one more token of value 0, or None."""
