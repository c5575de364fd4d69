"""What the systems of this release decide, on simulated lanes."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.estimate import synthetic
from tests.sim.durations import FixedDurations
from tests.systems.names import SYSTEM_NAMES
from tests.systems.simulation import LAYERS, UNITS, simulate, submit
from twolane.devices import LaneName
from twolane.engine.build import assemble
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Abort, ToEngine
from twolane.engine.predict import machine_key
from twolane.estimate.catalog import ESTIMATORS
from twolane.estimate.names import EstimatorName
from twolane.estimate.papers.guard import ContentionGuard
from twolane.estimate.papers.solo_run import SoloRun
from twolane.model.shapes import SHAPES
from twolane.sim.gpus import GPUS
from twolane.sim.machine import SimulatedMachine
from twolane.slo import Slo
from twolane.systems.base import System
from twolane.systems.plan import (
    Chunk,
    DecodeSteps,
    Hybrid,
    Launch,
    Plan,
    PlanError,
    PrefillSlice,
    Refusal,
    Work,
)
from twolane.systems.registry import SYSTEMS, defaults, describe, make_system, system_class


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def test_prefill_first_stalls_decode_for_a_whole_prompt() -> None:
    """MuxWise Figure 1: a long prefill delays the decode that is under way."""
    arrivals = [(0.0, submit("a", 50, 30)), (0.2, submit("b", 600, 5))]
    sim = simulate(make_system("prefill-first"), arrivals)
    assert {ran.lane for ran in sim.record.launches} == {"device"}
    assert max(gaps(sim.times["a"])) == pytest.approx(LAYERS * 0.010 + 0.020)


def test_chunked_keeps_every_pass_within_its_budget() -> None:
    """MuxWise §2.3.2: the sum of decode and prefill tokens of a pass is capped."""
    arrivals = [(0.02 * i, submit(f"r{i}", 150 + 30 * i, 12)) for i in range(8)]
    sim = simulate(make_system("chunked", {"token_budget": "64"}), arrivals)
    hybrids = [ran for ran in sim.record.launches if ran.name == "hybrid"]
    assert max(ran.tokens for ran in hybrids) == 64
    assert any(len(ran.requests) > 2 for ran in hybrids)
    assert max(gaps(sim.times["r0"])) <= 0.050 + 1e-9


def test_chunked_goes_on_with_prefill_when_decode_fills_the_budget() -> None:
    arrivals = [(0.0, submit(f"r{i}", 2, 40)) for i in range(6)]
    arrivals.append((0.5, submit("late", 10, 2)))
    sim = simulate(make_system("chunked", {"token_budget": "4"}), arrivals)
    assert len(sim.times["late"]) == 2
    assert sim.times["late"][0] < sim.times["r0"][-1]


def test_static_split_runs_both_lanes_at_once_and_alone_on_all_units() -> None:
    arrivals = [(0.0, submit("a", 50, 40)), (0.5, submit("b", 50, 5))]
    durations = FixedDurations(prefill_layer=0.050)
    system = make_system("static-split", {"decode_units": "48", "slice_seconds": "0.1"})
    sim = simulate(system, arrivals, durations=durations)
    second = [ran for ran in sim.record.of("prefill") if ran.requests == ["b"]]
    assert [ran.name for ran in second][:2] == ["layers 0:2", "layers 2:4"]
    assert {ran.units for ran in second} == {84}
    beside = [d for d in sim.record.of("decode") if any(d.overlaps(p) for p in second)]
    assert {d.units for d in beside[1:]} == {48}
    assert {ran.units for ran in sim.record.of("decode")} == {48, UNITS}
    assert sim.record.of("prefill")[0].name == f"layers 0:{LAYERS}"  # nothing decodes: no slices
    assert max(gaps(sim.times["a"])) <= 0.020 + 1e-9


def test_static_split_serves_others_soon_after_the_client_of_a_long_prompt_has_left() -> None:
    """Alone it is cut, too, once it is known how long such a prompt takes: here 16 s."""
    slow = FixedDurations(prefill_layer=2.0)
    arrivals: list[tuple[float, ToEngine]] = [(0.0, submit("known", 3000, 1))]
    arrivals += [(60.0, submit("long", 3000, 1)), (60.1, Abort("long")), (60.2, submit("b", 9, 1))]
    sim = simulate(make_system("static-split"), arrivals, durations=slow)
    (left,) = (ran for ran in sim.record.launches if ran.requests == ["long"])
    assert left.end == pytest.approx(62.0)


def test_static_split_look_ahead_launches_that_many_steps() -> None:
    sim = simulate(make_system("static-split", {"look_ahead": "4"}), [(0.0, submit("a", 9, 11))])
    assert [ran.name for ran in sim.record.of("decode")] == ["decode x4", "decode x4", "decode x2"]
    assert gaps(sim.times["a"])[1:] == pytest.approx([0.020] * 9)  # delivered step by step


@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_priorities_come_before_age(name: str) -> None:
    arrivals = [(0.0, submit("busy", 600, 2))]
    arrivals += [(0.001, submit(f"low{i}", 600, 2, priority=1)) for i in range(6)]
    arrivals += [(0.002, submit("high", 600, 2, priority=0))]
    budget = "token_budget" if "token_budget" in defaults(name) else "max_batch_tokens"
    sim = simulate(make_system(name, {budget: "600"}), arrivals)
    assert sim.times["high"][0] < min(sim.times[f"low{i}"][0] for i in range(6))


@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_nobody_is_overtaken_for_want_of_memory(name: str) -> None:
    """A long prompt that does not fit yet is not passed by short ones that would, and that come
    late enough to be behind it in every system's order."""
    arrivals = [(0.0, submit("first", 480, 60)), (0.1, submit("long", 640, 4))]
    arrivals += [(0.8 + 0.01 * i, submit(f"short{i}", 32, 4)) for i in range(20)]
    sim = simulate(make_system(name), arrivals, pages=60)
    assert sim.times["long"][0] <= min(sim.times[f"short{i}"][0] for i in range(20))


