"""Queries to estimators: a launch as data, its load, and the work beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Units = int | Ints
Kind = Literal["prefill", "decode", "hybrid"]


@dataclass(frozen=True)
class Load:
    """The tokens that a launch computes: for each request `n` new ones over `r` reused ones.

    A request in decode has n = 1. The sums that estimators are made of are computed when one of
    them is first asked for, so a load that is asked about repeatedly should be kept.
    """

    n: Sequence[int]
    r: Sequence[int]

    @classmethod
    def decode(cls, contexts: Sequence[int]) -> "Load":
        """Return the load of a decode step over requests with these numbers of cached tokens."""
        load, count, reused = cls((1,) * len(contexts), contexts), len(contexts), sum(contexts)
        load.__dict__["_sums"] = count, reused, count, reused
        return load

    @classmethod
    def hybrid(cls, decode: "Load", prompts: "Load") -> "Load":
        """Return the load of a pass of decode rows, made by `decode`, and of a prefill batch."""
        load = cls([*decode.n, *prompts.n], [*decode.r, *prompts.r])
        rest, single = prompts.chunks, prompts.decoding
        sums = zip(decode._sums, prompts._sums, strict=True)
        load.__dict__["_sums"] = tuple(a + b for a, b in sums)
        load.__dict__["chunks"] = rest
        load.__dict__["decoding"] = Load.decode([*decode.r, *single.r])
        return load

    @cached_property
    def _sums(self) -> tuple[int, int, int, int]:
        """The sums of the load, all at once: a caller that asks for one asks for others."""
        squares = products = 0
        for n, r in zip(self.n, self.r, strict=True):
            squares += n * n
            products += n * r
        return sum(self.n), sum(self.r), squares, products

    @property
    def requests(self) -> int:
        """The number of requests."""
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
        """The decode rows of a hybrid batch: the requests with one new token over a prefix."""
        contexts = [r for n, r in zip(self.n, self.r, strict=True) if n == 1 and r]
        return Load.decode(contexts)

    @cached_property
    def chunks(self) -> "Load":
        """The prompts of a hybrid batch."""
        pairs = [(n, r) for n, r in zip(self.n, self.r, strict=True) if n > 1 or not r]
        return Load([n for n, _ in pairs], [r for _, r in pairs])


class LaunchShape(NamedTuple):
    """The properties of a launch that its seconds depend on, beside units and corunner."""

    kind: Kind
    load: Load
    layers: int = 0
    """The layers of a prefill slice; 0 for decode steps and hybrid passes, which have all."""
    finishes: bool = True
    """Whether the launch includes the model's last layer and samples."""
    adapters: int | None = None
    """Number of LoRA adapters of its requests; None: as many as running requests have."""


def prefill_slice(load: Load, layers: int, *, finishes: bool = False) -> LaunchShape:
    """Return the shape of layers of a prefill batch; with `finishes`, the last of them samples."""
    return LaunchShape("prefill", load, layers, finishes)


def decode_step(load: Load) -> LaunchShape:
    """Return the shape of a decode step: all layers, and sampling."""
    return LaunchShape("decode", load)


def hybrid_pass(load: Load) -> LaunchShape:
    """Return the shape of a pass of decode tokens and chunks: all layers, and sampling."""
    return LaunchShape("hybrid", load)


@dataclass(frozen=True, slots=True)
class Corunner:
    """The work in the other lane meanwhile: decode beside prefill, prefill beside decode."""

    load: Load
    units: Units
    """Units of the other lane; an array pairs up with an array of the launch's own units."""

    def each(self, count: int) -> Sequence[int]:
        """Return the other lane's units for each of `count` numbers of the launch's own."""
        units = self.units
        if not isinstance(units, np.ndarray):
            return (units,) * count
        each: list[int] = units.tolist()
        return each
