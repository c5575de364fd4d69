"""The staggered way: layers on the whole device while the next step has time, then both lanes."""

from dataclasses import replace

import pytest

from tests.estimate import synthetic
from tests.systems.handmade import LAYERS, LEVELS, UNITS, batch, decoding, view, waiting
from twolane.engine.config import EngineConfig
from twolane.estimate.query import Load, decode_step, prefill_slice
from twolane.results.result import BenchConfig
from twolane.sim.config import SimulateConfig
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.systems.auto.candidates import STAGGERED_FRACTION, Candidate, Candidates
from twolane.systems.auto.system import Auto
from twolane.systems.auto.target import TbtTarget
from twolane.systems.auto.turns import LastTurns, LaunchPlanner, Prompts
from twolane.systems.plan import DecodeSteps, Launch, PrefillSlice
from twolane.systems.view import LaneView
from twolane.workload.spec import WorkloadSpec

KNOWN = synthetic.calibrated()
LEAD = Auto().lead_seconds
P, D = 116, 16
CHOICE = Candidate("staggered", (P, D), 8, 0.0025, 0, 0.048, 0.9, 0.9, beside=0.020, ahead=0.004)
"""A layer takes 4 ms on the whole device, and eight of them 20 ms beside a step."""


def turn(last: float, lanes: dict[str, LaneView], spent: float = 0.0) -> tuple[list[Launch], float]:
    """The launches at time 0, and the whole device's seconds of prefill since the last step.

    Args:
        last: when the last tokens came, in seconds.
        lanes: what is under way.
        spent: seconds of prefill that the whole device got since then.
    """
    here = view(KNOWN, decoding=[decoding("d", 1000, last_token_at=last)], lanes=lanes)
    prompts = Prompts(Load([8000], [0]), 10, (), (8000,))
    target = TbtTarget(bound=0.05, planned=0.05, latest=0.05)
    planner = LaunchPlanner(here, LEAD, (), prompts, 0.005, target, CHOICE, LastTurns(spent=spent))
    plan, after = planner.plan()
    return list(plan.launches), after.spent


def layers(count: int) -> PrefillSlice:
    return PrefillSlice(10, 10 + count)


def test_the_whole_device_has_the_time_that_the_next_step_leaves() -> None:
    """The step ends at 3 ms and the slice beside it at 4; the next ones begin at 32.5 ms."""
    lanes = {"decode": LaneView(1, D, 0.003), "prefill": LaneView(1, P, 0.004)}
    assert turn(-0.040, lanes) == ([Launch("device", UNITS, layers(7))], pytest.approx(0.028))


def test_a_second_batch_has_what_the_first_has_left() -> None:
    lanes = {"device": LaneView(1, UNITS, 0.004)}
    made, spent = turn(-0.008, lanes, spent=0.012)
    assert made == [Launch("device", UNITS, layers(4))]
    assert spent == pytest.approx(0.028)


def test_then_the_step_runs_beside_further_layers() -> None:
    made, _ = turn(-0.024, {"device": LaneView(1, UNITS, 0.005)}, spent=0.028)
    step = Launch("decode", D, DecodeSteps(waits=True))
    assert made == [step, Launch("prefill", P, layers(8))]


def test_a_slice_beside_the_end_of_a_step_is_no_longer_than_that() -> None:
    lanes = {"decode": LaneView(1, D, 0.012), "prefill": LaneView(1, P, 0.004)}
    assert turn(-0.040, lanes)[0] == [Launch("prefill", P, layers(3))]


@pytest.mark.parametrize(("until", "goes"), [(0.015, False), (0.026, True)])
def test_a_step_waits_for_the_slice_under_way_if_that_leaves_time(until: float, goes: bool) -> None:
    made, _ = turn(-0.002, {"prefill": LaneView(1, P, until)})
    assert made == ([Launch("decode", D, DecodeSteps(waits=True))] if goes else [])


def test_the_pace_counts_whole_layers_alone_and_beside_the_step() -> None:
    levels = [level for level in LEVELS if all(level)]
    decode, prompts, target = Load.decode([2000] * 16), Load([8000], [0]), 0.1
    step = KNOWN.predict(decode_step(decode), UNITS, bound=True)
    whole = prefill_slice(prompts, LAYERS)
    alone, bound = KNOWN.predict(whole, UNITS), KNOWN.predict(whole, UNITS, bound=True)
    assert step and alone and bound
    ways = Candidates(KNOWN, LAYERS, UNITS, levels, decode, step, prompts, target)
    assert all(way.mode != "staggered" for way in ways.all(sliced=True))
    found = replace(ways, stagger=True).all(sliced=True)
    spatial = {way.level: way for way in found if way.mode == "spatial"}
    staggered = [way for way in found if way.mode == "staggered"]
    assert staggered
    for way in staggered:
        beside = max(spatial[way.level].gap, way.layers * way.layer)
        ahead = int((target - beside) / (bound / LAYERS))
        assert way.gap == pytest.approx(ahead * bound / LAYERS + beside)
        done = (ahead + way.layers) * alone / LAYERS
        assert way.pace == pytest.approx(done / (ahead * alone / LAYERS + beside))


@pytest.mark.parametrize(
    ("behind", "deadline", "staggers"),
    [(2000, None, True), (1999, None, False), (2000, 10.0, False)],
    ids=["a backlog", "as good as none", "a deadline"],
)
def test_steps_wait_for_a_backlog_without_deadlines(
    behind: int, deadline: float | None, staggers: bool
) -> None:
    """A batch in layers ends all of its prompts at once; hybrid passes end the first ones first."""
    begun = batch(waiting("a", 2000), layers=4)
    decode = [decoding(f"d{i}", 2000, slo=Slo(tbt=0.02)) for i in range(64)]
    line = [waiting("b", behind, deadline=deadline)]
    here = view(KNOWN, decoding=decode, batch=begun, waiting=line)
    choice = Auto().plan(here, Auto().start())[1].current.choice
    assert choice is not None
    assert (choice.mode == "staggered") == staggers


def test_a_hybrid_pass_is_preferred_to_layers_that_gain_little() -> None:
    decode, prompts = Load.decode([2000] * 64), Load([2000], [0])
    step = KNOWN.predict(decode_step(decode), UNITS, bound=True)
    assert step
    levels = [level for level in LEVELS if all(level)]
    ways = Candidates(KNOWN, LAYERS, UNITS, levels, decode, step, prompts, 0.02, stagger=True)
    hybrid = [way.score for way in ways.all(sliced=False) if way.mode == "hybrid"]
    worth = [way.score for way in ways.all(sliced=True) if way.mode == "staggered"]
    kept = [way.score for way in ways.all(sliced=False) if way.mode == "staggered"]
    assert kept == [score for score in worth if STAGGERED_FRACTION * score > hybrid[0]]


def test_steps_that_wait_keep_the_bound() -> None:
    """Llama-70B on eight A100s, simulated, more conversations of agents than can be served."""
    config = SimulateConfig(
        engine=EngineConfig(model="llama-3.1-70b", system="auto", slo=Slo(tbt=0.1)),
        gpu="a100-80gb",
        tp=8,
        bench=BenchConfig(
            workload=WorkloadSpec(dataset="toolagent", num_prompts=16, request_rate=8.0),
            goodput={"tbt": 0.1},
        ),
    )
    found = simulate(config).result.metrics
    assert found.attainment.gaps is not None
    assert found.attainment.gaps >= 0.99
    late = found.tbt.percentiles[90.0]
    assert late is not None
    assert late > 0.08  # 0.03 with both lanes always fed
