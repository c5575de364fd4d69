"""The predictions: how long a launch will take on so many units, alone or beside the other lane."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, overload

import numpy as np
import numpy.typing as npt

__all__ = ["Beside", "Estimator", "Floats", "Ints", "Load", "Units"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Units = int | Ints


@dataclass(frozen=True)
class Load:
    """What a launch computes: for each request `n` new tokens over `r` reused ones.

    Decode is n = 1. The sums that estimators are made of are worked out once, when first asked for,
    so a load that is asked about again and again is best kept.
    """

    n: Sequence[int]
    r: Sequence[int]

    @classmethod
    def decode(cls, contexts: Sequence[int]) -> "Load":
        """A decode step over requests with so many tokens in their KV caches."""
        load, count, reused = cls((1,) * len(contexts), contexts), len(contexts), sum(contexts)
        load.__dict__["_sums"] = count, reused, count, reused
        return load

    @cached_property
    def _sums(self) -> tuple[int, int, int, int]:
        """All of them: whoever asks for one asks for others."""
        squares = products = 0
        for n, r in zip(self.n, self.r, strict=True):
            squares += n * n
            products += n * r
        return sum(self.n), sum(self.r), squares, products

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.n)

    @property
    def new(self) -> int:
        """Σ n"""
        return self._sums[0]

    @property
    def reused(self) -> int:
        """Σ r"""
        return self._sums[1]

    @property
    def squares(self) -> int:
        """Σ n²"""
        return self._sums[2]

    @property
    def products(self) -> int:
        """Σ n·r"""
        return self._sums[3]

    @cached_property
    def decoding(self) -> "Load":
        """The decode rows of a hybrid batch: those of one new token over a prefix."""
        contexts = [r for n, r in zip(self.n, self.r, strict=True) if n == 1 and r]
        return Load.decode(contexts)

    @cached_property
    def chunks(self) -> "Load":
        """The prompts of a hybrid batch."""
        pairs = [(n, r) for n, r in zip(self.n, self.r, strict=True) if n > 1 or not r]
        return Load([n for n, _ in pairs], [r for _, r in pairs])


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs in the other lane meanwhile: decode beside prefill, prefill beside decode."""

    load: Load
    units: Units
    """Of the other lane; an array goes with an array of own units, element by element."""

    def each(self, count: int) -> Sequence[int]:
        """Of the other lane, for each of so many numbers of own units."""
        units = self.units
        return _each(units) if isinstance(units, np.ndarray) else (units,) * count


class Estimator(ABC):
    """Predicts latencies in seconds and learns from what came out.

    A prediction is None where nothing is known yet; a system then takes its smallest step. Units
    are one number, which is answered with a float, or an array (all levels at once), answered with
    an array. `beside` is what the other lane does meanwhile, None if nothing. With `bound` the
    answer is what the estimator promises will not be exceeded; those that promise nothing answer
    as they do without (each says what it promises).
    """

    promises: ClassVar[bool] = False
    """Whether its bounds are more than estimates, for every kind of launch."""
    lately: float = 0.0
    """By how much its bounds are longer now than they are usually, as a logarithm."""

    @overload
    def prefill_slice(
        self,
        load: Load,
        layers: int,
        units: int,
        beside: Beside | None = None,
        *,
        finishes: bool = False,
        bound: bool = False,
    ) -> float | None: ...

    @overload
    def prefill_slice(
        self,
        load: Load,
        layers: int,
        units: Ints,
        beside: Beside | None = None,
        *,
        finishes: bool = False,
        bound: bool = False,
    ) -> Floats | None: ...

    def prefill_slice(
        self,
        load: Load,
        layers: int,
        units: Units,
        beside: Beside | None = None,
        *,
        finishes: bool = False,
        bound: bool = False,
    ) -> float | Floats | None:
        """So many layers of a prefill batch; `finishes`: the last of them is the model's last,
        and the slice samples, too."""
        seconds = self._prefill(load, layers, _each(units), beside, finishes, bound)
        return _shaped(units, seconds)

    @overload
    def decode_step(
        self, load: Load, units: int, beside: Beside | None = None, *, bound: bool = False
    ) -> float | None: ...

    @overload
    def decode_step(
        self, load: Load, units: Ints, beside: Beside | None = None, *, bound: bool = False
    ) -> Floats | None: ...

    def decode_step(
        self, load: Load, units: Units, beside: Beside | None = None, *, bound: bool = False
    ) -> float | Floats | None:
        """One decode step, all layers and sampling."""
        return _shaped(units, self._decode(load, _each(units), beside, bound))

    @overload
    def hybrid(self, load: Load, units: int, *, bound: bool = False) -> float | None: ...

    @overload
    def hybrid(self, load: Load, units: Ints, *, bound: bool = False) -> Floats | None: ...

    def hybrid(self, load: Load, units: Units, *, bound: bool = False) -> float | Floats | None:
        """A forward pass of decode tokens and chunks, all layers and sampling, alone."""
        return _shaped(units, self._hybrid(load, _each(units), bound))

    def observe_prefill(  # noqa: B027 - learning is optional
        self,
        load: Load,
        layers: int,
        units: int,
        seconds: float,
        beside: Beside | None = None,
        *,
        finishes: bool = False,
    ) -> None:
        """A slice of so many layers took so long; `beside` ran all the while, or nothing did."""

    def observe_decode(  # noqa: B027
        self, load: Load, units: int, seconds: float, beside: Beside | None = None
    ) -> None:
        """A decode step took so long; `beside` ran all the while, or nothing did."""

    def observe_hybrid(  # noqa: B027
        self, load: Load, units: int, seconds: float
    ) -> None:
        """A hybrid forward pass took so long."""

    @abstractmethod
    def _prefill(
        self,
        load: Load,
        layers: int,
        units: Sequence[int],
        beside: Beside | None,
        finishes: bool,
        bound: bool,
    ) -> Sequence[float] | None:
        """See `prefill_slice`; [len(units)]."""

    @abstractmethod
    def _decode(
        self, load: Load, units: Sequence[int], beside: Beside | None, bound: bool
    ) -> Sequence[float] | None:
        """See `decode_step`; [len(units)]."""

    @abstractmethod
    def _hybrid(self, load: Load, units: Sequence[int], bound: bool) -> Sequence[float] | None:
        """See `hybrid`; [len(units)]."""


# For a number or a handful of them, lists are faster than arrays.


def _each(units: Units) -> Sequence[int]:
    if not isinstance(units, np.ndarray):
        return (units,)
    each: list[int] = units.tolist()
    return each


def _shaped(units: Units, seconds: Sequence[float] | None) -> float | Floats | None:
    """An array for an array of units, a number for a number."""
    if seconds is None:
        return None
    return np.array(seconds) if isinstance(units, np.ndarray) else seconds[0]
