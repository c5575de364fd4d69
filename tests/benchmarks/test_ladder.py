"""What holds in a ladder of rates, from the times of its tokens, and when its port stops."""

import threading
from types import SimpleNamespace

import pytest

from tests.benchmarks.test_scripts import SCRIPTS
from twolane.engine.messages import Abort
from twolane.results.record import OK, Record

GIVEN = SimpleNamespace(seconds=10.0, tbt_ms=100.0, ttft=1.0, ttft_per_1k=1.0)


@pytest.fixture
def ladder(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import ladder

    return ladder


def record(sent: float, *token_times: float) -> Record:
    known = {"index": 0, "asked_prompt": 1024, "asked_output": len(token_times), "outcome": OK}
    return Record(
        **known, scheduled=sent, waited=0.0, sent=sent, ended=sent, token_times=token_times
    )


def held(ladder, *records: Record) -> list[bool]:
    steps = ladder.steps_of(GIVEN, ladder.Ladder("auto", (1.0, 2.0)), 0.0, records)
    return [step["holds"] for step in steps]


def test_a_gap_counts_in_the_step_in_which_it_ends(ladder):
    assert held(ladder, record(9.0, 9.9, 9.99, 10.05)) == [True, True]
    assert held(ladder, record(9.0, 9.9, 9.99, 10.2)) == [True, False]


def test_no_rate_holds_above_one_that_does_not(ladder):
    assert held(ladder, record(1.0, 1.1, 1.3), record(11.0, 11.1, 11.15)) == [False, False]


def test_a_system_may_have_a_bound_of_its_own(ladder):
    parse, gaps = ladder.Ladder.parse, [record(1.0, 1.1, 1.15), record(1.0, 1.1, 1.16)]
    assert parse("chunked:token_budget=24@4,5.5") == ("chunked:token_budget=24", (4, 5.5), None)
    for written, holds in (("auto@1", True), ("auto@1@55", False), ("auto@1@60.5", True)):
        [step] = ladder.steps_of(GIVEN, parse(written), 0.0, gaps)
        assert step["holds"] is holds
    assert str(parse("auto@1@55")) == "auto within 55 ms"


def test_a_first_token_is_late_by_the_length_of_its_prompt(ladder):
    assert held(ladder, record(1.0, 2.9)) == [True, True]
    assert held(ladder, record(1.0, 3.1)) == [False, False]


def test_what_has_no_token_counts_once_it_is_late(ladder):
    assert held(ladder, record(17.0)) == [True, False]
    assert held(ladder, record(19.0)) == [True, True]


def test_the_port_stops_when_all_has_ended_though_no_lane_has_news(ladder):
    ended: list[bool] = []
    arrivals = [(0.0, Abort("0"))]
    port = ladder.LivePort(
        lambda: 1.0, arrivals, lambda *_: None, lambda: bool(ended), threading.Event()
    )
    assert port.receive() == [Abort("0")]
    ended.append(True)
    port.wait(None)
    assert port.receive() is None
