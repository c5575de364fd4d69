"""Where launching takes the host long, plans leave room for it: no lane runs dry meanwhile."""

import itertools
from collections.abc import Sequence

import pytest

from tests.sim.durations import FixedDurations
from tests.systems.simulation import LAYERS, LEVELS, UNITS, Simulation, simulate, submit
from twolane.devices import LaneName
from twolane.engine.launch_costs import END_FACTOR, HALF_LIFE_SECONDS, SLICE_SECONDS, LaunchCosts
from twolane.lanes.base import Ticket
from twolane.lanes.work import DecodeWork, PrefillWork, Work
from twolane.sim.lanes import SimLanes
from twolane.systems.plan import DecodeSteps, Hybrid, PrefillSlice
from twolane.systems.registry import make_system

STEP, LAYER, HYBRID = 0.010, 0.006, 0.030
BETWEEN = 0.004
"""Seconds between two launches."""


class SlowHost(FixedDurations):
    """Launching a layer takes the host 3.1 ms: half as long as the layer, more than a slice may."""

    def host_seconds(self, work: Work) -> tuple[float, float]:
        if isinstance(work, DecodeWork):
            return 0.0, 0.0
        layers = work.last - work.first if isinstance(work, PrefillWork) else LAYERS
        return 0.0031 * layers, 0.0031 * layers


class SilentLanes(SimLanes):
    """Lanes whose tickets do not say what launching took."""

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[Ticket]) -> Ticket:
        ticket = super().launch(lane, units, work, after)
        ticket.host_seconds = 0.0
        return ticket


def gaps(sim: Simulation, name: str) -> list[float]:
    """After the first few: they may be learned from."""
    return [b - a for a, b in itertools.pairwise(sim.times[name])][10:]


def served(kind: type[SimLanes], system: str, **options: str) -> Simulation:
    arrivals = [(0.0, submit("long", 20, 200))]
    arrivals += [(0.05 + 0.2 * i, submit(f"p{i}", 100 + i, 2)) for i in range(8)]
    durations = SlowHost(prefill_layer=LAYER, decode_step=STEP, hybrid=HYBRID)
    return simulate(make_system(system, options), arrivals, lanes=kind(UNITS, LEVELS, durations))


def test_decode_does_not_wait_for_a_slice_to_be_launched() -> None:
    assert max(gaps(served(SilentLanes, "static-split"), "long")) > 2.0 * STEP
    assert max(gaps(served(SimLanes, "static-split"), "long")) < 1.5 * STEP


def test_a_hybrid_pass_is_launched_while_the_one_before_it_runs() -> None:
    def spare(kind: type[SimLanes]) -> float:
        """Seconds between hybrid passes that follow one another."""
        ran = served(kind, "chunked", token_budget="32").record.of("device")
        pairs = [(a, b) for a, b in itertools.pairwise(ran) if a.tokens > 2 and b.tokens > 2]
        return sum(b.start - a.end for a, b in pairs) / len(pairs)

    assert spare(SilentLanes) > 0.4 * HYBRID
    assert spare(SimLanes) < 0.2 * spare(SilentLanes)


def test_what_launching_takes_is_forgotten() -> None:
    """One launch that compiled a kernel does not make the rest come early, or in single layers."""
    sim = served(SimLanes, "static-split")
    launching = sim.engine.state.launch_costs
    assert launching.layers_at_once == 1
    for _ in range(50):
        part = PrefillSlice(1, min(1 + launching.layers_at_once, LAYERS - 1))
        launching.note(part, 1e-5, sim.seconds)
    assert launching.layers_at_once == LAYERS
    launching.note(PrefillSlice(1, 2), 1e-5, sim.seconds + 10 * HALF_LIFE_SECONDS)
    assert launching.longest["prefill"] < 1e-3


def test_what_a_pass_takes_is_remembered_while_decode_steps_are_launched() -> None:
    """The next pass may come at once. A lane is told only of kinds of launches that it may get."""
    launching = LaunchCosts(LAYERS)
    launching.note(Hybrid(), 0.005, 0.0)
    launching.note(PrefillSlice(0, 1), 0.002, 0.0)
    for i in range(10):
        launching.note(DecodeSteps(), 0.0005, BETWEEN * i)
    assert launching.longest["device"] == launching.seconds(Hybrid()) > 0.004
    assert 0.0015 < launching.longest["prefill"] < 0.002
    assert launching.longest["decode"] == 0.0005


def test_a_stall_is_half_forgotten_after_each_half_life() -> None:
    """However many launches there were meanwhile, and also of a kind that there were none of."""
    launching = LaunchCosts(LAYERS)
    launching.note(Hybrid(), 0.05, 0.0)
    for i in range(1, 11):
        launching.note(DecodeSteps(), 0.0005, 0.2 * i * HALF_LIFE_SECONDS)
    assert launching.seconds(Hybrid()) == pytest.approx(0.05 / 4)
    launching.note(Hybrid(), 0.001, 12 * HALF_LIFE_SECONDS)
    assert launching.seconds(Hybrid()) == 0.001


