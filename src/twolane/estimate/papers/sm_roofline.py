"""Bullet's SM-scaling roofline (§3.2): Equation 1 over the operators, scaled by measurements.

    T'_k = flop_k / min(flop_k / mem_k · D_p, C_p)                             (Equation 1)
    C_p = C_peak · p / N,  D_p = D_peak · min(1, p / N_d)
    α = T_measured / T'                                                        (Equation 2)

Beside prefill of sl new tokens, decode has the bandwidth D(p, sl) that it reached beside such
prefills (§3.2.3). α is interpolated from the measured samples, over everything that Bullet calls
the execution state (prefill length, batch and units, decode context, batch and units), by inverse
distance. Online, launches are added to those samples, and the oldest of them leave (§3.2.4).
"""

from collections.abc import Sequence
from math import inf, log, log2

import numpy as np

from twolane.estimate.base import Beside, Estimator, Floats, Load
from twolane.estimate.papers.operators import Operators, Shape
from twolane.estimate.papers.sweep import Curve, Sweep, step_bytes
from twolane.estimate.profile import Profile, ProfileError, Sample

ONLINE = 128
"""Launches that are remembered, of each kind."""
UNITS_WEIGHT = 4.0
"""A doubling of the units is as far as so many doublings of the tokens."""

State = tuple[float, ...]


class Scaling:
    """α over a space of execution states: Shepard's interpolation of log α, power 4.

    Args:
        states: [S, features].
        alphas: [S].
    """

    def __init__(self, states: Sequence[State], alphas: Sequence[float]) -> None:
        far: list[State] = [(1e6,) * len(states[0])] * ONLINE
        self._lifted = np.array([_column(state) for state in (*states, *far)]).T
        """Times (x, |x|², 1) the squared distances of x to the samples, and a little more, so that
        none is zero: [features + 2, S]."""
        self._logs = np.ones((len(states) + ONLINE, 2))
        """Logarithms of the factors, and ones: weighted sum and sum of weights are one product."""
        self._logs[:, 0] = [*np.log(alphas), *[0.0] * ONLINE]
        self._first = self._next = len(states)

    def at(self, states: Sequence[State]) -> Floats:
        """α at each of the states [L, features]."""
        lifted = np.array([[*state, sum([x * x for x in state]), 1.0] for state in states])
        weight = np.dot(lifted, self._lifted)
        np.reciprocal(np.square(weight, out=weight), out=weight)
        sums = np.dot(weight, self._logs)
        return np.asarray(np.exp(sums[:, 0] / sums[:, 1]))

    def add(self, state: State, alpha: float) -> None:
        """Remember a launch in the place of the oldest one."""
        place = self._next
        self._lifted[:, place], self._logs[place, 0] = _column(state), log(alpha)
        self._next = place + 1 if place + 1 < len(self._logs) else self._first


def _column(state: State) -> list[float]:
    return [*(-2.0 * x for x in state), 1.0, sum([x * x for x in state]) + 1e-3]


class SmRoofline(Estimator):
    """Equation 1 scaled by Equation 2, with contention. Promises no bound.

    Raises:
        ProfileError: there are no samples of prefill, of decode or of hybrid passes, each alone.
    """

    def __init__(self, profile: Profile) -> None:
        key = profile.key
        self._shape = Shape(profile.shape, key.itemsize, key.tensor_parallel)
        self._layers = profile.shape.layers
        sweep = Sweep.of(profile, self._shape)
        self._flops_a_unit = float(sweep.flop_rate.at(key.units)) / key.units
        self._peak, self._inflection = inflection(sweep.byte_rate)
        self._contended = Contention(self._shape, profile.training("decode", beside=True))
        self._scaling: dict[tuple[str, bool], Scaling] = {}
        for kind in ("prefill", "decode", "hybrid"):
            for beside in (False, True):
                samples = profile.training(kind, beside=beside)
                if samples:
                    self._scaling[kind, beside] = self._fitted(samples)
                elif not beside:
                    raise ProfileError(f"the profile has no {kind} samples yet: measure for longer")

    def observe_prefill(
        self,
        load: Load,
        layers: int,
        units: int,
        seconds: float,
        beside: Beside | None = None,
        *,
        finishes: bool = False,
    ) -> None:
        """See `Estimator.observe_prefill`."""
        ideal = self._slice(load, layers, (units,), finishes)
        self._learn("prefill", load, units, beside, seconds / ideal[0])

    def observe_decode(
        self, load: Load, units: int, seconds: float, beside: Beside | None = None
    ) -> None:
        """See `Estimator.observe_decode`."""
        ideal = self._step(load, (units,), beside)
        self._learn("decode", load, units, beside, seconds / ideal[0])

    def observe_hybrid(self, load: Load, units: int, seconds: float) -> None:
        """See `Estimator.observe_hybrid`."""
        ideal = self._hybrid_pass(load, (units,))
        self._learn("hybrid", load, units, None, seconds / ideal[0])

    def _prefill(
        self,
        load: Load,
        layers: int,
        units: Sequence[int],
        beside: Beside | None,
        finishes: bool,
        bound: bool,
    ) -> Sequence[float] | None:
        return self._scaled(
            self._slice(load, layers, units, finishes), "prefill", load, units, beside
        )

    def _decode(
        self, load: Load, units: Sequence[int], beside: Beside | None, bound: bool
    ) -> Sequence[float] | None:
        return self._scaled(self._step(load, units, beside), "decode", load, units, beside)

    def _hybrid(self, load: Load, units: Sequence[int], bound: bool) -> Sequence[float] | None:
        return self._scaled(self._hybrid_pass(load, units), "hybrid", load, units, None)

    def _slice(
        self, load: Load, layers: int, units: Sequence[int], finishes: bool
    ) -> Sequence[float]:
        """Equation 1 over a prefill slice."""
        block = self._shape.linears(load.new) + self._shape.together(load)
        classifier = self._shape.classifier(load.requests) if finishes else Operators((), ())
        return _summed(layers, block, classifier, self._rates(units))

    def _step(self, load: Load, units: Sequence[int], beside: Beside | None) -> Sequence[float]:
        """Equation 1 over a decode step."""
        rates = self._rates(units)
        if beside is not None:
            most = self._contended.bandwidth(units, beside.load.new)
            rates = [(c, min(d, each)) for (c, d), each in zip(rates, most, strict=True)]
        block = self._shape.linears(load.requests) + self._shape.together(load)
        return _summed(self._layers, block, self._shape.classifier(load.requests), rates)

    def _hybrid_pass(self, load: Load, units: Sequence[int]) -> Sequence[float]:
        """Equation 1 over a hybrid pass; the two attentions are kernels of their own."""
        shape = self._shape
        block = shape.linears(load.new) + shape.together(load.chunks)
        block += shape.together(load.decoding)
        return _summed(self._layers, block, shape.classifier(load.requests), self._rates(units))

    def _rates(self, units: Sequence[int]) -> list[tuple[float, float]]:
        """C_p and D_p."""
        return [
            (self._flops_a_unit * p, self._peak * min(1.0, p / self._inflection)) for p in units
        ]

    def _scaled(
        self,
        ideal: Sequence[float],
        kind: str,
        load: Load,
        units: Sequence[int],
        beside: Beside | None,
    ) -> Sequence[float]:
        """Equation 2."""
        scaling = self._scaling.get((kind, beside is not None)) or self._scaling[kind, False]
        if (kind, True) not in self._scaling:
            beside = None
        alphas = scaling.at(execution_states(load, units, beside)).tolist()
        return [alpha * each for alpha, each in zip(alphas, ideal, strict=True)]

    def _learn(
        self, kind: str, load: Load, units: int, beside: Beside | None, alpha: float
    ) -> None:
        scaling = self._scaling.get((kind, beside is not None))
        if scaling is not None:
            (state,) = execution_states(load, (units,), beside)
            scaling.add(state, alpha)

    def _fitted(self, samples: Sequence[Sample]) -> Scaling:
        states, alphas = [], []
        for sample in samples:
            units, load = (sample.units,), sample.load
            if sample.kind == "prefill":
                ideal = self._slice(load, sample.layers, units, sample.finishes)
            elif sample.kind == "decode":
                ideal = self._step(load, units, sample.other)
            else:
                ideal = self._hybrid_pass(load, units)
            states.append(execution_states(load, units, sample.other)[0])
            alphas.append(sample.median / ideal[0])
        return Scaling(states, alphas)


