"""Measured rates of the device on a number of units: FLOP/s of prefill and bytes/s of decode.

There are two sweeps. DuetServe's own (§4.2) has a matrix product and a copy: a copy on few SMs is
slower than decode's kernels, so predictions for decode are conservative (Appendix A). The serving
sweep has the launches that serve: the prefill slice and the decode step of the profile that reach
most on those units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twolane.estimate.papers.operators import Shape
from twolane.estimate.profile import Profile, ProfileError, Sample
from twolane.estimate.query import Floats, Load


@dataclass(frozen=True)
class Curve:
    """A rate against units, linear between the measured ones, and down to zero below them."""

    units: Floats
    rates: Floats

    @classmethod
    def of(cls, rates: Mapping[int, float]) -> "Curve":
        """Return the curve through the rates at these numbers of units."""
        units = sorted(rates)
        return cls(np.array([0, *units], dtype=float), np.array([0.0, *(rates[u] for u in units)]))

    @classmethod
    def highest(cls, samples: Sequence[Sample], rates: Sequence[float]) -> "Curve":
        """Return the curve of the highest rate on each number of units.

        Raises:
            ProfileError: there are no samples.
        """
        if not samples:
            raise ProfileError("the profile has no sweep yet: measure for longer")
        best: dict[int, float] = {}
        for sample, rate in zip(samples, rates, strict=True):
            best[sample.units] = max(best.get(sample.units, 0.0), rate)
        return cls.of(best)

    def at(self, units: Sequence[int] | float) -> Floats:
        """Return the rate on this many units."""
        return np.asarray(np.interp(units, self.units, self.rates))


@dataclass(frozen=True)
class Sweep:
    """Both curves of a device with a model on it."""

    flop_rate: Curve
    byte_rate: Curve

    @classmethod
    def probed(cls, profile: Profile) -> "Sweep":
        """Return the curves of copies and matrix products.

        Raises:
            ProfileError: the profile has none.
        """
        if not profile.probes:
            raise ProfileError("the profile has no copies and matrix products")
        return cls(
            Curve.of({probe.units: probe.flop_rate for probe in profile.probes}),
            Curve.of({probe.units: probe.byte_rate for probe in profile.probes}),
        )

    @classmethod
    def of(cls, profile: Profile, shape: Shape) -> "Sweep":
        """Return the curves of solo runs that are not held out."""
        slices = profile.training("prefill", beside=False)
        steps = profile.training("decode", beside=False)
        flops = [s.layers * sum(shape.linears(s.load.new).flops) / s.median for s in slices]
        moved = [step_bytes(shape, s.load) / s.median for s in steps]
        return cls(Curve.highest(slices, flops), Curve.highest(steps, moved))


def step_bytes(shape: Shape, load: Load) -> float:
    """Return the bytes that a decode step moves: weights, keys and values, and little else."""
    one = shape.linears(load.requests) + shape.together(load)
    return shape.spec.layers * sum(one.bytes) + sum(shape.classifier(load.requests).bytes)
