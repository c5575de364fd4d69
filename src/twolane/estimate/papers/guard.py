"""The contention guard of MuxWise (§3.3.2): the largest slowdown seen in a cell of a grid.

    T_decode beside prefill <= T_solo · max { slowdowns seen in the cell }

A cell is a range of (new and reused tokens of the prefill batch, batch size and reused tokens of a
request in the decode batch, level): powers of four for tokens, of two for the batch size. A
slowdown is the time of a step beside prefill over the solo-run model's prediction, so the guard
answers for the model's error, too. The paper measures every cell. Here one without samples of its
own borrows a mean of those that have some, near ones above all, and as much more as covers all but
one in a hundred of those, each left out in turn. Whatever is seen online and is larger raises a
cell; a borrowed cell falls to its own largest once it has `OWN_SAMPLES` samples. Prefill is not
guarded (§3.4.1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, log2

import numpy as np

from twolane.estimate.base import Estimator
from twolane.estimate.papers.solo_run import SoloRun
from twolane.estimate.profile import Profile
from twolane.estimate.query import Corunner, Floats, LaunchShape, Load, decode_step

OWN_SAMPLES = 20
"""Samples after which a borrowed cell stands on its own."""

Cell = tuple[int, int, int, int, int]
"""Powers of new, reused, batch size, context of a request; then the decode lane's units."""


@dataclass(slots=True)
class _Known:
    """Slowdowns of a cell."""

    slowdown: float
    """The largest, its own or borrowed."""
    own: float = 0.0
    """The largest seen online in the cell itself."""
    count: int = 0
    """Number of samples seen online in the cell itself."""
    borrowed: bool = False


class ContentionGuard(Estimator):
    """Solo runs, and for decode beside prefill a bound that no step seen exceeded.

    Without `bound` it answers as the solo-run models do.
    """

    def __init__(self, profile: Profile) -> None:
        self._solo = SoloRun(profile)
        self._cells: dict[Cell, _Known] = {}
        for sample in profile.training("decode", beside=True):
            corunner = sample.corunner
            assert corunner is not None
            for seconds in sample.seconds:
                cell, slowdown = self._seen(sample.load, sample.units, seconds, corunner)
                known = self._cells.setdefault(cell, _Known(slowdown))
                known.slowdown = max(known.slowdown, slowdown)
        self._places = np.array([_place(cell) for cell in self._cells])
        self._logs = np.array([log(known.slowdown) for known in self._cells.values()])
        self._margin = self._left_out()

    def observe(
        self, launch: LaunchShape, units: int, seconds: float, corunner: Corunner | None = None
    ) -> None:
        """See `Estimator.observe`; only decode beside prefill is learnt from."""
        if launch.kind != "decode" or corunner is None:
            return
        cell, slowdown = self._seen(launch.load, units, seconds, corunner)
        (known,) = self._known([cell])
        known.own = max(known.own, slowdown)
        known.count += 1
        if known.borrowed and known.count >= OWN_SAMPLES:
            known.borrowed, known.slowdown = False, known.own
        known.slowdown = max(known.slowdown, known.own)

    def _seen(
        self, load: Load, units: int, seconds: float, corunner: Corunner
    ) -> tuple[Cell, float]:
        """Return the cell of a step, and its slowdown."""
        solo = self._solo.predict(decode_step(load), units)
        assert solo is not None
        (cell,) = _cells(load, (units,), corunner)
        return cell, seconds / solo

    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float]:
        solo = self._solo._seconds(launch, units, corunner, bound)
        if launch.kind != "decode" or not bound or corunner is None:
            return solo
        known = self._known(list(_cells(launch.load, units, corunner)))
        return [each * cell.slowdown for each, cell in zip(solo, known, strict=True)]

    def _known(self, cells: Sequence[Cell]) -> list[_Known]:
        """Return the slowdowns of cells; those without samples borrow."""
        empty = [cell for cell in cells if cell not in self._cells]
        for cell, slowdown in zip(empty, self._borrowed(empty), strict=True):
            self._cells[cell] = _Known(slowdown, borrowed=True)
        return [self._cells[cell] for cell in cells]

    def _borrowed(self, cells: Sequence[Cell]) -> list[float]:
        if not len(self._logs) or not cells:
            return [1.0] * len(cells)
        places = np.array([_place(cell) for cell in cells])
        means = self._means(_distances(places, self._places)) + self._margin
        return [max(1.0, exp(mean)) for mean in means.tolist()]

    def _left_out(self) -> float:
        """Return the largest logarithm by which measured cells exceed what they would borrow."""
        if len(self._logs) < 2:
            return 0.0
        distances = _distances(self._places, self._places)
        np.fill_diagonal(distances, np.inf)
        above = self._logs - self._means(distances)
        # Share of cells that are not slower than they would borrow.
        return float(np.quantile(above, 0.99, method="higher"))

    def _means(self, distances: Floats) -> Floats:
        """Means of the measured cells' logarithms, weighted by distances [L, measured]: [L]."""
        # Added to distances: a cell next to one is not all that is known of it.
        weights = 1.0 / np.square(np.square(distances + 0.5))
        return np.asarray(weights.dot(self._logs) / weights.sum(axis=1))


def _cells(load: Load, units: Sequence[int], corunner: Corunner) -> Iterator[Cell]:
    """Return the cell at each of the units."""
    prefill = corunner.load
    four = (
        _power_of_four(prefill.new),
        _power_of_four(prefill.reused),
        int(log2(max(1, load.requests))),
        _power_of_four(load.reused // max(1, load.requests)),
    )
    return ((*four, each) for each in units)


def _power_of_four(tokens: int) -> int:
    return (tokens.bit_length() + 1) // 2


def _place(cell: Cell) -> list[float]:
    """Return a cell's coordinates for distances: new tokens and units make the most of it."""
    new, reused, batch, context, units = cell
    return [2 * new, reused / 2, batch, context / 2, 4 * log2(units)]


def _distances(some: Floats, others: Floats) -> Floats:
    """Sums of the differences: [some, others]."""
    return np.asarray(np.abs(others - some[:, None]).sum(axis=2))
