"""The rules of "Memory, and work in flight" that a random schedule cannot pin down one by one."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.durations import FixedDurations
from tests.systems.names import SYSTEM_NAMES
from tests.systems.simulation import LAYERS, UNITS, Simulation, simulate, submit
from twolane.engine.constrained.bits import no_token, with_tokens
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.messages import Abort, Finish, Outputs, Submit, ToEngine, TokenRules, Watch
from twolane.engine.pacing import Pacer
from twolane.engine.state import State
from twolane.engine.waiting_queue import OLDEST_EVERY
from twolane.estimate.online import OnlineEstimator
from twolane.sampling import SamplingParams
from twolane.sim.lanes import TOKEN, SimLanes
from twolane.slo import Slo
from twolane.systems.base import System
from twolane.systems.plan import (
    Chunk,
    DecodeSteps,
    Hybrid,
    Launch,
    Plan,
    PrefillSlice,
    Refusal,
)
from twolane.systems.registry import make_system
from twolane.systems.view import View


@dataclass
class Script(System):
    """Plans as a function of the view."""

    decide: Callable[[View], Plan]

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


def together(count: int, decide: Callable[[View], Plan]) -> Script:
    """Decode when so many requests can, and from then on."""
    met: list[bool] = []

    def plan(view: View) -> Plan:
        if not met and len(view.decoding) < count:
            decided = decide(view)
            prefill = tuple(ln for ln in decided.launches if ln.lane == "prefill")
            return replace(decided, launches=prefill)
        met.append(True)
        return decide(view)

    return Script(plan)


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
    assert {ran.reason for ran in sim.record.of("decode")} == {"script"}, "one step is not clipped"
    assert all(len(sim.times[name]) == 48 for name in ("old", "low", "young"))
    assert sim.engine.stats().preemptions == len(preempted(sim))


def test_no_more_requests_are_preempted_than_a_step_needs() -> None:
    """The first needs a page, the second one for its second step only."""
    arrivals = [(0.0, submit("a", 16, 2)), (0.0, submit("b", 15, 3)), (0.0, submit("c", 10, 2))]
    sim = simulate(together(3, one_by_one), arrivals, pages=3)
    assert preempted(sim) == ["c"]
    assert {name: len(times) for name, times in sim.times.items()} == {"a": 2, "b": 3, "c": 2}


def test_pages_that_return_anyway_are_waited_for() -> None:
    """The youngest is preempted while a step of its own is under way: its page returns behind it,
    and nobody else has to go."""

    def decide(view: View) -> Plan:
        plan = one_by_one(view)
        if view.decoding and view.lanes["decode"].queued == 1:
            step = Launch("decode", UNITS, DecodeSteps())
            return replace(plan, launches=(*plan.launches, step))
        return plan

    arrivals = [(0.0, submit(f"{i}", prompt, 3)) for i, prompt in enumerate((15, 10, 10))]
    sim = simulate(together(3, decide), arrivals, pages=3)
    assert preempted(sim) == ["2"]
    assert {len(times) for times in sim.times.values()} == {3}


def test_a_flood_of_high_priority_starves_nobody() -> None:
    """One admission in eight is that of the request that waits longest."""
    flood = [(0.0, submit(f"urgent {i}", 16, 1, priority=-(2**31) + 1)) for i in range(200)]
    arrivals = [*flood[:8], (0.0, submit("patient", 16, 1, priority=5)), *flood[8:]]
    sim = simulate(Script(one_by_one), arrivals, pages=64)
    order = sorted(sim.times, key=lambda name: sim.times[name][0])
    assert order.index("patient") <= 2 * OLDEST_EVERY
    assert order[:8] == [f"urgent {i}" for i in range(8)]  # it is no short cut either


def test_without_a_flood_priorities_hold_and_equal_ones_are_by_age() -> None:
    ranks = [3, 0, 3, -1, 0]
    arrivals = [(0.0, submit(f"{i}", 16, 1, priority=rank)) for i, rank in enumerate(ranks)]
    sim = simulate(Script(one_by_one), arrivals, pages=64)
    order = sorted(sim.times, key=lambda name: sim.times[name][0])
    assert order == ["3", "1", "4", "0", "2"]


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


@pytest.mark.parametrize("priority", [0, -1])
def test_an_open_prompt_gives_up_its_pages_to_those_before_it(priority: int) -> None:
    """It is computed for 2.4 s, and the other needs a page meanwhile; a prompt that comes first in
    rank keeps its pages, and the other waits."""

    def decide(view: View) -> Plan:
        plan = one_by_one(view)
        first = view.batch.layers_launched if view.batch else 0
        slices = (Launch("prefill", UNITS, PrefillSlice(first, first + 1)),)
        steps = tuple(launch for launch in plan.launches if launch.lane == "decode")
        idle = view.lanes["prefill"].queued == 0 and (view.batch or plan.admit)
        return replace(plan, launches=steps + slices if idle else steps)

    arrivals = [(0.0, submit("old", 16, 40)), (2.5, submit("new", 64, 2, priority=priority))]
    slow = FixedDurations(prefill_layer=0.3)
    sim = simulate(Script(decide), arrivals, pages=6, durations=slow)
    waited = max(b - a for a, b in itertools.pairwise(sim.times["old"]))
    assert {name: len(times) for name, times in sim.times.items()} == {"old": 40, "new": 2}
    if priority < 0:
        assert "new" not in preempted(sim)
        assert waited > 1
    else:
        assert set(preempted(sim)) == {"new"}
        assert waited < 0.7  # the slice that is under way, and its pages return


def test_a_prompt_that_was_just_admitted_gives_its_pages_to_the_pass_it_is_in() -> None:
    """Nothing is left of the pass but its steps, which the next plan has."""

    def decide(view: View) -> Plan:
        if any(lane.queued for lane in view.lanes.values()):
            return Plan()
        if view.waiting and view.decoding and view.waiting[0].page_cost <= view.free_pages:
            chunks = (Chunk("new", view.waiting[0].new),)
            return Plan(admit=chunks, launches=(Launch("device", UNITS, Hybrid()),))
        return one_by_one(view)

    arrivals = [(0.0, submit("old", 16, 40)), (0.05, submit("new", 64, 2))]
    sim = simulate(Script(decide), arrivals, pages=5)
    assert "new" in preempted(sim)
    assert "old" not in preempted(sim)
    assert all("new" in ran.requests for ran in sim.record.of("device"))
    assert {name: len(times) for name, times in sim.times.items()} == {"old": 40, "new": 2}


@pytest.mark.parametrize(
    ("prompt", "output", "pages", "fits"), [(16, 40, 5, 16), (16, 40, 4, 16), (15, 8, 2, 1)]
)
def test_look_ahead_is_clipped_to_the_pages_there_are(
    prompt: int, output: int, pages: int, fits: int
) -> None:
    """Pages are reserved before the launch; the trace says that k was clipped."""
    arrivals = [(0.0, submit(name, prompt, output)) for name in "ab"]
    sim = simulate(together(2, lambda view: one_by_one(view, k=32)), arrivals, pages=pages)
    first = sim.record.of("decode")[0]
    assert (first.requests, first.reason) == (["a", "b"], f"script (k clipped from 32 to {fits})")
    assert all(len(sim.times[name]) == output for name in "ab")


def test_look_ahead_takes_the_last_page_unclipped() -> None:
    script = Script(lambda view: one_by_one(view, k=48))
    sim = simulate(script, [(0.0, submit("a", 16, 48))], pages=4)
    assert [ran.reason for ran in sim.record.of("decode")] == ["script"]


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
@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_an_abort_ends_a_request_once_at_any_stage(name: str, at: float) -> None:
    arrivals = [(0.0, submit("other", 100, 20)), (0.0, submit("a", 100, 20))]
    arrivals += [(at, Abort("a")), (at, Abort("a"))]  # type: ignore[list-item]
    sim = simulate(make_system(name), arrivals)
    assert sim.finish == {"other": "length", "a": "abort"}
    assert len(sim.times["other"]) == 20


def test_a_request_that_cannot_be_served_is_refused_by_name() -> None:
    every = tuple(range(100))
    seventh = with_tokens(no_token(1000), [7])
    bad = {
        "prompt is empty": asks([]),
        "prompt has a token id outside 0 to 999": asks([1, 1000, 1]),
        "prompt has a token id": asks([1, -1, 1]),
        "stop_token_ids has a token id": asks([1], stop_token_ids=(1000,)),
        "logit_bias has a token id": asks([1], logit_bias={1000: 1.0}),
        "stop_token_ids leave no token to choose": replace(
            asks([1], stop_token_ids=(7,), min_tokens=1), rules=TokenRules(allowed=seventh)
        ),
        "stop_token_ids are more than 256": replace(
            asks([1], min_tokens=1), rules=TokenRules(ends=tuple(range(300)))
        ),
        "prompt has 64 tokens": asks([1] * 64),
        "grammar needs a model with a tokenizer": asks([1], grammar="x"),
        "allowed_token_ids has a token id": asks([1], allowed_token_ids=(1000,)),
        "allowed_token_ids must come as": asks([1], allowed_token_ids=(7,)),
        "allowed_token_ids must be a mask": replace(asks([1]), rules=TokenRules(allowed=b"x")),
        "bad_words has a token id": replace(asks([1]), rules=TokenRules(banned=((1, 1000),))),
        "bad_words may leave no token": replace(
            asks([1]), rules=TokenRules(banned=((1, 7),), allowed=seventh)
        ),
        "thinking_token_budget has a token id": thinks((3, 1000)),
        "thinking_token_budget needs the end": replace(
            thinks((3, 4)), rules=TokenRules(thinking=(3, 4), allowed=seventh)
        ),
        "thinking_token_budget ends the answer": thinks((3, 4), stop_token_ids=(4,), min_tokens=1),
    }
    for message, request in bad.items():
        news = news_of(request)
        refused = news.refused[0]
        assert message in refused.message
        assert refused.field is not None
        assert refused.message.startswith(refused.field)
        assert not news.outputs
    engine = small_engine()
    engine.take([asks([0, 999], stop_token_ids=every), asks([1], "y", min_tokens=1)])
    assert not engine.state.refused
    assert len(engine.state.queue.new) == 2


def asks(prompt: list[int], name: str = "x", **params: Any) -> Submit:
    return Submit(name, prompt, SamplingParams(**{"max_tokens": 4, **params}))


def thinks(marks: tuple[int, int], **params: Any) -> Submit:
    asked = asks([1], thinking_token_budget=2, **params)
    return replace(asked, rules=TokenRules(thinking=marks))


def small_engine(
    slo: Slo | None = None,
    pacer: Pacer | None = None,
    system: System | None = None,
    *,
    prefix_cache: bool = True,
) -> Engine:
    """An engine whose pool holds 64 tokens."""
    pacer = pacer or Pacer()
    state = State(
        KVCacheManager(4, 16, 4, prefix_cache=prefix_cache),
        SimLanes(UNITS, (), FixedDurations()),
        LAYERS,
        OnlineEstimator(),
        slo=pacer.planned(slo or Slo()),
        pacer=pacer,
    )
    return Engine(system or make_system("chunked"), state, ServedModel(1000, (), 4096))


def news_of(request: Submit) -> Outputs:
    engine = small_engine()
    engine.take([request])
    news = engine.outputs()
    assert news is not None
    return news


def test_a_request_stops_at_the_context_length() -> None:
    """The last token needs no page of its own: its key and value are never written."""
    sim = simulate(make_system("static-split"), [(0.0, submit("a", 40, 500))], pages=4)
    assert len(sim.times["a"]) == 64 - 40
    assert sim.finish == {"a": "length"}


@pytest.mark.parametrize(("ignores", "ends"), [(True, ("length", 8)), (False, ("stop", 1))])
def test_an_end_token_ends_a_request_unless_it_ignores_those(
    ignores: bool, ends: tuple[str, int]
) -> None:
    """Simulated lanes say the same token at every step."""
    asked = Submit("a", [5] * 16, SamplingParams(max_tokens=8, ignore_eos=ignores))
    sim = simulate(Script(one_by_one), [(0.0, asked)], eos=(TOKEN,))
    assert sim.record.ends["a"] == ends


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
    assert isinstance(engine.state.lanes, SimLanes)
    engine.state.lanes.advance(3.0)
    engine.take([Submit("a", [7] * 33, SamplingParams())])
    request = engine.state.requests["a"]
    assert request.deadline == pytest.approx(3.5 + 33 / 1024)
    request.cached = 32
    assert request.deadline == pytest.approx(3.5 + 1 / 1024)


def siblings(prompt: int, count: int = 3, output: int = 4) -> list[Submit]:
    """`n` > 1: the first leads."""
    lead = submit("lead", prompt, output)
    return [lead] + [replace(lead, id=f"child{i}", leader="lead") for i in range(1, count)]


def test_children_wait_unseen_for_their_leader_and_reuse_its_pages() -> None:
    """They count as waiting; the prompt is computed once but for its partial page."""
    seen: list[list[str]] = []

    def decide(view: View) -> Plan:
        seen.append([request.id for request in view.waiting])
        return one_by_one(view)

    family = siblings(40)
    sim = simulate(Script(decide), [(0.0, message) for message in family])
    first = sim.times["lead"][0]
    assert ["child1", "child2"] in seen
    assert not any("child1" in ids and "lead" in ids for ids in seen)
    admitted = {name: at for name, event, at in sim.record.events if event == "admitted"}
    assert min(admitted["child1"], admitted["child2"]) >= first
    assert [ran.tokens for ran in sim.record.of("prefill")] == [40, 8, 8]
    assert sim.engine.state.counters.prefix_hits == 64
    assert all(len(sim.times[message.id]) == 4 for message in family)


def held_back(*messages: ToEngine, prefix_cache: bool = True) -> tuple[Engine, set[str]]:
    """Who is held back after these messages came in."""
    engine = small_engine(prefix_cache=prefix_cache)
    engine.take(messages)
    assert engine.stats().waiting == len(engine.state.requests)
    return engine, {r.id for line in engine.state.queue.held.values() for r in line}


def test_children_are_held_back_only_for_what_they_can_gain() -> None:
    family = siblings(40)
    assert held_back(*family)[1] == {"child1", "child2"}
    assert not held_back(*family[1:])[1], "nobody leads"
    assert not held_back(*siblings(16))[1], "there is no full page that a child can use"
    assert not held_back(*family, prefix_cache=False)[1], "there never is one"
    scored = replace(family[1].params, prompt_logprobs=0)
    assert not held_back(family[0], replace(family[1], params=scored))[1]


def test_a_child_that_comes_late_does_not_wait_for_the_end_of_its_leader() -> None:
    lead, child = siblings(40, 2, output=20)
    sim = simulate(Script(one_by_one), [(0.0, lead), (0.2, child)])
    assert sim.times["lead"][0] < 0.2
    assert sim.times["child1"][0] < sim.times["lead"][-1]


@pytest.mark.parametrize("ending", [Abort("lead"), Finish("lead", 0)])
def test_children_go_on_when_their_leader_ends(ending: ToEngine) -> None:
    engine, held = held_back(*siblings(40), ending, Abort("child2"))
    assert not held
    assert [request.id for request in engine.state.queue.new] == ["child1"]
    engine, held = held_back(*siblings(40), Abort("child2"), Abort("child2"))
    assert held == {"child1"}


def test_children_go_on_when_their_leader_is_refused() -> None:
    def decide(view: View) -> Plan:
        unwanted = tuple(Refusal(r.id, "no") for r in view.waiting if r.id == "lead")
        return Plan(refuse=unwanted) if unwanted else one_by_one(view)

    sim = simulate(Script(decide), [(0.0, message) for message in siblings(40)])
    assert [refused.id for refused in sim.refused] == ["lead"]
    assert sim.finish == {"child1": "length", "child2": "length"}


def test_a_stop_string_ends_a_request_with_the_tokens_kept() -> None:
    """What comes later is dropped; who is unknown or has ended is ignored."""
    arrivals: list[tuple[float, ToEngine]] = [(0.0, submit("a", 20, 40)), (0.0, submit("b", 20, 4))]
    arrivals += [(0.3, Finish("a", 3)), (0.3, Finish("a", 3)), (0.4, Finish("b", 1))]
    sim = simulate(make_system("static-split", {"look_ahead": "4"}), arrivals)
    assert sim.finish == {"a": "stop", "b": "length"}
    assert 3 < len(sim.times["a"]) < 40
    assert max(sim.times["a"]) <= 0.31
    assert sim.record.ends["a"] == ("stop", 3)


def test_times_add_up() -> None:
    """On the engine's clock; what a request did not come to is missing."""
    arrivals = [(0.0, submit("a", 40, 5)), (0.01, submit("b", 40, 5)), (0.02, Abort("b"))]
    sim = simulate(Script(one_by_one), arrivals)
    a = sim.outputs["a"].times
    assert a is not None
    assert (a.queue, a.prefill, a.decode) == pytest.approx((0.0, 0.08, 4 * 0.02))
    b = sim.outputs["b"].times
    assert b is not None
    assert (b.queue, b.prefill, b.decode) == (None, None, None)


