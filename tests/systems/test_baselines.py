"""`chunked`; `two-stream` and `temporal`: what MuxWise §6 says of WindServe and of Tropical."""

import itertools

import pytest

from tests.estimate import synthetic
from tests.systems.handmade import LAYERS, UNITS, batch, decoding, view, waiting
from tests.systems.simulation import simulate, submit
from twolane.estimate.papers.solo_run import SoloRun
from twolane.estimate.query import Load, decode_step, prefill_slice
from twolane.slo import Slo
from twolane.systems.baselines.chunked import Chunked
from twolane.systems.baselines.temporal import Temporal
from twolane.systems.plan import Chunk, DecodeSteps, Hybrid, Launch, Plan, PrefillSlice
from twolane.systems.registry import make_system
from twolane.systems.view import LaneView

STEP = Load.decode([4000] * 8)
PROMPT = Load([2000], [0])


@pytest.fixture(scope="module")
def solo():
    return SoloRun(synthetic.profile())


def test_two_streams_share_all_units_without_slices():
    """Normal streams, no partition, and prefill launched whole."""
    arrivals = [(0.0, submit("a", 50, 40)), (0.3, submit("b", 300, 5))]
    sim = simulate(make_system("two-stream"), arrivals, slo=Slo(tbt=0.03))
    assert {ran.units for ran in sim.record.launches} == {UNITS}
    assert {ran.name for ran in sim.record.of("prefill")} == {"layers 0:8"}
    (second,) = (ran for ran in sim.record.of("prefill") if ran.requests == ["b"])
    assert any(ran.overlaps(second) for ran in sim.record.of("decode"))


def planned(solo, tbt, memory=False, **more):
    rows = [decoding(f"d{i}", 4000, slo=Slo(tbt=tbt)) for i in range(8)]
    asked = {"decoding": rows, "batch": batch(waiting("p", 2000), layers=3)}
    return Temporal().plan(view(solo, **(asked | more)), memory)


def test_a_slice_fills_the_slack_between_two_steps(solo):
    """Layers fit small slacks: a layer more would break the TBT SLO."""
    step = solo.predict(decode_step(STEP), UNITS)
    whole = solo.predict(prefill_slice(PROMPT, LAYERS, finishes=True), UNITS)
    tbt = step + 0.4 * whole
    plan, memory = planned(solo, tbt)
    (launch,) = plan.launches
    layers = launch.work.last - launch.work.first
    assert launch.lane == "device"
    assert launch.work.first == 3
    assert step + layers * whole / LAYERS <= tbt < step + (layers + 1) * whole / LAYERS
    assert "slack" in plan.reason
    assert memory
    plan, memory = planned(solo, tbt, memory)
    assert plan.launches == (Launch("device", UNITS, DecodeSteps()),)
    assert not memory


def test_there_is_a_layer_between_steps_even_without_slack(solo):
    plan, _ = planned(solo, 1e-4)
    assert plan.launches[0].work == PrefillSlice(3, 4)


def test_prefill_alone_is_not_sliced(solo):
    plan, _ = planned(solo, 0.05, decoding=[])
    assert plan.launches[0].work == PrefillSlice(3, LAYERS)


def test_temporal_runs_one_phase_at_a_time():
    arrivals = [(0.0, submit("a", 50, 40)), (0.3, submit("b", 300, 5))]
    sim = simulate(make_system("temporal"), arrivals, slo=Slo(tbt=0.06))
    assert {ran.lane for ran in sim.record.launches} == {"device"}
    gaps = [b - a for a, b in itertools.pairwise(sim.times["a"])]
    assert 0.03 <= max(gaps) <= 0.06 + 1e-9


@pytest.mark.parametrize(
    ("rows", "admit"),
    [
        (0, (("a", 70), ("b", 30))),
        (10, (("a", 70), ("b", 10))),
        (40, (("a", 20),)),
        (60, (("a", 1),)),
    ],
)
def test_a_chunked_pass_has_a_budget_of_tokens_and_one_at_least_for_prompts(solo, rows, admit):
    """Those count who decode and those whose prompt the pass before ends."""
    decode = [decoding(f"d{i}", 100) for i in range(2 * rows)]
    plan, _ = Chunked(token_budget=100).plan(
        view(
            solo,
            decoding=decode[:rows],
            joining={"prefill": (), "decode": (), "device": decode[rows:]},
            waiting=[waiting("a", 70), waiting("b", 500)],
        ),
        None,
    )
    assert plan.launches == (Launch("device", UNITS, Hybrid()),)
    assert plan.admit == tuple(Chunk(*each) for each in admit)
    assert plan.reason == f"{2 * rows} decode + {sum(n for _, n in admit)} prefill tokens"


def test_chunked_decodes_alone_while_no_prompt_waits(solo):
    for asked, works in (({"decoding": [decoding("d", 100)]}, [DecodeSteps()]), ({}, [])):
        plan, _ = Chunked().plan(view(solo, **asked), None)
        assert [launch.work for launch in plan.launches] == works


def test_a_chunked_pass_is_queued_before_the_device_runs_dry(solo):
    for until, launched in ((0.005, 1), (0.006, 0)):
        lanes = {"device": LaneView(1, UNITS, until)}
        plan, _ = Chunked().plan(view(solo, waiting=[waiting("a", 70)], lanes=lanes), None)
        assert len(plan.launches) == launched
    assert plan == Plan(wake_at=pytest.approx(0.001))
