"""Bullet's SM-scaling roofline (§3.2): Equation 1 over the operators, scaled by measurements.

    T'_k = flop_k / min(flop_k / mem_k · D_p, C_p)                             (Equation 1)
    C_p = C_peak · p / N,  D_p = D_peak · min(1, p / N_d)
    α = T_measured / T'                                                        (Equation 2)
    W_p = W_peak · min(1, p / N_w), the bandwidth of all-reduces between ranks (§3.2.2)

Beside prefill of sl new tokens, decode has the bandwidth D(p, sl), by copies beside products,
where the profile has such (`Contention`). α is interpolated from the measured samples, over
everything that Bullet calls the execution state (prefill length, batch and units, decode context,
batch and units), by inverse distance. Online, launches are added to those samples, and the oldest
of them leave (§3.2.4).
"""

from collections.abc import Sequence
from math import log, log2

import numpy as np

from twolane.estimate.base import Estimator
from twolane.estimate.papers.operators import Operators, Shape
from twolane.estimate.papers.sweep import Curve, Sweep
from twolane.estimate.profile import Profile, ProfileError, Sample
from twolane.estimate.query import Corunner, Floats, LaunchShape, Load

LAUNCHES_KEPT = 128
"""Launches that are remembered, of each kind."""
UNITS_WEIGHT = 4.0
"""A doubling of the units is as far as this many doublings of the tokens."""

State = tuple[float, ...]


class Scaling:
    """α over a space of execution states: Shepard's interpolation of log α, power 4.

    Args:
        states: [S, features].
        alphas: [S].
    """

    def __init__(self, states: Sequence[State], alphas: Sequence[float]) -> None:
        far: list[State] = [(1e6,) * len(states[0])] * LAUNCHES_KEPT
        self._lifted = np.array([_column(state) for state in (*states, *far)]).T
        """Times (x, |x|², 1) the squared distances of x to the samples, and a little more, so that
        none is zero: [features + 2, S]."""
        self._logs = np.ones((len(states) + LAUNCHES_KEPT, 2))
        """Logarithms of the factors, and ones: weighted sum and sum of weights are one product."""
        self._logs[:, 0] = [*np.log(alphas), *[0.0] * LAUNCHES_KEPT]
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
        sizes = key.weight_itemsize, key.kv_itemsize
        self._shape = Shape(profile.shape, key.itemsize, key.tensor_parallel, *sizes)
        self._layers = profile.shape.layers
        sweep = Sweep.of(profile, self._shape)
        self._flops_a_unit = float(sweep.flop_rate.at(key.units)) / key.units
        self._peak, self._inflection = inflection(sweep.byte_rate)
        self._link = profile.interconnect
        self._contended = Contention(profile)
        self._scaling: dict[tuple[str, bool], Scaling] = {}
        for kind in ("prefill", "decode", "hybrid"):
            for beside in (False, True):
                samples = profile.training(kind, beside=beside)
                if samples:
                    self._scaling[kind, beside] = self._fitted(samples)
                elif not beside:
                    raise ProfileError(f"the profile has no {kind} samples yet: measure for longer")

    def observe(
        self, launch: LaunchShape, units: int, seconds: float, corunner: Corunner | None = None
    ) -> None:
        """See `Estimator.observe`."""
        scaling = self._scaling.get((launch.kind, corunner is not None))
        if scaling is not None:
            (ideal,) = self._ideal(launch, (units,), corunner)
            (state,) = execution_states(launch.load, (units,), corunner)
            scaling.add(state, seconds / ideal)

    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float]:
        """Equation 2."""
        kind, ideal = launch.kind, self._ideal(launch, units, corunner)
        if (kind, True) not in self._scaling:
            corunner = None
        scaling = self._scaling[kind, corunner is not None]
        alphas = scaling.at(execution_states(launch.load, units, corunner)).tolist()
        return [alpha * each for alpha, each in zip(alphas, ideal, strict=True)]

    def _ideal(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None
    ) -> Sequence[float]:
        """Equation 1; the two attentions of a hybrid pass are kernels of their own."""
        shape, load = self._shape, launch.load
        layers, rates = self._layers, self._rates(units)
        block = shape.linears(load.new)
        if launch.kind == "hybrid":
            block = block + shape.together(load.chunks) + shape.together(load.decoding)
        else:
            block = block + shape.together(load)
        if launch.kind == "prefill":
            layers = launch.layers
        elif launch.kind == "decode" and corunner is not None:
            shares = self._contended.shares(units, corunner.load.new).tolist()
            rates = [(c, d * share) for (c, d), share in zip(rates, shares, strict=True)]
        classifier = shape.classifier(load.requests) if launch.finishes else Operators((), ())
        seconds = _summed(layers, block, classifier, rates)
        if shape.tensor_parallel == 1:
            return seconds
        return [
            each + layers * self._network(load.new, p)
            for each, p in zip(seconds, units, strict=True)
        ]

    def _network(self, tokens: int, units: int) -> float:
        """Return seconds of a layer's two all-reduces at W_p, each a ring over the ranks."""
        n, link = self._shape.tensor_parallel, self._link
        moved = 2 * (n - 1) / n * self._shape.reduced_bytes(tokens)
        return 2 * moved / (link.bytes_per_second * min(1.0, units / link.units))

    def _rates(self, units: Sequence[int]) -> list[tuple[float, float]]:
        """C_p and D_p."""
        return [
            (self._flops_a_unit * p, self._peak * min(1.0, p / self._inflection)) for p in units
        ]

    def _fitted(self, samples: Sequence[Sample]) -> Scaling:
        states, alphas = [], []
        for sample in samples:
            units, corunner = (sample.units,), sample.corunner
            (ideal,) = self._ideal(sample.launch, units, corunner)
            states.append(execution_states(sample.load, units, corunner)[0])
            alphas.append(sample.median / ideal)
        return Scaling(states, alphas)