def test_tokens_are_as_old_as_the_device_made_them() -> None:
    """However late the loop looks: what the host was late by says nothing of launches."""
    engine = small_engine(system=Script(lambda view: one_by_one(view, k=4)))
    engine.take([submit("a", 16, 5)])
    ended = None
    while ended is None:
        engine.carry_out(engine.plan())
        engine.state.lanes.advance(engine.state.now() + 1.0)
        engine.reap()
        news = engine.outputs()
        ended = news and news.outputs[0].times
    gaps = engine.state.pacer.gaps
    assert gaps.total == gaps.above(0.019, 4) == 4
    assert gaps.above(0.021, 4) == 1  # the prompt took 0.08 s, and steps were launched after 1 s
    assert ended.decode == pytest.approx(0.92 + 4 * 0.02)


def test_seconds_by_lane_and_units() -> None:
    sim = simulate(Script(one_by_one), [(0.0, submit("a", 40, 5))])
    seconds = {(lane, units): spent for lane, units, spent in sim.engine.stats().seconds}
    assert seconds == pytest.approx({("prefill", UNITS): 0.08, ("decode", UNITS): 0.08})


@pytest.mark.parametrize("name", ["static-split", "chunked", "prefill-first"])
def test_who_watches_is_told_of_every_launch_of_that_time(name: str) -> None:
    """As the trace has them; prompts by name, decode by number."""
    arrivals: list[tuple[float, ToEngine]] = [
        (0.0, submit("a", 40, 30)),
        (0.0, submit("b", 40, 30)),
    ]
    arrivals += [(0.1, Watch(0.3)), (0.15, submit("c", 600, 5)), (0.16, submit("d", 9, 1))]
    sim = simulate(make_system(name), arrivals)
    then = [ran for ran in sim.record.launches if 0.1 <= ran.end < 0.4]
    assert len(then) < len(sim.record.launches)
    told = [
        (launched.lane, round(launched.start, 6), round(launched.end, 6), launched.units)
        for launched in sim.launches
    ]
    assert told == [(ran.lane, ran.start, ran.end, ran.units) for ran in then]
    layers: dict[str, set[int]] = {}
    for launched, ran in zip(sim.launches, then, strict=True):
        assert (launched.new, launched.reason) == (ran.tokens, ran.reason)
        assert len(launched.prompts) + launched.decoding == len(ran.requests)
        assert set(launched.prompts) <= set(ran.requests) & {"c", "d"}
        assert bool(launched.steps) == bool(launched.decoding or name == "chunked")
        for prompt in launched.prompts:
            layers.setdefault(prompt, set()).update(range(*launched.layers))
    assert layers == {"c": set(range(LAYERS)), "d": set(range(LAYERS))}


