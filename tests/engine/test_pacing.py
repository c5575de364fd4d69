"""When tokens are due, and which first tokens are held."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.engine.test_rules import Script, one_by_one, small_engine
from tests.sim.durations import FixedDurations
from tests.systems.simulation import UNITS, Simulation, simulate, submit
from twolane.devices import LaneName
from twolane.engine.messages import Abort, ToEngine
from twolane.engine.pacing import CAUTIOUS_PACE, KEPT_GAPS, LEAST_PACE, SURE_FRACTION, Gaps, Pacer
from twolane.engine.request import Phase, Request
from twolane.lanes.base import Sampled, Ticket
from twolane.lanes.work import DecodeWork, Work
from twolane.playout import PACE_FRACTION
from twolane.sim import lanes as sim_lanes
from twolane.sim.lanes import Demand, SimLanes
from twolane.slo import Slo
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.view import View


def requests(pacer: Pacer, slo: Slo, count: int) -> list[Request]:
    """Return requests that have just come in, under these bounds."""
    engine = small_engine(slo, pacer=pacer)
    engine.take([submit(str(i), 16, 8) for i in range(count)])
    return list(engine.state.requests.values())


def scheduled(pacer: Pacer, request: Request, at: float) -> float | None:
    """Return when a token that was made at `at` is due."""
    pacer.schedule(request, at)
    return request.due


def test_systems_plan_for_what_transport_leaves_of_a_tbt_bound() -> None:
    engine = small_engine(Slo(ttft=1.0, tbt=0.050), pacer=Pacer(transport=0.001))
    engine.take([submit("a", 16, 8), replace(submit("b", 16, 8), slo=Slo(tbt=0.003))])
    view = engine.view()
    assert (view.slo.ttft, view.slo.tbt) == pytest.approx((1.0, 0.049))
    assert [request.slo.tbt for request in view.waiting] == pytest.approx([0.049, 0.002925])
    assert view.waiting[1].slo.ttft == 1.0


def test_a_token_is_due_a_while_after_it_was_made() -> None:
    engine = small_engine(Slo(tbt=0.021), pacer=Pacer(buffer=0.5, transport=0.5))
    engine.take([submit("a", 16, 8)])
    engine.carry_out(engine.plan())
    (flight,) = engine.state.in_flight
    lanes = engine.state.lanes
    assert isinstance(lanes, SimLanes)
    lanes.advance(100.0)  # it is found late
    engine.reap()
    news = engine.outputs()
    assert news is not None
    assert news.outputs[0].due == pytest.approx(flight.ticket.times[-1] + 0.5 + 0.975 * 0.021)
    assert news.outputs[0].due < 100.0


def test_tokens_are_held_back_so_that_gaps_are_even() -> None:
    """For a bound of 10 ms: 14 and 15 ms behind two of 8 are in time, 25 more are not."""
    pacer = Pacer(0.02, 0.002)
    (request,) = requests(pacer, Slo(tbt=0.010 / 0.975), 1)  # transport takes a fortieth
    due = [scheduled(pacer, request, at) for at in (0.0, 0.008, 0.016, 0.030, 0.045, 0.070)]
    even = [0.028 + i * PACE_FRACTION * 0.010 for i in (1, 2)]
    assert due == pytest.approx([0.012, 0.020, 0.028, *even, 0.072])


def test_tokens_are_due_sooner_where_deliveries_are_late_unevenly() -> None:
    """A small spread counts twice, a large one once. A greater one counts at once and is forgotten
    slowly; short bounds have no room."""
    pacer = Pacer(0.02, 0.0005)
    assert pacer.pace(0.020) == pytest.approx(PACE_FRACTION * 0.020)
    pacer.hear(0.0022)
    assert pacer.pace(0.020) == pytest.approx(0.0205 - 0.0022)
    pacer = Pacer(0.02, 0.0005)
    pacer.hear(0.0012)
    assert pacer.pace(0.020) == pytest.approx(CAUTIOUS_PACE * 0.020)
    pacer = Pacer(0.02, 0.0005)
    pacer.hear(0.0008)
    assert pacer.pace(0.020) == pytest.approx(0.0205 - 0.0016)
    pacer.hear(0.0)
    assert pacer.pace(0.020) == pytest.approx(0.0205 - 0.9 * 0.0016)
    pacer.hear(1.0)
    assert pacer.pace(0.020) == pytest.approx(LEAST_PACE * 0.020)
    assert pacer.pace(0.009) == pytest.approx(PACE_FRACTION * 0.009)


def test_a_first_token_is_not_held_back_beyond_its_deadline() -> None:
    """One that has missed it already fills the buffer."""
    pacer = Pacer(0.02, 0.002)
    three = requests(pacer, Slo(ttft=1.0, tbt=0.010 / 0.975), 3)
    due = [scheduled(pacer, *each) for each in zip(three, (0.980, 0.995, 1.5), strict=True)]
    assert due == pytest.approx([0.992, 1.0, 1.512])


def test_the_only_token_of_a_request_is_not_held_back() -> None:
    """No later one needs the buffer that it would fill."""
    pacer = Pacer(0.1)
    one, two = requests(pacer, Slo(tbt=0.02), 2)
    one.limit = len(one.tokens)
    assert scheduled(pacer, one, 1.0) == 1.0
    assert scheduled(pacer, two, 1.0) == pytest.approx(1.02)


def test_gaps_and_slack_are_those_that_the_client_sees() -> None:
    """The device's gaps are 8, 12 and 26 ms; a bound of 10 ms is missed once. What transport may
    take is no slack."""
    pacer = Pacer(0.02, 0.002)
    (request,) = requests(pacer, Slo(tbt=0.010 / 0.975), 1)
    slack = [scheduled(pacer, request, at) and request.slack for at in (0.0, 0.008, 0.020, 0.046)]
    assert slack == pytest.approx([0.010, 0.010, 0.0077, 0.0])
    assert pacer.gaps.total == 3
    assert pacer.gaps.above(0.0098, 3) == 1
    assert (request.first_token_at, request.last_token_at) == (0.0, 0.046)


def test_a_token_is_no_older_than_the_one_before() -> None:
    """The second one was made while the first was held, which is as old as its release."""
    pacer = Pacer()
    (request,) = requests(pacer, Slo(), 1)
    for at in (0.3, 0.2):
        pacer.schedule(request, at)
    assert request.last_token_at == 0.3
    assert pacer.gaps.above(-0.001, 1) == 1


@pytest.mark.parametrize("pacer", [Pacer(), Pacer(transport=0.002)])
def test_without_a_buffer_tokens_are_delivered_at_once(pacer: Pacer) -> None:
    (request,) = requests(pacer, Slo(tbt=0.010), 1)
    assert scheduled(pacer, request, 0.008) is None
    assert request.slack == 0.0


def test_news_of_a_turn_have_each_token_with_its_time() -> None:
    """So has the end of a request, that it does not overtake them."""
    engine = small_engine(pacer=Pacer(0.02))
    engine.take([submit("free", 16, 3), replace(submit("a", 16, 3), slo=Slo(tbt=0.010))])
    lanes = engine.state.lanes
    assert isinstance(lanes, SimLanes)
    for _ in range(8):
        engine.carry_out(engine.plan())
        lanes.advance(lanes.clock() + 0.1)
        engine.reap()
    news = engine.outputs()
    assert news is not None
    free, *bound = sorted(news.outputs, key=lambda output: (output.id != "free", output.due or 0.0))
    assert (free.due, len(free.tokens), free.finish) == (None, 3, "length")
    assert [len(output.tokens) for output in bound] == [1, 1, 1]
    assert [output.finish for output in bound] == [None, None, "length"]
    assert len({output.due for output in bound}) == 3


def served(*messages: tuple[float, ToEngine], buffer: float = 0.0) -> Simulation:
    """Beside a request that decodes from the start."""
    early = 0.0, submit("early", 20, 40)
    return simulate(Script(one_by_one), [early, *messages], pacer=Pacer(buffer))


SHORT = 1e-6
"""A buffer too short to matter, in seconds."""


TIGHT = Slo(tbt=0.021)
"""A little more than a step."""


@pytest.mark.parametrize("buffer", [0.0, SHORT])
def test_a_paced_first_token_goes_out_when_its_step_can_begin(buffer: float) -> None:
    """With the tokens of the step under way: what follows is the gap of one step."""
    late = submit("late", 20, 4, slo=TIGHT)
    ends = served((0.11, replace(late, slo=Slo()))).times["late"][0]
    sim = served((0.11, late), buffer=buffer)
    times = sim.times["late"]
    assert ends < times[0] < ends + 0.02
    assert times[0] in sim.times["early"]
    assert times[1] - times[0] == pytest.approx(0.02)
    told = sim.outputs["late"].times
    assert told is not None
    assert told.prefill == pytest.approx(times[0] - 0.11)
    assert len(times) == 4


@pytest.mark.parametrize("buffer", [0.0, SHORT])
@pytest.mark.parametrize(
    ("slo", "output"),
    [
        (Slo(ttft=1.0), 4),
        (replace(TIGHT, tbt=0.05), 4),
        (replace(TIGHT, ttft=0.085), 4),
        (TIGHT, 1),
    ],
    ids=["no TBT SLO", "the second is in time", "the first would be late", "there is no second"],
)
def test_a_first_token_is_not_paced_for_nothing(slo: Slo, output: int, buffer: float) -> None:
    late = submit("late", 20, output, slo=slo)
    unbound = replace(late, slo=Slo())
    times = served((0.11, late), buffer=buffer).times["late"]
    assert times == served((0.11, unbound)).times["late"]


def test_without_a_buffer_a_second_token_is_predicted_well_within_its_bound() -> None:
    """A first token is held if nothing but luck would bring the second one in time."""
    pacer = Pacer()
    request, other = requests(pacer, TIGHT, 2)
    request.phase = Phase.DECODE
    assert pacer.hold(request, Sampled(0, 7))
    launch, ticket = Launch("decode", UNITS, DecodeSteps()), Ticket("decode", UNITS)
    flight: Any = SimpleNamespace(launch=launch, ticket=ticket, rows=[(other, None)])
    flight.predicted = 0.51 * SURE_FRACTION * 0.021
    assert not [*pacer.release_ready(0.0, [flight])]
    flight.predicted = 0.49 * SURE_FRACTION * 0.021
    assert [*pacer.release_ready(0.0, [flight])]


@pytest.mark.parametrize(("work", "released"), [(PrefillSlice(0, 4), True), (DecodeSteps(), False)])
def test_only_decode_launches_hold_a_first_token(
    work: PrefillSlice | DecodeSteps, released: bool
) -> None:
    """A slice in flight is beside the token's next step, not in front of it."""
    pacer = Pacer(1e-6)
    (request,) = requests(pacer, TIGHT, 1)
    request.phase = Phase.DECODE
    assert pacer.hold(request, Sampled(0, 7))
    launch, ticket = Launch("prefill", UNITS, work), Ticket("prefill", UNITS)
    flight: Any = SimpleNamespace(launch=launch, ticket=ticket, rows=(), predicted=9.0)
    assert bool([*pacer.release_ready(0.0, [flight])]) == released


