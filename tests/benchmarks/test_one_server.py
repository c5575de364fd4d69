"""The decode step of a server, from what its client saw, and how a search is cut."""

import time

import pytest

from tests.benchmarks.test_scripts import SCRIPTS
from twolane.results.record import OK, Record


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import one_server

    return one_server


@pytest.fixture
def step(script):
    return script.step


def record(*token_times: float) -> Record:
    known = {"index": 0, "asked_prompt": 1, "asked_output": len(token_times), "outcome": OK}
    ended = token_times[-1]
    return Record(
        **known, scheduled=0.0, waited=0.0, sent=0.0, ended=ended, token_times=token_times
    )


def test_gaps_count_only_while_all_rows_decode(step):
    """Before the last prompt's first token and after the first end fewer rows decode."""
    long = record(0.0, 9.0, 10.0, 12.0, 14.0, 30.0)
    late = record(10.0, 12.0, 14.0)
    assert step([long, late]) == 2.0


def test_two_tokens_that_come_at_once_are_two_steps(step):
    assert step([record(0.0, 0.0, 4.0, 4.0, 8.0)]) == 2.0


def test_rows_that_never_decode_together_have_no_step(step):
    assert step([record(0.0, 1.0), record(5.0, 6.0)]) is None


def test_a_search_that_takes_longer_is_cut(script):
    with pytest.raises(KeyboardInterrupt), script.cut_after(0.05):
        time.sleep(60)


def test_a_search_in_time_is_not_cut(script):
    with script.cut_after(60):
        pass
    with script.cut_after(0):
        time.sleep(0.1)
