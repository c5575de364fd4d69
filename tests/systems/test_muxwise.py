"""MuxWise: one test a statement of the paper."""

import itertools
import math

import msgspec
import pytest

from tests.estimate import synthetic
from tests.sim.durations import FixedDurations
from tests.systems.handmade import LAYERS, LEVELS, UNITS, batch, decoding, view, waiting
from tests.systems.simulation import simulate, submit
from tests.systems.test_drift import preempting
from twolane.engine.launch_costs import LaunchCosts
from twolane.estimate.papers.guard import ContentionGuard
from twolane.estimate.query import Corunner, Load, decode_step, prefill_slice
from twolane.slo import Slo
from twolane.systems.papers.muxwise import MuxWise
from twolane.systems.plan import DecodeSteps, Launch, PrefillSlice
from twolane.systems.registry import make_system

SHARED = sorted((level for level in LEVELS if all(level)), key=lambda level: level[1])
STEP = Load.decode([4000] * 32)
PROMPT = Load([6000], [0])


@pytest.fixture
def guard():
    """Its own for each test: it learns."""
    return ContentionGuard(synthetic.profile())


def asked(guard, tbt):
    rows = [decoding(f"d{i}", 4000, slo=Slo(tbt=tbt)) for i in range(32)]
    return view(guard, decoding=rows, waiting=[waiting("p", 6000)])


def decode_units(estimator, tbt, **more):
    plan, _ = MuxWise(max_batch_tokens=8192, **more).plan(asked(estimator, tbt), frozenset())
    return plan.launches[0].units


def worst_case(guard, p, d):
    return guard.predict(decode_step(STEP), d, Corunner(PROMPT, p), bound=True)


def test_decode_gets_the_best_fit_by_its_worst_case(guard):
    """§3.4.2: the fewest SMs whose worst case (§3.3.2) keeps the SLO, against brute force."""
    bounds = [worst_case(guard, p, d) for p, d in SHARED]
    chosen = set()
    for tbt in (*(f * b for b in bounds for f in (0.999, 1.001)), 0.5):
        fits = [d for (_, d), b in zip(SHARED, bounds, strict=True) if b <= tbt]
        chosen.add(decode_units(guard, tbt))
        assert decode_units(guard, tbt) == (fits[0] if fits else SHARED[-1][1])
    assert len(chosen) > 2


def test_the_number_of_layers_is_that_of_the_formula(guard):
    """§3.4.2: N_PL = ⌈T_d · N_T / T_P⌉, and the decode graph first (§3.2.2)."""
    plan, _ = MuxWise(max_batch_tokens=8192).plan(asked(guard, 0.05), frozenset())
    (decode, prefill) = plan.launches
    d, p = decode.units, prefill.units
    assert (p, d) in SHARED
    whole = guard.predict(prefill_slice(PROMPT, LAYERS, finishes=True), p)
    layers = math.ceil(worst_case(guard, p, d) * LAYERS / whole)
    assert 1 < layers < LAYERS
    assert decode == Launch("decode", d, DecodeSteps())
    assert prefill == Launch("prefill", p, PrefillSlice(0, layers))


def test_the_guard_is_raised_by_larger_evidence(guard):
    """§3.3.2: runtime data refine the guard, and with it the partition."""
    p, d = SHARED[1]
    tbt = 1.001 * worst_case(guard, p, d)
    assert decode_units(guard, tbt) == d
    guard.observe(decode_step(STEP), d, 1.01 * tbt, Corunner(PROMPT, p))
    assert decode_units(guard, tbt) > d


def test_without_the_guard_decode_is_planned_as_if_alone(guard):
    """§3.3.2: the solo-run predictor is short of what contention costs."""
    d = SHARED[1][1]
    tbt = 1.001 * guard.predict(decode_step(STEP), d)
    assert decode_units(guard, tbt, guard=False) == d
    assert decode_units(guard, tbt) > d


def test_preemption_needs_a_deadline_at_risk_and_headroom(guard):
    """§3.4.2: P2 preempts P1 if waiting would make P2 late, and P1 stays in time."""
    system = MuxWise()
    assert preempting(guard, system, slack=1e-6, new_deadline=0.1)[0].preempt
    assert not preempting(guard, system, slack=-1e-6, new_deadline=0.1)[0].preempt
    assert not preempting(guard, system, slack=1e-6)[0].preempt


