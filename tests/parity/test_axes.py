"""The picker of cases keeps its promise: no pair of values is left out."""

from itertools import combinations, product

from tests.parity.axes import all_cases, pairwise_cases
from tests.parity.test_tiny import AXES

PLAIN = {"a": "xyz", "b": (1, 2, 3, 4), "c": (False, True), "d": (None, 0)}


def test_every_pair_occurs() -> None:
    for axes in (PLAIN, AXES):
        cases = pairwise_cases(axes)
        for one, other in combinations(axes, 2):
            met = {(case[one], case[other]) for case in cases}
            assert met == set(product(axes[one], axes[other]))


def test_few_cases_suffice() -> None:
    """Two axes alone need the product of their lengths; the others come nearly for free."""
    for axes in (PLAIN, AXES):
        *_, second, first = sorted(map(len, axes.values()))
        assert first * second <= len(pairwise_cases(axes)) <= 1.1 * first * second


def test_the_choice_never_changes() -> None:
    assert pairwise_cases(AXES) == pairwise_cases(AXES)
    assert len(all_cases(PLAIN)) == 3 * 4 * 2 * 2