def test_a_paced_first_token_does_not_outlive_its_request() -> None:
    """Aborted while it is kept: it is gone, and so are the pages."""
    late = submit("late", 20, 4, slo=TIGHT)
    told = served((0.11, late)).times["late"][0]
    sim = served((0.11, late), (told - 0.001, Abort("late")))
    assert sim.finish["late"] == "abort"
    assert sim.record.ends["late"] == ("abort", 1)
    assert not sim.times.get("late")
    assert not sim.engine.state.pacer.held


def test_a_second_token_never_overtakes_a_paced_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU its step may run beside the long launch that it was thought to wait for."""
    monkeypatch.setattr(sim_lanes, "used_by", lambda lane, work: (lane,))

    def decide(view: View) -> Plan:
        def launch(lane: LaneName, work: PrefillSlice | DecodeSteps) -> tuple[Launch, ...]:
            return (Launch(lane, UNITS, work),)

        if view.waiting:
            chunk = Chunk(view.waiting[0].id, view.waiting[0].new)
            launches = launch("decode", PrefillSlice(0, view.layers))
            return Plan(admit=(chunk,), launches=launches)
        if view.decoding and not view.lanes["prefill"].queued:
            return Plan(launches=launch("prefill", DecodeSteps(39)))
        if view.decoding and not view.lanes["decode"].queued:
            return Plan(launches=launch("decode", DecodeSteps()))
        return Plan()

    late = submit("late", 20, 4, slo=TIGHT)
    heard = simulate(
        Script(decide), [(0.0, submit("early", 20, 40)), (0.11, late)], pacer=Pacer(1e-6)
    )
    assert heard.times["late"] == pytest.approx([0.21, 0.21, 0.23, 0.25])
    assert heard.outputs["late"].cached == 0, "told with the first token"


def test_a_paced_first_token_is_sent_when_it_is_told() -> None:
    """Also where nothing but a look at the clock finds that it need not wait: a step is overdue."""

    @dataclass(frozen=True)
    class Stalling(FixedDurations):
        steps_run: list[Work] = field(default_factory=list)

        def steps(self, work: Work, units: int) -> list[Demand]:
            if not isinstance(work, DecodeWork):
                return super().steps(work, units)
            self.steps_run.append(work)
            return [Demand(0.02 if len(self.steps_run) < 9 else 0.2)]

    def decide(view: View) -> Plan:
        return replace(one_by_one(view), wake_at=view.now + 0.001)

    arrivals = [(0.0, submit("early", 20, 40)), (0.11, submit("late", 20, 4, slo=Slo(tbt=0.025)))]
    sim = simulate(Script(decide), arrivals, durations=Stalling(), pacer=Pacer(1e-6))
    told = sim.outputs["late"].times
    assert told is not None
    assert sim.times["late"][0] == pytest.approx(0.11 + told.queue + told.prefill)


def test_the_latest_gaps_are_counted_and_older_ones_are_forgotten() -> None:
    """One by one or many at once, also where they go round in memory."""
    draw, gaps, kept = random.Random(3), Gaps(), list[float]()
    for _ in range(40):
        new = [draw.random() for _ in range(draw.choice((1, 7, 900)))]
        if len(new) == 1:
            gaps.add(new[0])
        else:
            gaps.extend(np.array(new))
        kept += new
        for count in (0, 1, 300, KEPT_GAPS, 3 * KEPT_GAPS):
            latest = kept[-min(count, KEPT_GAPS) :] if count else []
            assert gaps.above(0.7, count) == sum(each > 0.7 for each in latest)
    assert gaps.total == len(kept) > KEPT_GAPS