def test_preemption_is_optional_and_not_recursive(guard):
    """§3.4.2."""
    off = MuxWise(preemption=False)
    assert not preempting(guard, off, slack=1.0, new_deadline=0.1)[0].preempt
    parked = batch(waiting("p1", 9000), layers=3)
    tried = preempting(guard, MuxWise(), slack=1.0, new_deadline=0.1, parked=parked)
    assert not tried[0].preempt


def run(**settings):
    """A prompt of 0.4 s comes to a request that decodes."""
    arrivals = [(0.0, submit("a", 50, 60)), (0.5, submit("b", 600, 10))]
    durations = FixedDurations(prefill_layer=0.05)
    options = {name: str(value).lower() for name, value in settings.items()}
    return simulate(
        make_system("muxwise", options), arrivals, durations=durations, slo=Slo(tbt=0.1)
    )


def longest_gap(sim):
    return max(b - a for a, b in itertools.pairwise(sim.times["a"]))


def test_layers_are_launched_as_decode_goes(guard):
    """§3.2.3: layer-wise execution; the decode graph is never held up."""
    sim = run()
    slices = [ran for ran in sim.record.of("prefill") if ran.requests == ["b"]]
    assert len(slices) == 8
    assert {ran.units for ran in slices} == {100}
    assert longest_gap(sim) == pytest.approx(0.020)


def test_without_layer_wise_execution_a_batch_is_one_launch(guard):
    """§4.4.2; nothing is left then to preempt or to move to another level, and launching it takes
    what it takes."""
    sim = run(layer_wise=False)
    assert [r.name for r in sim.record.of("prefill") if r.requests == ["b"]] == ["layers 0:8"]
    launching = LaunchCosts(LAYERS)
    launching.note(PrefillSlice(1, 2), 1.0, 0.0)
    assert launching.layers_at_once == 1
    view = msgspec.structs.replace(asked(guard, 0.05), launch_costs=launching)
    plan, _ = MuxWise(layer_wise=False).plan(view, frozenset())
    assert plan.launches[1].work == PrefillSlice(0, LAYERS)
    plan, _ = MuxWise().plan(view, frozenset())
    assert plan.launches[1].work == PrefillSlice(0, 1)


def test_without_query_based_synchronisation_decode_waits_for_the_merge():
    """§4.4.2: the next step is blocked until the last layer is done, and then has the newcomer."""
    assert longest_gap(run(query_sync=False)) == pytest.approx(0.05, abs=0.021)
    sim = run(query_sync=False, layer_wise=False)
    assert longest_gap(sim) == pytest.approx(8 * 0.05, abs=0.021)
    done = max(ran.end for ran in sim.record.of("prefill"))
    after = next(ran for ran in sim.record.of("decode") if ran.start >= done)
    assert set(after.requests) == {"a", "b"}


def test_without_query_based_synchronisation_prompts_do_not_starve_decode():
    arrivals = [(0.0, submit("a", 50, 40))]
    arrivals += [(0.1 + 0.1 * i, submit(f"b{i}", 600, 2)) for i in range(20)]
    options = {"query_sync": "false", "layer_wise": "false", "max_batch_tokens": "600"}
    sim = simulate(make_system("muxwise", options), arrivals, slo=Slo(tbt=0.1))
    assert longest_gap(sim) <= 0.08 + 0.021


def test_prefill_takes_over_the_device_when_decode_has_ended():
    """§3.2.3: later layers are switched to another context just after decode terminates."""
    arrivals = [(0.0, submit("a", 50, 12)), (0.5, submit("b", 600, 10))]
    durations = FixedDurations(prefill_layer=0.05)
    sim = simulate(make_system("muxwise"), arrivals, durations=durations, slo=Slo(tbt=0.1))
    assert len(sim.record.of("prefill")) > 1
    ended = sim.times["a"][-1]
    for ran in sim.record.of("prefill"):
        if ran.requests == ["b"]:
            assert ran.units == (UNITS if ran.start >= ended - 1e-6 else 100)