class Contention:
    """D(p, sl): the bandwidth that decode reached on p units beside prefill of sl tokens.

    Args:
        shape: of the model.
        samples: decode steps beside prefill.
    """

    def __init__(self, shape: Shape, samples: Sequence[Sample]) -> None:
        best: dict[int, dict[int, float]] = {}
        for sample in samples:
            assert sample.beside is not None
            tokens = sum(n * count for n, _, count in sample.beside.runs)
            power = (tokens.bit_length() + 1) // 2
            rate = step_bytes(shape, sample.load) / sample.median
            row = best.setdefault(power, {})
            row[sample.units] = max(row.get(sample.units, 0.0), rate)
        self._rows = {
            power: Curve(np.array([0, *sorted(row)]), np.array([0, *(row[u] for u in sorted(row))]))
            for power, row in best.items()
        }
        self._rates: dict[tuple[int, int], float] = {}
        """Of powers and units that were asked for."""

    def bandwidth(self, units: Sequence[int], tokens: int) -> Sequence[float]:
        """D(p, sl); infinite where it was never measured."""
        if not self._rows:
            return [inf] * len(units)
        power = (tokens.bit_length() + 1) // 2
        return [self._rate(power, each) for each in units]

    def _rate(self, power: int, units: int) -> float:
        rate = self._rates.get((power, units))
        if rate is None:
            row = self._rows[min(self._rows, key=lambda known: abs(known - power))]
            rate = self._rates[power, units] = float(row.at(units))
        return rate


def inflection(curve: Curve) -> tuple[float, float]:
    """D_peak and the N_d that fits best to a measured curve."""
    units, rates = curve.units[1:], curve.rates[1:]
    peak = float(rates.max())
    candidates = np.linspace(1.0, float(units.max()), 512)
    modelled = peak * np.minimum(1.0, units / candidates[:, None])
    errors = np.square(modelled / rates - 1.0).sum(axis=1)
    return peak, float(candidates[errors.argmin()])


def execution_states(load: Load, units: Sequence[int], beside: Beside | None) -> list[State]:
    """Bullet's ES (§3.2.1), each number as a logarithm: [len(units), 4], or 8 beside the other."""
    own, powers = _sizes(load), [UNITS_WEIGHT * log2(each) for each in units]
    if beside is None:
        return [(*own, power) for power in powers]
    its = _sizes(beside.load)
    return [
        (*own, power, *its, UNITS_WEIGHT * log2(other))
        for power, other in zip(powers, beside.each(len(powers)), strict=True)
    ]


def _sizes(load: Load) -> State:
    return log2(max(1, load.new)), log2(1 + load.reused / 16), 0.5 * log2(max(1, load.requests))


def _summed(
    layers: int, block: Operators, classifier: Operators, rates: Sequence[tuple[float, float]]
) -> Sequence[float]:
    """So many layers and the classifier at each pair of C and D."""
    return [layers * block.seconds(*pair) + classifier.seconds(*pair) for pair in rates]
