"""What every estimator keeps to, and what the engine tells them."""

import numpy as np
import pytest

from tests.sim.durations import FixedDurations
from tests.systems.simulation import LAYERS, UNITS, Ran, simulate, submit
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.query import Corunner, Load, decode_step, hybrid_pass, prefill_slice
from twolane.lanes.work import DecodeWork, Work
from twolane.systems.registry import make_system

LOAD = Load((512, 1), (0, 640))


def taught() -> OnlineEstimator:
    estimator = OnlineEstimator()
    for units in (16, 32, 132):
        estimator.observe(prefill_slice(LOAD, 4), units, 0.04 / units)
        estimator.observe(decode_step(Load.decode([100] * 8)), units, 0.5 / units)
        estimator.observe(hybrid_pass(LOAD), units, 0.9 / units)
    return estimator


def test_sums_of_a_load():
    load = Load((3, 1, 2, 1), (10, 7, 0, 0))
    assert (load.requests, load.new, load.reused) == (4, 7, 17)
    assert (load.squares, load.products) == (9 + 1 + 4 + 1, 30 + 7)
    assert load.decoding == Load.decode([7])
    assert load.chunks == Load([3, 2, 1], [10, 0, 0])  # a prompt of one token is one, too


def test_nothing_known_is_none():
    fresh = OnlineEstimator()
    assert fresh.predict(prefill_slice(LOAD, 1), 16) is None
    assert fresh.predict(decode_step(LOAD), np.array([16, 32])) is None
    assert fresh.predict(hybrid_pass(LOAD), 132) is None


def test_an_array_of_units_is_answered_element_by_element():
    estimator = taught()
    units = np.array([16, 32, 132])
    for predict in (
        lambda u: estimator.predict(prefill_slice(LOAD, 2), u),
        lambda u: estimator.predict(decode_step(Load.decode([100] * 8)), u),
        lambda u: estimator.predict(hybrid_pass(LOAD), u),
    ):
        together = predict(units)
        assert together.tolist() == pytest.approx([predict(u) for u in units.tolist()])
        assert isinstance(predict(16), float)


def test_the_online_estimator_takes_fewer_units_than_it_saw_to_be_slower():
    """And more to be no faster: what was never measured is not hoped for."""
    estimator = OnlineEstimator()
    estimator.observe(prefill_slice(LOAD, 4), 100, 0.04)
    seconds = estimator.predict(prefill_slice(LOAD, 4), np.array([25, 100, 132]))
    assert seconds.tolist() == pytest.approx([0.16, 0.04, 0.04])


class Noting(OnlineEstimator):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[tuple[Load, int, float, Corunner | None, bool]] = []
        self.steps: list[tuple[Load, int, float, Corunner | None]] = []

    def observe(self, launch, units, seconds, corunner=None):
        super().observe(launch, units, seconds, corunner)
        kind, load, layers, finishes, _ = launch
        if kind == "prefill":
            self.slices.append((load, layers, seconds, corunner, finishes))
        elif kind == "decode":
            self.steps.append((load, units, seconds, corunner))


def test_the_engine_says_what_ran_beside():
    """Two prompts: the second is prefilled, in slices, beside the decode of the first."""
    estimator = Noting()
    arrivals = [(0.0, submit("a", 50, 60)), (0.5, submit("b", 70, 5))]
    durations = FixedDurations(prefill_layer=0.050)
    system = make_system("static-split", {"decode_units": "48", "slice_seconds": "0.1"})
    simulation = simulate(system, arrivals, durations=durations, estimator=estimator)
    first, *others = estimator.slices
    assert first == (Load([50], [0]), LAYERS, pytest.approx(0.4), None, True)
    assert all(load == Load([70], [0]) for load, *_ in others)
    assert [finishes for *_, finishes in others] == [False] * (len(others) - 1) + [True]
    besides = [beside for _, _, _, beside, _ in others[1:]]
    assert besides
    assert all(b and b.load.requests == 1 and b.units == 48 for b in besides)
    beside_prefill = [step for step in estimator.steps if step[3] is not None]
    # The step that was queued before the prompt came has the whole device.
    assert {(units, b.units) for _, units, _, b in beside_prefill} == {(48, 84), (UNITS, 84)}
    assert all(b.load == Load([70], [0]) for *_, b in beside_prefill)
    told = len(estimator.steps)
    mixed = [
        step
        for step in simulation.record.of("decode")
        if 0 < sum(shared(step, other) for other in simulation.record.of("prefill")) < 0.9
    ]
    assert told == len(simulation.record.of("decode")) - len(mixed)


def test_a_step_is_learnt_as_long_as_it_took_among_others_of_its_launch():
    estimator = Noting()
    system = make_system("static-split", {"look_ahead": "3"})
    durations = FixedDurations(decode_step=0.02)
    simulate(system, [(0.0, submit("a", 50, 10))], durations=durations, estimator=estimator)
    assert [seconds for _, _, seconds, _ in estimator.steps] == [pytest.approx(0.02)] * 3


class SlowHost(FixedDurations):
    """The device begins with decode steps before the host has launched all of them."""

    def host_seconds(self, work: Work) -> tuple[float, float]:
        return 0.0, 0.03 if isinstance(work, DecodeWork) else 0.0


@pytest.mark.parametrize("promises", [False, True])
def test_bounds_are_not_learnt_from_launches_that_may_have_waited_for_the_host(promises):
    """Who has no profile has nothing else to learn from."""
    estimator = Noting()
    estimator.promises = promises
    durations = SlowHost(decode_step=0.02)
    system = make_system("prefill-first", {})
    simulate(system, [(0.0, submit("a", 50, 9))], durations=durations, estimator=estimator)
    assert len(estimator.slices) == 1
    steps = [seconds for *_, seconds, _ in estimator.steps]
    assert steps == ([] if promises else pytest.approx([0.03] * 8))


def shared(a: Ran, b: Ran) -> float:
    """Share of a's time that b ran, too."""
    both = min(a.end, b.end) - max(a.start, b.start)
    return max(0.0, both) / (a.end - a.start)
