"""What the router and the server learn of how wrong their predictions are."""

import math
import random

import pytest

from twolane.router.correction import TtftCorrection


@pytest.mark.parametrize("slower", [0.5, 1.5, 4.0])
def test_nearly_all_first_tokens_come_within_the_corrected_prediction(slower: float) -> None:
    rng, correction, within = random.Random(1), TtftCorrection(), []
    for turn in range(2000):
        predicted = rng.uniform(0.2, 0.5)
        seconds = predicted * slower * rng.lognormvariate(0.0, 0.2)
        within.append(seconds <= correction.factor * predicted)
        correction.note(predicted, 10.0 * turn, 10.0 * turn + seconds, 0.5)
    assert 0.95 < sum(within[500:]) / 1500 < 0.999
    assert slower < correction.factor < 2.5 * slower


def test_fixed_costs_of_short_prompts_say_nothing_of_a_queue() -> None:
    correction = TtftCorrection()
    for turn in range(100):
        correction.note(0.001, turn, turn + 0.05, 0.5)
    assert correction.factor == 1.0


def test_it_comes_back_from_a_stall() -> None:
    correction = TtftCorrection()
    for turn in range(20):
        correction.note(0.1, 10.0 * turn, 10.0 * turn + 10.0, 0.5)
    assert correction.factor > 10
    for turn in range(500):
        correction.note(0.1, 300.0 + turn, 300.1 + turn, 0.5)
    assert correction.factor < 2


@pytest.mark.parametrize(("seconds", "raised"), [(0.45, False), (0.55, True)])
def test_what_others_overtake_is_late_only_after_its_bound(seconds, raised) -> None:
    in_order, overtaken = TtftCorrection(), TtftCorrection()
    in_order.note(0.1, 1.0, 1.0 + seconds, 0.5)
    overtaken.note(0.1, 1.0, 1.0 + seconds, 0.5, overtaken=True)
    assert in_order.factor > 1.0
    assert (overtaken.factor > 1.0) == raised


def test_a_burst_that_is_late_counts_once() -> None:
    correction = TtftCorrection()
    for place in range(20):
        correction.note(0.1, 1.0, 2.0 + 0.01 * place, 0.5)
    assert correction.factor < 1.3


@pytest.mark.parametrize("load", [1.3, 3.0, 10.0])
def test_an_overloaded_queue_serves_nearly_all_in_time(load: float) -> None:
    """Those that wait together are late together, so that each late burst has several."""
    rng, correction, drift = random.Random(3), TtftCorrection(), 0.0
    now, ends, late, served = 0.0, list[float](), 0, 0
    noted: list[tuple[float, float, float]] = []
    while now < 300.0:
        now += rng.expovariate(load / 0.04)
        for at, first, predicted in [each for each in noted if each[1] <= now]:
            correction.note(predicted, at, first, 0.5)
        noted = [each for each in noted if each[1] > now]
        ends = [end for end in ends if end > now]
        predicted = 0.04 * (len(ends) + 1)
        if ends and correction.factor * predicted > 0.5:
            continue
        drift = 0.9 * drift + rng.gauss(0.0, 0.13)  # the pace of a busy machine
        ends.append((ends[-1] if ends else now) + 0.04 * math.exp(drift + rng.gauss(0.0, 0.05)))
        served += 1
        late += ends[-1] - now > 0.5
        noted.append((now, min(ends[-1], now + 0.5), predicted))
    assert late < 0.1 * served
    assert served > 0.85 * 300.0 / 0.04 * min(1.0, load) / math.exp(0.05)
