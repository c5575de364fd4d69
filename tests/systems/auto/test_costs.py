"""What waiting prompts cost, by itself."""

import pytest

from tests.estimate import synthetic
from tests.systems.handmade import view, waiting
from twolane.estimate.online import OnlineEstimator
from twolane.systems.auto.costs import REFERENCE_TOKENS, PrefillCosts

KNOWN = synthetic.calibrated()


def test_a_short_prompt_costs_its_part_of_the_reference_batch() -> None:
    half, whole = waiting("half", REFERENCE_TOKENS // 2), waiting("whole", REFERENCE_TOKENS)
    costs = PrefillCosts().updated(view(KNOWN, waiting=[half, whole]))
    assert costs.reference is not None
    assert costs.of(whole) == costs.reference == pytest.approx(2 * costs.of(half))
    assert costs.tokens_in(3 * costs.reference) == pytest.approx(3 * REFERENCE_TOKENS)


def test_attention_over_a_long_context_counts() -> None:
    near, far = waiting("near", 512), waiting("far", 512, reused=40_000)
    costs = PrefillCosts().updated(view(KNOWN, waiting=[near, far]))
    assert costs.of(far) > costs.of(near)


def test_what_is_known_is_kept_until_the_prompt_has_other_new_tokens() -> None:
    before = PrefillCosts(1.0, {"a": (500, 7.0), "gone": (1, 1.0)})
    same = before.updated(view(KNOWN, waiting=[waiting("a", 500)]))
    assert same == PrefillCosts(1.0, {"a": (500, 7.0)})
    less = before.updated(view(KNOWN, waiting=[waiting("a", 400)]))
    assert less.of(waiting("a", 400)) == pytest.approx(400 / REFERENCE_TOKENS)


def test_the_reference_is_predicted_anew_when_no_known_prompt_waits() -> None:
    asked = view(KNOWN, waiting=[waiting("a", 500)])
    fresh = PrefillCosts().updated(asked)
    assert PrefillCosts(9.0, {}).updated(asked) == fresh
    assert PrefillCosts(9.0, {"b": (1, 1.0)}).updated(asked).reference == 9.0


def test_nothing_is_known_before_anything_was_seen() -> None:
    costs = PrefillCosts().updated(view(OnlineEstimator(), waiting=[waiting("a", 500)]))
    assert costs == PrefillCosts()
    assert costs.of(waiting("a", 500)) == 0.0
    assert costs.tokens_in(1.0) is None
