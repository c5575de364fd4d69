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
from math import log2

import numpy as np

from twolane.estimate import Beside, Estimator, Floats, Ints, Load
from twolane.estimate.operators import Shape
from twolane.estimate.profile import Profile, Sample
from twolane.estimate.sweep import Curve, Sweep, step_bytes

ONLINE = 128
"""Launches that are remembered, of each kind."""
UNITS_WEIGHT = 4.0
"""A doubling of the units is as far as so many doublings of the tokens."""


class Scaling:
    """α over a space of execution states: Shepard's interpolation of log α, power 4.

    Args:
        states: [S, features].
        alphas: [S].
    """

    def __init__(self, states: Sequence[Floats], alphas: Sequence[float]) -> None:
        known = np.array(states, dtype=float)
        self._states = np.vstack([known, np.full((ONLINE, known.shape[1]), 1e6)])
        self._norms = np.square(self._states).sum(axis=1)
        self._logs = np.concatenate([np.log(alphas), np.zeros(ONLINE)])
        self._first = self._next = len(known)

    def at(self, states: Floats) -> Floats:
        """α at each of the states [L, features]."""
        norms = np.square(states).sum(axis=1)
        distance = norms[:, None] - 2.0 * states @ self._states.T + self._norms
        weight = 1.0 / np.square(np.maximum(distance, 0.0) + 1e-3)
        return np.asarray(np.exp(weight @ self._logs / weight.sum(axis=1)))

    def add(self, state: Floats, alpha: float) -> None:
        """Remember a launch in the place of the oldest one."""
        place = self._next
        self._states[place], self._logs[place] = state, np.log(alpha)
        self._norms[place] = np.square(state).sum()
        self._next = place + 1 if place + 1 < len(self._logs) else self._first


class SmRoofline(Estimator):
    """Equation 1 scaled by Equation 2, with contention. Promises no bound."""

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
        ideal = self._slice(load, layers, np.array([units]), finishes)
        self._learn("prefill", load, units, beside, seconds / float(ideal[0]))

    def observe_decode(
        self, load: Load, units: int, seconds: float, beside: Beside | None = None
    ) -> None:
        """See `Estimator.observe_decode`."""
        ideal = self._step(load, np.array([units]), beside)
        self._learn("decode", load, units, beside, seconds / float(ideal[0]))

    def observe_hybrid(self, load: Load, units: int, seconds: float) -> None:
        """See `Estimator.observe_hybrid`."""
        ideal = self._hybrid_pass(load, np.array([units]))
        self._learn("hybrid", load, units, None, seconds / float(ideal[0]))

    def _prefill(
        self,
        load: Load,
        layers: int,
        units: Ints,
        beside: Beside | None,
        finishes: bool,
        bound: bool,
    ) -> Floats | None:
        ideal = self._slice(load, layers, units, finishes)
        return ideal * self._alpha("prefill", load, units, beside)

    def _decode(self, load: Load, units: Ints, beside: Beside | None, bound: bool) -> Floats | None:
        return self._step(load, units, beside) * self._alpha("decode", load, units, beside)

    def _hybrid(self, load: Load, units: Ints, bound: bool) -> Floats | None:
        return self._hybrid_pass(load, units) * self._alpha("hybrid", load, units, None)

    def _slice(self, load: Load, layers: int, units: Ints, finishes: bool) -> Floats:
        """Equation 1 over a prefill slice."""
        rates = self._rates(units)
        block = self._shape.linears(load.new) + self._shape.together(load)
        seconds = layers * block.seconds(*rates)
        if finishes:
            seconds += self._shape.classifier(load.requests).seconds(*rates)
        return seconds

    def _step(self, load: Load, units: Ints, beside: Beside | None) -> Floats:
        """Equation 1 over a decode step."""
        flop_rate, byte_rate = self._rates(units)
        if beside is not None:
            byte_rate = self._contended.bandwidth(byte_rate, units, beside.load.new)
        rates = flop_rate, byte_rate
        block = self._shape.linears(load.requests) + self._shape.together(load)
        classifier = self._shape.classifier(load.requests).seconds(*rates)
        return np.asarray(self._layers * block.seconds(*rates) + classifier)

    def _hybrid_pass(self, load: Load, units: Ints) -> Floats:
        """Equation 1 over a hybrid pass; the two attentions are kernels of their own."""
        rates, shape = self._rates(units), self._shape
        block = shape.linears(load.new) + shape.together(load.chunks)
        block += shape.together(load.decoding)
        classifier = shape.classifier(load.requests).seconds(*rates)
        return np.asarray(self._layers * block.seconds(*rates) + classifier)

    def _rates(self, units: Ints) -> tuple[Floats, Floats]:
        """C_p and D_p."""
        p = units.astype(np.float64)
        return self._flops_a_unit * p, self._peak * np.minimum(1.0, p / self._inflection)

    def _alpha(self, kind: str, load: Load, units: Ints, beside: Beside | None) -> Floats:
        scaling = self._scaling.get((kind, beside is not None)) or self._scaling[kind, False]
        if (kind, True) not in self._scaling:
            beside = None
        return scaling.at(execution_states(load, units, beside))

    def _learn(
        self, kind: str, load: Load, units: int, beside: Beside | None, alpha: float
    ) -> None:
        scaling = self._scaling.get((kind, beside is not None))
        if scaling is not None:
            scaling.add(execution_states(load, np.array([units]), beside)[0], alpha)

    def _fitted(self, samples: Sequence[Sample]) -> Scaling:
        states, alphas = [], []
        for sample in samples:
            units, load = np.array([sample.units]), sample.load
            beside = sample.beside.beside if sample.beside else None
            if sample.kind == "prefill":
                ideal = self._slice(load, sample.layers, units, sample.finishes)
            elif sample.kind == "decode":
                ideal = self._step(load, units, beside)
            else:
                ideal = self._hybrid_pass(load, units)
            states.append(execution_states(load, units, beside)[0])
            alphas.append(sample.median / float(ideal[0]))
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

    def bandwidth(self, alone: Floats, units: Ints, tokens: int) -> Floats:
        """D(p, sl), never above what there is alone."""
        if not self._rows:
            return alone
        power = (tokens.bit_length() + 1) // 2
        row = self._rows[min(self._rows, key=lambda known: abs(known - power))]
        return np.minimum(alone, row.at(units))


def inflection(curve: Curve) -> tuple[float, float]:
    """D_peak and the N_d that fits best to a measured curve."""
    units, rates = curve.units[1:], curve.rates[1:]
    peak = float(rates.max())
    candidates = np.linspace(1.0, float(units.max()), 512)
    modelled = peak * np.minimum(1.0, units / candidates[:, None])
    errors = np.square(modelled / rates - 1.0).sum(axis=1)
    return peak, float(candidates[errors.argmin()])


def execution_states(load: Load, units: Ints, beside: Beside | None) -> Floats:
    """Bullet's ES (§3.2.1), each number as a logarithm: [len(units), 4], or 8 beside the other."""
    own = _half(load, units)
    if beside is None:
        return own
    return np.hstack([own, _half(beside.load, np.broadcast_to(beside.units, units.shape))])


def _half(load: Load, units: Ints) -> Floats:
    sizes = log2(max(1, load.new)), log2(1 + load.reused / 16), 0.5 * log2(max(1, load.requests))
    half = np.empty((len(units), 4))
    half[:, :3] = sizes
    half[:, 3] = UNITS_WEIGHT * np.log2(units)
    return half