def test_a_request_may_have_bounds_of_its_own() -> None:
    """Field by field; a TTFT of its own is what it says, however long the prompt."""
    engine = small_engine(Slo(ttft=0.5, ttft_per_token=1.0, tbt=0.1))
    own = {"a": Slo(), "b": Slo(ttft=2.0), "c": Slo(tbt=0.3, tpot=0.2)}
    engine.take([Submit(name, [7] * 20, SamplingParams(), slo=slo) for name, slo in own.items()])
    a, b, c = (engine.state.requests[name] for name in "abc")
    assert a.slo == Slo(ttft=0.5, ttft_per_token=1.0, tbt=0.1)
    assert b.slo == Slo(ttft=2.0, tbt=0.1)
    assert c.slo == Slo(ttft=0.5, ttft_per_token=1.0, tbt=0.3, tpot=0.2)
    assert (a.deadline, b.deadline, c.deadline) == (20.5, 2.0, 20.5)


def test_a_prompt_that_is_scored_reuses_nothing() -> None:
    """Cut into chunks, and its pages are in the tree for others."""
    plain = submit("a", 40, 4)
    params = replace(plain.params, prompt_logprobs=0, logprobs=0)
    arrivals: list[tuple[float, ToEngine]] = [(0.0, replace(plain, id="scored", params=params))]
    arrivals += [(1.0, replace(plain, id="again", params=params)), (2.0, plain)]
    sim = simulate(make_system("chunked", {"token_budget": "16"}), arrivals)
    for name in ("scored", "again"):
        output = sim.outputs[name]
        assert output.cached == 0
        assert output.prompt_logprobs is not None
        assert [scored.token for scored in output.prompt_logprobs] == plain.prompt[1:]
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.tokens) == 4
    assert sim.outputs["a"].cached == 32
    assert sim.outputs["a"].prompt_logprobs is None
    assert sim.outputs["a"].logprobs is None