class Contention:
    """D(p, sl) / D_p: the share of its bandwidth alone that a copy on p units keeps beside prefill.

    A copy runs on p units beside a large product of sl rows on all others (§3.2.3). It is taken as
    a share, since decode's kernels saturate the memory on fewer units than a copy. Between measured
    points it is linear in the units and in the powers of two of the rows. Without measurements it
    is 1, and contention is left to α.

    Args:
        profile: The profile with copies alone and beside products.
    """

    def __init__(self, profile: Profile) -> None:
        alone = {probe.units: probe.byte_rate for probe in profile.probes}
        shares: dict[int, dict[int, float]] = {}
        for probe in profile.contended:
            share = probe.byte_rate / alone[probe.units]
            shares.setdefault(probe.rows, {})[probe.units] = min(1.0, share)
        self._rows = np.log2(sorted(shares))
        self._curves = [np.array(sorted(shares[rows].items())).T for rows in sorted(shares)]
        self._known: dict[tuple[tuple[int, ...], int], Floats] = {}
        """Shares that were asked for, by the units and the next power of two of the rows."""

    def shares(self, units: Sequence[int], rows: int) -> Floats:
        """Return the share at each of the units beside prefill of this many new tokens."""
        if not self._curves:
            return np.ones(len(units))
        key = tuple(units), (rows - 1).bit_length()
        found = self._known.get(key)
        if found is None:
            by_rows = [np.interp(units, *curve) for curve in self._curves]
            place = float(np.interp(key[1], self._rows, range(len(self._rows))))
            low, part = int(place), place % 1
            high = min(low + 1, len(by_rows) - 1)
            found = self._known[key] = (1 - part) * by_rows[low] + part * by_rows[high]
        return found


def inflection(curve: Curve) -> tuple[float, float]:
    """D_peak and the N_d that fits best to a measured curve."""
    units, rates = curve.units[1:], curve.rates[1:]
    peak = float(rates.max())
    candidates = np.linspace(1.0, float(units.max()), 512)
    modelled = peak * np.minimum(1.0, units / candidates[:, None])
    errors = np.square(modelled / rates - 1.0).sum(axis=1)
    return peak, float(candidates[errors.argmin()])


def execution_states(load: Load, units: Sequence[int], corunner: Corunner | None) -> list[State]:
    """Bullet's ES (§3.2.1), each number as a logarithm: [len(units), 4], or 8 beside the other."""
    own, powers = _sizes(load), [UNITS_WEIGHT * log2(each) for each in units]
    if corunner is None:
        return [(*own, power) for power in powers]
    its = _sizes(corunner.load)
    return [
        (*own, power, *its, UNITS_WEIGHT * log2(other))
        for power, other in zip(powers, corunner.each(len(powers)), strict=True)
    ]


def _sizes(load: Load) -> State:
    return log2(max(1, load.new)), log2(1 + load.reused / 16), 0.5 * log2(max(1, load.requests))


def _summed(
    layers: int, block: Operators, classifier: Operators, rates: Sequence[tuple[float, float]]
) -> Sequence[float]:
    """Return seconds of `layers` layers and the classifier at each pair of C and D."""
    return [layers * block.seconds(*pair) + classifier.seconds(*pair) for pair in rates]
