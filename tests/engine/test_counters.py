"""What the engine says of its queue and its pace, from which Retry-After is told."""

import pytest

from tests.engine.test_liveness import HeldLanes, make_engine, turn
from tests.systems.simulation import submit
from twolane.engine.messages import Abort
from twolane.engine.prompt_work import PromptWork, WaitingPrompt
from twolane.engine.state import MIN_TOKENS, QUEUE_SECONDS, Counters
from twolane.slo import Slo

TOKEN_SECONDS, SHORT_SECONDS = 1e-4, 0.02
"""Seconds for each token of long prompts, and for a prompt of one token."""
SHORT, LONG = PromptWork.of(1, 0), PromptWork.of(700, 0)


def note_burst(counters: Counters, count: int = 64) -> None:
    for _ in range(count):
        counters.note_prompts(700 * TOKEN_SECONDS, LONG)


def test_a_few_short_prompts_do_not_outweigh_a_queue_of_long_ones() -> None:
    counters = Counters()
    note_burst(counters)
    for _ in range(50):
        counters.note_prompts(SHORT_SECONDS, SHORT)
    assert counters.prompt_token_seconds == pytest.approx(TOKEN_SECONDS, rel=0.8)


def test_short_prompts_alone_do_not_say_that_each_token_takes_as_long() -> None:
    counters = Counters()
    counters.note_prompts(SHORT_SECONDS, SHORT)
    assert counters.prompt_token_seconds == pytest.approx(SHORT_SECONDS / MIN_TOKENS)


def test_a_prompt_in_slices_is_as_one_whole() -> None:
    whole, sliced = Counters(), Counters()
    note_burst(whole, 1)
    for _ in range(32):
        sliced.note_prompts(700 * TOKEN_SECONDS / 32, PromptWork().plus(LONG, 1 / 32))
    assert sliced.prompt_token_seconds == pytest.approx(whole.prompt_token_seconds, rel=0.02)


def test_a_pace_that_changes_is_known_after_some_prompts() -> None:
    counters = Counters()
    note_burst(counters, 200)
    for _ in range(100):
        counters.note_prompts(2 * 700 * TOKEN_SECONDS, LONG)
    assert counters.prompt_token_seconds == pytest.approx(2 * TOKEN_SECONDS, rel=0.1)


def test_the_count_of_what_is_queued_is_taken_anew_after_a_while() -> None:
    lanes = HeldLanes(now=QUEUE_SECONDS)
    engine = make_engine(lanes)
    engine.take([submit("a", 16, 8)])
    turn(engine)
    first = engine.state.count_queued()
    assert first.work == PromptWork.of(16, 0)
    engine.take([submit("b", 32, 8)])
    assert engine.state.count_queued() is first
    lanes.now += QUEUE_SECONDS
    assert engine.state.count_queued().work == first.work.plus(PromptWork.of(32, 0))


def test_what_is_queued_is_counted_at_once_behind_an_empty_queue() -> None:
    engine = make_engine(HeldLanes(now=5.0))
    assert not engine.state.count_queued().work.tokens
    engine.take([submit("a", 16, 8), submit("b", 16, 8)])
    assert engine.state.count_queued().work.prompts == 2


def test_prompts_that_the_system_may_give_up_are_told_one_by_one() -> None:
    """With the seconds that are left to their first token; not what has one, nor what has no bound
    for it."""
    lanes = HeldLanes(now=2.0)
    engine = make_engine(lanes)
    state, bound = engine.state, Slo(ttft=1.0)
    state.queue.gives_up = True
    engine.take([submit("begun", 16, 8, slo=bound)])
    turn(engine)
    lanes.step(lanes.tickets[0])
    lanes.tickets[0].end = lanes.now
    engine.reap()
    state.send_back(state.requests["begun"])
    engine.take([submit("a", 16, 8, slo=bound), submit("free", 16, 8)])
    lanes.now = 2.5
    count = state.count_queued()
    assert count.work.prompts == 3
    assert count.yielding == [WaitingPrompt(16, 0, 0.5)]


def test_an_adapter_is_named_until_the_launches_of_its_requests_have_ended() -> None:
    lanes = HeldLanes()
    engine = make_engine(lanes)
    engine.take([submit("a", 16, 8)])
    engine.state.requests["a"].adapter = 3
    turn(engine)
    engine.take([Abort("a")])
    assert engine.state.adapters_named() == {3}
    lanes.step(lanes.tickets[0])
    lanes.tickets[0].end = lanes.now
    engine.reap()
    assert not engine.state.adapters_named()