def test_a_prompt_between_two_chunks_gives_up_its_pages_before_decode_stalls() -> None:
    """Nobody else has any, and its system lets it wait until nobody decodes."""

    def decide(view: View) -> Plan:
        if view.lanes["device"].queued:
            return Plan()
        for first in view.waiting[:1]:
            room = first.started or first.page_cost <= view.free_pages + view.reclaimable_pages
            if room and not (view.decoding and first.started):
                chunk = Chunk(first.id, first.new - bool(view.decoding))
                launch = Launch("device", UNITS, PrefillSlice(0, LAYERS))
                return Plan(admit=(chunk,), launches=(launch,))
        decode = Launch("device", UNITS, DecodeSteps())
        return Plan(launches=(decode,) if view.decoding else ())

    arrivals = [(0.0, submit("short", 15, 40)), (0.05, submit("long", 95, 4))]
    sim = simulate(Script(decide), arrivals, pages=7)
    assert preempted(sim) == ["long"]
    assert {name: len(times) for name, times in sim.times.items()} == {"short": 40, "long": 4}
    long = sim.outputs["long"]
    assert long.cached == 0, "what it finds of its own pages was computed for it"
    assert long.times is not None and long.times.queue is not None
    assert long.times.queue < 0.05, "it waited until it was first admitted"
    chunks = [ran.tokens for ran in sim.record.launches if ran.requests == ["long"]][:2]
    assert chunks[0] == 94
    assert chunks[1] < 95, "the pages of its first chunk were shared when that had ended"


