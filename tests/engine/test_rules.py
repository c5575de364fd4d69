"""The rules of "Memory, and work in flight" that a random schedule cannot pin down one by one."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.systems.simulation import LAYERS, UNITS, Simulation, simulate, submit
from twolane.engine.engine import Engine
from twolane.engine.kv import KVBooks
from twolane.engine.messages import Abort, Outputs, Submit
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.sim import FixedDurations, SimLanes
from twolane.sampling import SamplingParams
from twolane.slo import Slo
from twolane.systems import make_system
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice, Refusal
from twolane.systems.view import View


@dataclass
class Script:
    """Plans as a function of the view."""

    decide: Callable[[View], Plan]

    def start(self) -> None:
        return None

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        return self.decide(view), None


def one_by_one(view: View, *, k: int = 1) -> Plan:
    """Whole prompts as they come, and k decode steps when the lane is idle."""
    launches = []
    chunks = ()
    if view.lanes["prefill"].queued == 0 and view.batch is None and view.waiting:
        first = view.waiting[0]
        room = view.free_pages + view.reclaimable_pages
        if first.page_cost <= room and view.free_slots:
            chunks = (Chunk(first.id, first.new),)
            launches.append(Launch("prefill", UNITS, PrefillSlice(0, view.layers)))
    if view.decoding and view.lanes["decode"].queued == 0:
        launches.append(Launch("decode", UNITS, DecodeSteps(k)))
    return Plan(admit=chunks, launches=tuple(launches), reason="script")


def preempted(sim: Simulation) -> list[str]:
    return [request for request, name, _ in sim.record.events if name == "preempted"]


def test_decode_growth_preempts_the_lowest_priority_then_the_youngest() -> None:
    """Each grows to four pages; there are seven."""
    arrivals = [
        (0.0, submit("old", 16, 48)),
        (0.1, submit("low", 16, 48, priority=5)),
        (0.2, submit("young", 16, 48)),
    ]
    sim = simulate(Script(one_by_one), arrivals, pages=7)
    assert preempted(sim)[0] == "low"
    assert "young" in preempted(sim)
    assert "old" not in preempted(sim)
    assert all(len(sim.times[name]) == 48 for name in ("old", "low", "young"))
    assert sim.engine.stats().preemptions == len(preempted(sim))


def test_a_parked_prefill_gives_up_its_pages_before_decode_stalls() -> None:
    """No decoding request is preempted while a parked prompt holds pages."""

    def decide(view: View) -> Plan:
        if view.batch is not None and view.batch.layers_launched == 2 and view.decoding:
            return Plan(preempt=True, reason="park it")
        plan = one_by_one(view)
        if plan.admit and plan.admit[0].request == "parked" and view.decoding:
            launches = tuple(
                Launch("prefill", UNITS, PrefillSlice(0, 2)) if ln.lane == "prefill" else ln
                for ln in plan.launches
            )
            return Plan(admit=plan.admit, launches=launches, reason="a first slice")
        return plan

    arrivals = [(0.0, submit("decoding", 16, 60)), (0.2, submit("parked", 64, 2))]
    sim = simulate(Script(decide), arrivals, pages=7)
    assert preempted(sim) == ["parked"]
    gaps = [b - a for a, b in itertools.pairwise(sim.times["decoding"])]
    assert max(gaps) < 0.021
    assert len(sim.times["parked"]) == 2


def test_look_ahead_is_clipped_to_the_pages_there_are() -> None:
    """Pages are reserved before the launch; the trace says that k was clipped."""
    script = Script(lambda view: one_by_one(view, k=32))
    sim = simulate(script, [(0.0, submit("a", 16, 40)), (0.0, submit("b", 16, 40))], pages=5)
    clipped = [ran for ran in sim.record.of("decode") if "clipped" in ran.reason]
    assert clipped
    assert clipped[0].reason.startswith("script (k clipped from 32 to ")
    assert all(len(sim.times[name]) == 40 for name in "ab")


def test_an_aborted_prompt_leaves_at_the_slice_boundary() -> None:
    """The others of its batch go on; its pages are back when the slice has ended."""

    def decide(view: View) -> Plan:
        if view.lanes["prefill"].queued:
            return Plan()
        if view.batch is not None:
            first = view.batch.layers_launched
            return Plan(launches=(Launch("prefill", UNITS, PrefillSlice(first, first + 2)),))
        if len(view.waiting) == 2:
            chunks = tuple(Chunk(r.id, r.new) for r in view.waiting)
            launch = Launch("prefill", UNITS, PrefillSlice(0, 2))
            return Plan(admit=chunks, launches=(launch,))
        return one_by_one(view)

    arrivals = [(0.0, submit("a", 40, 3)), (0.0, submit("b", 40, 3)), (0.025, Abort("a"))]
    sim = simulate(Script(decide), arrivals)
    batch = [ran.requests for ran in sim.record.of("prefill")]
    assert batch == [["a", "b"], ["a", "b"], ["b"], ["b"]]
    assert sim.finish == {"a": "abort", "b": "length"}
    assert "a" not in sim.times or not sim.times["a"]


@pytest.mark.parametrize("at", [0.0, 0.005, 0.03, 0.085, 0.2])
@pytest.mark.parametrize("name", ["prefill-first", "chunked", "static-split"])
def test_an_abort_ends_a_request_once_at_any_stage(name: str, at: float) -> None:
    arrivals = [(0.0, submit("other", 100, 20)), (0.0, submit("a", 100, 20))]
    arrivals += [(at, Abort("a")), (at, Abort("a"))]  # type: ignore[list-item]
    sim = simulate(make_system(name), arrivals)
    assert sim.finish == {"other": "length", "a": "abort"}
    assert len(sim.times["other"]) == 20


def test_a_request_that_cannot_be_served_is_refused_by_name() -> None:
    tokens = SamplingParams(max_tokens=4)
    bad = {
        "prompt is empty": Submit("x", [], tokens),
        "outside 0 to 999": Submit("x", [1000], tokens),
        "stop_token_ids has a token id": Submit("x", [1], SamplingParams(stop_token_ids=(1000,))),
        "context length is 64": Submit("x", [1] * 64, tokens),
    }
    for message, request in bad.items():
        news = news_of(request)
        assert message in news.refused[0].message
        assert not news.outputs


def small_engine(slo: Slo | None = None) -> Engine:
    """An engine whose pool holds 64 tokens."""
    return Engine(
        make_system("chunked"),
        SimLanes(UNITS, (), FixedDurations()),
        KVBooks(4, 16, 4, prefix_cache=True),
        layers=LAYERS,
        vocab_size=1000,
        eos_token_ids=(),
        max_model_len=4096,
        estimator=OnlineEstimator(),
        slo=slo,
    )


def news_of(request: Submit) -> Outputs:
    engine = small_engine()
    engine.take([request])
    news = engine.news()
    assert news is not None
    return news


def test_a_request_stops_at_the_context_length() -> None:
    """The last token needs no page of its own: its key and value are never written."""
    sim = simulate(make_system("static-split"), [(0.0, submit("a", 40, 500))], pages=4)
    assert len(sim.times["a"]) == 64 - 40
    assert sim.finish == {"a": "length"}


def test_a_plan_may_refuse_who_waits_and_says_why() -> None:
    def decide(view: View) -> Plan:
        late = tuple(Refusal(r.id, "too late") for r in view.waiting if r.id == "late")
        return Plan(refuse=late) if late else one_by_one(view)

    arrivals = [(0.0, submit("early", 20, 3)), (0.05, submit("late", 20, 3))]
    sim = simulate(Script(decide), arrivals)
    assert [(r.id, r.code, r.message) for r in sim.refused] == [("late", "refused", "too late")]
    assert sim.finish == {"early": "length"}


def test_a_deadline_allows_for_new_tokens_only() -> None:
    """1 s per 1,024 new tokens (Drift §5.1); what the prefix cache has costs nothing."""
    engine = small_engine(Slo(ttft=0.5, ttft_per_token=1 / 1024))
    engine.take([Submit("a", [7] * 33, SamplingParams())])
    request = engine.state.requests["a"]
    assert request.deadline == pytest.approx(0.5 + 33 / 1024)
    request.cached = 32
    assert request.deadline == pytest.approx(0.5 + 1 / 1024)
