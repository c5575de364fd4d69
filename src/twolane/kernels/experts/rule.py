"""How a router's logits become the experts of a token and what each of them counts; constants of
an activation. No torch."""

from typing import NamedTuple

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Gain of the sigmoid, and bound of gate and up, of the activation `clamped_swiglu`."""


class RoutingRule(NamedTuple):
    """The rule of a model. Logits have one column for each expert that is chosen among.

    The entries of a token are the experts that are chosen for it, the best first, and then those
    that all tokens share, whose numbers follow those of the others.
    """

    experts: int
    """Experts that are chosen among."""
    chosen: int
    """Experts that are chosen for each token."""
    normalised: bool = True
    """Whether the chosen experts' scores are divided by their sum."""
    sigmoid: bool = False
    """Whether a score is the sigmoid of a logit; otherwise scores are a softmax of all logits."""
    biased: bool = False
    """Whether experts are chosen by their scores plus a bias of each expert; it does not count in
    the weights."""
    scale: float = 1.0
    """The factor of the chosen experts' weights."""
    shared: int = 0
    """Experts that all tokens go to, beside those chosen."""
    gated: bool = False
    """Whether the shared experts count the sigmoid of one more logit, the last; otherwise 1."""

    @property
    def entries(self) -> int:
        """Experts of each token."""
        return self.chosen + self.shared

    @property
    def stored(self) -> int:
        """Experts of a layer."""
        return self.experts + self.shared

    @property
    def logits(self) -> int:
        """Columns of the logits."""
        return self.experts + self.gated