@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_an_idle_engine_plans_nothing_and_wants_no_waking(name: str) -> None:
    sim = simulate(make_system(name), [(0.0, submit("a", 40, 3)), (0.01, Abort("nobody"))])
    assert sim.engine.plan() == Plan()


@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_who_says_that_it_reads_no_slo_serves_the_same_under_any(name: str) -> None:
    """The server's and a request's own, tight and loose; and who reads them is told apart."""
    estimator = synthetic.calibrated()

    def served(server: Slo, own: Slo) -> object:
        asked = [(0.02 * i, submit(f"r{i}", 90 + 240 * (i % 3), 12, slo=own)) for i in range(8)]
        ran = simulate(make_system(name), asked, slo=server, estimator=estimator)
        return ran.times, [(a.lane, a.name, a.units, a.requests) for a in ran.record.launches]

    bounds = (Slo(ttft=0.01, tbt=0.006), Slo(ttft=9.0, tpot=0.02))
    cases = [(Slo(), Slo()), *((one, Slo()) for one in bounds), *((Slo(), one) for one in bounds)]
    runs = [served(server, own) for server, own in cases]
    differ = any(ran != runs[0] for ran in runs)
    assert differ == system_class(name).reads_slos


def test_settings_are_read_from_text_and_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'nonesuch' is unknown; there are: prefill-first"):
        make_system("nonesuch")
    with pytest.raises(ValueError, match="'budget' is not one of system chunked; it has: token_"):
        make_system("chunked", {"budget": "1"})
    with pytest.raises(ValueError, match="token_budget must be at least 1"):
        make_system("chunked", {"token_budget": "0"})
    with pytest.raises(ValueError, match="Expected `int`"):
        make_system("chunked", {"token_budget": "many"})
    assert all(describe(name) for name in SYSTEMS)


@pytest.fixture(scope="module")
def solo() -> SoloRun:
    return SoloRun(synthetic.profile())


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e308"])
@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_every_number_is_refused_by_name_or_served_with(
    name: str, value: str, solo: SoloRun
) -> None:
    """No number that is accepted ends the engine, or keeps it from a request's end."""
    numbers = [key for key, usual in defaults(name).items() if type(usual) in (int, float)]
    arrivals = [(0.03 * i, submit(f"r{i}", 90 + 240 * (i % 3), 6)) for i in range(6)]
    bounded = [(0.1, submit("tight", 300, 6, slo=Slo(ttft=1.0, tbt=0.03)))]
    for key in numbers:
        try:
            system = make_system(name, {key: value})
        except ValueError as error:
            assert key in str(error)
            continue
        sim = simulate(system, [*arrivals, *bounded], estimator=solo)
        assert len(sim.finish) + len(sim.refused) == 7
        assert value not in ("nan", "inf", "-1")
        assert value != "0" or key not in ("max_batch_tokens", "token_budget", "tbt_seconds")


