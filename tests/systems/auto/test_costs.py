"""What waiting prompts cost, by itself."""

from dataclasses import replace

import pytest

from tests.estimate import synthetic
from tests.systems.handmade import view, waiting
from twolane.estimate.online import OnlineEstimator
from twolane.systems.auto.costs import REFERENCE_TOKENS, PrefillCosts
from twolane.systems.rows import WaitingTable

KNOWN = synthetic.calibrated()


def test_a_short_prompt_costs_its_part_of_the_reference_batch() -> None:
    prompts = [waiting("half", REFERENCE_TOKENS // 2), waiting("whole", REFERENCE_TOKENS)]
    costs = PrefillCosts().updated(view(KNOWN, waiting=prompts))
    half, whole = costs.seconds
    assert costs.reference is not None
    assert whole == costs.reference == pytest.approx(2 * half)
    assert costs.tokens_in(3 * costs.reference) == pytest.approx(3 * REFERENCE_TOKENS)


def test_attention_over_a_long_context_counts() -> None:
    near, far = waiting("near", 512), waiting("far", 512, reused=40_000)
    costs = PrefillCosts().updated(view(KNOWN, waiting=[near, far]))
    assert costs.seconds[1] > costs.seconds[0]


def test_what_is_known_is_kept_until_the_prompt_has_other_new_tokens() -> None:
    asked = waiting("a", 500, reused=40_000)
    known = PrefillCosts().updated(view(KNOWN, waiting=[asked, waiting("gone", 1)]))
    before = replace(known, reference=1.0, long={("a", 500): 7.0, ("gone", 1): 1.0})
    same = before.updated(view(KNOWN, waiting=[asked]))
    assert (same.seconds.tolist(), same.long) == ([7.0], {("a", 500): 7.0})
    less = before.updated(view(KNOWN, waiting=[waiting("a", 400, reused=40_000)]))
    assert less.seconds[0] != 7.0
    assert before.updated(view(KNOWN, waiting=[waiting("b", 512)])).seconds.tolist() == [0.5]


def test_the_same_table_is_not_looked_at_again() -> None:
    table = WaitingTable.of([waiting("a", 500)])
    costs = PrefillCosts().updated(view(KNOWN, waiting_table=table))
    assert costs.updated(view(KNOWN, waiting_table=table)) is costs


def test_the_reference_is_predicted_anew_when_no_known_prompt_waits() -> None:
    asked = view(KNOWN, waiting=[waiting("a", 500)])
    fresh = PrefillCosts().updated(asked)
    assert replace(fresh, reference=9.0, table=None).updated(asked).reference == fresh.reference
    assert replace(fresh, reference=9.0).updated(asked).reference == 9.0


def test_nothing_is_known_before_anything_was_seen() -> None:
    costs = PrefillCosts().updated(view(OnlineEstimator(), waiting=[waiting("a", 500)]))
    assert costs.reference is None
    assert costs.seconds.tolist() == [0.0]
    assert costs.tokens_in(1.0) is None
