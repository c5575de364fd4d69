"""The predictions: how long a launch will take on so many units."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["Estimator", "Segment"]


class Segment(NamedTuple):
    """One request's part of a launch: `n` new tokens over `r` reused ones; decode is n = 1."""

    n: int
    r: int


class Estimator(Protocol):
    """Predicts latencies in seconds and learns from what came out.

    A prediction is None where nothing is known yet; a system then takes its smallest step.
    """

    def prefill_layer(self, segments: Sequence[Segment], units: int) -> float | None:
        """One layer of a prefill batch."""

    def decode_step(self, segments: Sequence[Segment], units: int) -> float | None:
        """One decode step, all layers and sampling."""

    def hybrid(self, segments: Sequence[Segment], units: int) -> float | None:
        """A forward pass of decode tokens and chunks, all layers and sampling."""

    def observe_prefill(
        self, segments: Sequence[Segment], layers: int, units: int, seconds: float
    ) -> None:
        """A slice of that many layers took so long."""

    def observe_decode(self, segments: Sequence[Segment], units: int, seconds: float) -> None:
        """One decode step took so long."""

    def observe_hybrid(self, segments: Sequence[Segment], units: int, seconds: float) -> None:
        """A hybrid forward pass took so long."""