def test_systems_do_not_import_torch() -> None:
    code = "import sys, twolane.systems.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class InTurn(System):
    """Answers with one plan after the other."""

    def __init__(self, *plans: Plan) -> None:
        self._plans = iter(plans)

    def plan(self, view: object, memory: None) -> tuple[Plan, None]:
        return next(self._plans), None


def launched(lane: LaneName, units: int, work: Work, **more: Any) -> Plan:
    return Plan(launches=(Launch(lane, units, work),), **more)


ADMIT_A, ADMIT_B = (Plan(admit=(Chunk(name, 8),)) for name in "ab")
PARK, RESUME = Plan(preempt=True), Plan(resume=True)
ILLEGAL = [
    ("on offer", [launched("decode", 7, DecodeSteps())]),
    ("not where the open batch is", [launched("prefill", 100, PrefillSlice(0, 2))]),
    ("not where the open batch is", [ADMIT_A, launched("prefill", 100, PrefillSlice(1, 2))]),
    ("with 8 layers", [ADMIT_A, launched("prefill", 100, PrefillSlice(0, LAYERS + 1))]),
    ("with 8 layers", [ADMIT_A, launched("prefill", 100, PrefillSlice(0, 0))]),
    ("without an open batch", [launched("device", UNITS, Hybrid())]),
    (
        "begun in slices",
        [
            structs.replace(ADMIT_A, launches=(Launch("prefill", 100, PrefillSlice(0, 2)),)),
            launched("device", UNITS, Hybrid()),
        ],
    ),
    ("0 decode steps", [launched("decode", 32, DecodeSteps(0))]),
    ("preempts without", [PARK]),
    ("while another is parked", [ADMIT_A, PARK, ADMIT_B, PARK]),
    ("resumes without", [RESUME]),
    ("while another is open", [ADMIT_A, PARK, ADMIT_B, RESUME]),
    ("admits while a batch is open", [ADMIT_A, ADMIT_B]),
    ("admits a, which is not waiting", [ADMIT_A, PARK, ADMIT_A]),
    ("admits 9 tokens of a, which has 8", [Plan(admit=(Chunk("a", 9),))]),
    ("admits 0 tokens of a", [Plan(admit=(Chunk("a", 0),))]),
    ("refuses a, which is not waiting", [ADMIT_A, Plan(refuse=(Refusal("a", "why"),))]),
]


@pytest.mark.parametrize(("message", "plans"), ILLEGAL)
def test_illegal_plans_are_refused_by_what_is_wrong(message: str, plans: list[Plan]) -> None:
    system = InTurn(*plans)
    with pytest.raises(PlanError, match=message):
        simulate(system, [(0.0, submit("a", 8, 2)), (0.0, submit("b", 8, 2))])
    assert not [*system._plans], "refused too early"


@pytest.mark.parametrize(
    ("system", "asked", "kind"),
    [
        ("drift", None, SoloRun),
        ("muxwise", None, ContentionGuard),
        ("muxwise", "solo-run", SoloRun),
    ],
)
def test_a_system_predicts_with_its_own_estimator_unless_told_otherwise(
    system: str, asked: EstimatorName | None, kind: type, tmp_path: Path
) -> None:
    config = EngineConfig(model="qwen3-8b", system=system, estimator=asked)
    machine = SimulatedMachine(GPUS["h200"], SHAPES["qwen3-8b"], config)
    profile = synthetic.profile()
    profile.key = machine_key(machine, UNITS)
    profile.save(tmp_path / "profile.json")
    config = structs.replace(config, profile=str(tmp_path / "profile.json"))
    built = assemble(config, machine, lambda: None, lambda stage, fraction: None)
    try:
        assert type(built.engine.state.estimator) is kind
        assert built.ready.profile == config.profile
    finally:
        built.close()


def test_every_system_names_an_estimator_that_there_is() -> None:
    assert {kind.estimator for kind in SYSTEMS.values()} <= set(ESTIMATORS)