def test_ends_of_a_batch_are_a_kind_of_their_own() -> None:
    launching = LaunchCosts(LAYERS)
    launching.note(PrefillSlice(0, 1), 0.004, 0.0)
    launching.note(PrefillSlice(1, 2), 0.001, 0.0)
    assert launching.seconds(PrefillSlice(LAYERS - 1, LAYERS)) == 0.004
    assert launching.seconds(PrefillSlice(2, 3)) == 0.001
    assert launching.seconds(DecodeSteps()) == 0.0


def test_what_slices_cost_beside_their_layers_does_not_make_them_shorter() -> None:
    """A layer takes 0.1 ms and a slice 1.4 beside them, which was slow once: sixteen layers fill
    the time, though the mean cost of a layer, launched alone, is 1.5 ms."""
    launching = LaunchCosts(36)
    launching.note(PrefillSlice(1, 2), 0.004, 0.0)
    assert launching.layers_at_once == 1
    for _ in range(12):
        layers = launching.layers_at_once
        launching.note(PrefillSlice(1, 1 + layers), 0.0014 + 0.0001 * layers, 0.0)
    assert 14 <= launching.layers_at_once <= 17


def test_slices_become_longer_by_a_factor_of_two_at_most() -> None:
    launching, seen = LaunchCosts(36), []
    launching.note(PrefillSlice(1, 2), 0.004, 0.0)
    for _ in range(5):
        seen.append(launching.layers_at_once)
        launching.note(PrefillSlice(1, 1 + seen[-1]), 1e-5, 0.0)
    assert seen == [1, 2, 4, 8, 16]


def test_one_slow_slice_in_three_does_not_make_them_short() -> None:
    """As on a host where each launch may have to wait for Python's lock, 4 ms here."""
    launching, seen = LaunchCosts(36), []
    for i in range(60):
        seen.append(launching.layers_at_once)
        slow = 0.004 if i % 3 == 0 else 0.0
        launching.note(PrefillSlice(1, 1 + seen[-1]), 0.0007 + 0.0001 * seen[-1] + slow, 0.0)
    assert min(seen[-30:]) >= 4


def serve(
    launching: LaunchCosts, layer: float, batches: int = 60
) -> list[tuple[PrefillSlice, float]]:
    """Batches in slices of as many layers as may be, on a host that takes 0.4 ms for a slice, 1.4
    more to lay out a batch and 1.2 to sample; each slice with its time."""
    launched: list[tuple[PrefillSlice, float]] = []
    for _ in range(batches):
        first = 0
        while first < 36:
            last = min(36, first + launching.layers_at_once)
            seconds = 0.0004 + layer * (last - first)
            seconds += 0.0014 * (first == 0) + 0.0012 * (last == 36)
            launched.append((PrefillSlice(first, last), seconds))
            launching.note(*launched[-1], 0.0)
            first = last
    return launched


@pytest.mark.parametrize(("layer", "layers"), [(4e-5, 36), (1.2e-4, 34), (1.6e-4, 25)])
def test_halves_of_a_batch_become_whole_again(layer: float, layers: int) -> None:
    """One slow launch makes two slices of a batch. Both are ends, there is none between them to
    learn from: they grow by themselves, as far as ends may take."""
    launching = LaunchCosts(36)
    launching.note(PrefillSlice(0, 36), 0.015, 0.0)
    assert launching.layers_at_once == 18
    launched = serve(launching, layer)
    assert launching.layers_at_once == layers
    assert max(seconds for _, seconds in launched) <= END_FACTOR * SLICE_SECONDS


def test_an_end_that_takes_in_what_is_left_grows_too() -> None:
    """`auto` leaves no short slice for the end: 15 layers and 21."""
    launching = LaunchCosts(36)
    launching.note(PrefillSlice(0, 30), 0.015, 0.0)
    assert launching.layers_at_once == 15
    launching.note(PrefillSlice(0, 15), 0.002, 1.0)
    launching.note(PrefillSlice(15, 36), 0.002, 1.0)
    assert launching.layers_at_once == 36


@pytest.mark.parametrize("layer", [2.8e-4, 6e-4])
def test_what_ends_may_take_does_not_make_the_slices_between_them_longer(layer: float) -> None:
    """Ends may take twice as long. Between them one layer too many is tried now and then."""
    launched = serve(LaunchCosts(36), layer)[-50:]
    between = [seconds for work, seconds in launched if work.first and work.last < 36]
    assert between
    assert max(between) <= SLICE_SECONDS + layer
    ends = [seconds for work, seconds in launched if not work.first or work.last == 36]
    assert max(ends) <= END_FACTOR * SLICE_SECONDS