def test_of_prompts_between_two_chunks_the_youngest_gives_up_its_pages() -> None:
    def decide(view: View) -> Plan:
        if view.lanes["device"].queued:
            return Plan()
        room = view.free_pages + view.reclaimable_pages
        for one in view.waiting:
            if not view.decoding if one.started else one.page_cost <= room:
                chunk = Chunk(one.id, one.new - bool(view.decoding))
                launch = Launch("device", UNITS, PrefillSlice(0, LAYERS))
                return Plan(admit=(chunk,), launches=(launch,))
        decode = Launch("device", UNITS, DecodeSteps())
        return Plan(launches=(decode,) if view.decoding else ())

    arrivals = [(0.0, submit("short", 15, 40))]
    arrivals += [(0.01 * place, submit(name, 47, 2)) for place, name in enumerate("xy", start=1)]
    sim = simulate(Script(decide), arrivals, pages=7)
    assert preempted(sim) == ["y"]
    assert {name: len(times) for name, times in sim.times.items()} == {"short": 40, "x": 2, "y": 2}


def test_a_system_is_asked_again_when_its_launch_came_to_nothing() -> None:
    """Decode finds no page, for the open batch has all, and nothing is in flight: nobody would wake
    the engine before the next slice is launched."""
    turns = itertools.count()

    def decide(view: View) -> Plan:
        room = view.free_pages + view.reclaimable_pages
        if view.batch is None and view.waiting and view.waiting[0].page_cost <= room:
            chunk = Chunk(view.waiting[0].id, view.waiting[0].new)
            half = Launch("device", UNITS, PrefillSlice(0, LAYERS // 2))
            return Plan(admit=(chunk,), launches=(half,))
        if view.lanes["device"].queued:
            return Plan()
        if view.batch is not None and (not view.decoding or next(turns) % 2):
            rest = PrefillSlice(view.batch.layers_launched, LAYERS)
            return Plan(launches=(Launch("device", UNITS, rest),))
        return Plan(launches=(Launch("device", UNITS, DecodeSteps()),) if view.decoding else ())

    arrivals = [(0.0, submit("short", 16, 8)), (0.01, submit("long", 95, 4))]
    sim = simulate(Script(decide), arrivals, pages=7)
    assert {name: len(times) for name, times in sim.times.items()} == {"short": 8, "long": 4}


@pytest.mark.parametrize("system", ["temporal", "static-split"])
def test_what_has_landed_keeps_no_hidden_states(system: str) -> None:
    """A prompt that is aborted between two slices takes them with it."""
    arrivals = [(0.0, submit("decodes", 20, 200)), (0.5, submit("long", 4000, 4))]
    sim = simulate(make_system(system), [*arrivals, (0.6, Abort("long"))])
    assert sim.finish["long"] == "abort"
    finished = [flight for in_flight in sim.engine.state.finished.values() for flight in in_flight]
    assert all(flight.batch is None for flight in finished)
    assert {flight.launch.lane for flight in finished} <= {"prefill", "decode"}
