"""The contract of every estimator: predict the seconds of a launch, and learn from what it took."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import overload

import numpy as np

from twolane.estimate.query import Corunner, Floats, Ints, LaunchShape, Units

__all__ = ["Estimator"]


class Estimator(ABC):
    """Predicts latencies in seconds and learns from the launches that have ended."""

    promises: bool = False
    """Whether its bounds are more than estimates, for every kind of launch."""
    slowdown: float = 0.0
    """The logarithm by which its bounds are longer now than they usually are."""

    @overload
    def predict(
        self,
        launch: LaunchShape,
        units: int,
        corunner: Corunner | None = None,
        *,
        bound: bool = False,
    ) -> float | None: ...

    @overload
    def predict(
        self,
        launch: LaunchShape,
        units: Ints,
        corunner: Corunner | None = None,
        *,
        bound: bool = False,
    ) -> Floats | None: ...

    def predict(
        self,
        launch: LaunchShape,
        units: Units,
        corunner: Corunner | None = None,
        *,
        bound: bool = False,
    ) -> float | Floats | None:
        """Predict the seconds of a launch; None if nothing is known yet.

        A system that is answered None takes its smallest step.

        Args:
            launch: The launch to predict.
            units: one number, answered with a float, or an array (all levels at once), answered
                with an array of the same length.
            corunner: What the other lane runs meanwhile; None: nothing.
            bound: return the seconds that the estimator promises not to be exceeded. Estimators
                that promise nothing answer as they do without it; each says what it promises.
        """
        several = isinstance(units, np.ndarray)
        # For a number or a handful of them, lists are faster than arrays.
        each: Sequence[int] = units.tolist() if isinstance(units, np.ndarray) else (units,)
        seconds = self._seconds(launch, each, corunner, bound)
        if seconds is None:
            return None
        return np.array(seconds) if several else seconds[0]

    def observe(  # noqa: B027 - learning is optional
        self, launch: LaunchShape, units: int, seconds: float, corunner: Corunner | None = None
    ) -> None:
        """Learn from a launch that has ended; `corunner` ran all the while, or nothing did."""

    def observe_experts(self, rows: int, experts_read: float) -> None:  # noqa: B027 - as above
        """Learn how many experts of a layer, on average, a decode step of these rows has read."""

    @abstractmethod
    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float] | None:
        """See `predict`; [len(units)]."""
