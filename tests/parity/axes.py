"""A few cases instead of all of them: every two values of two axes meet in one."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def all_cases(axes: Mapping[str, Sequence[Hashable]]) -> list[Case]:
    """The full product, the last axis varying fastest."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pairwise_cases(axes: Mapping[str, Sequence[Hashable]]) -> list[Case]:
    """Cases of the product in which every pair of values of every two axes occurs.

    Greedy: each is the first one that brings the most pairs that none before it had. At most one
    case in ten is more than the two longest axes demand, on the axes of this package.
    """
    candidates = [(case, _pairs(case)) for case in all_cases(axes)]
    missing = set().union(*(pairs for _, pairs in candidates))
    chosen = []
    while missing:
        case, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(case)
        missing -= pairs
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[str, Hashable], ...]]:
    return set(combinations(case.items(), 2))
