"""Who is admitted next, by itself."""

from typing import Any

from tests.systems.handmade import Asked, decoding, view, waiting
from twolane.estimate.online import OnlineEstimator
from twolane.systems.common.admission import next_chunks

A, B, C = (waiting(name, 64, page_cost=4) for name in "abc")


def admitted(
    *asked: Asked,
    budget: int = 4096,
    split: bool = False,
    order: list[Asked] | None = None,
    **more: Any,
) -> list[tuple[str, int]]:
    """Name and tokens of each chunk that is next."""
    seen = view(OnlineEstimator(), waiting=asked, **more)
    chunks = next_chunks(seen, budget, split=split, waiting=order)
    return [(chunk.request, chunk.n) for chunk in chunks]


def test_a_page_is_left_for_every_request_that_decodes() -> None:
    both = [decoding("x", 16), decoding("y", 16)]
    for free, reclaimable, count in ((5, 0, 0), (6, 0, 1), (9, 0, 1), (3, 7, 2)):
        pages = {"free_pages": free, "reclaimable_pages": reclaimable}
        assert len(admitted(A, B, decoding=both, **pages)) == count


def test_that_page_has_its_like_in_the_tables_of_windows() -> None:
    """A step that begins a page of tokens takes one page in each table."""
    both = [decoding("x", 16), decoding("y", 16)]
    for free, count in ((9, 0), (10, 1), (13, 1), (14, 2)):
        pages = {"free_pages": free, "reclaimable_pages": 0, "page_tables": 3}
        assert len(admitted(A, B, decoding=both, **pages)) == count


def test_nobody_is_admitted_without_a_slot() -> None:
    for slots in range(3):
        assert len(admitted(A, B, C, free_slots=slots)) == slots


def test_behind_who_does_not_fit_only_started_prompts_go_on() -> None:
    """Even if there is room for a smaller one: nobody is overtaken."""
    started, small = waiting("s", 32, started=True), waiting("t", 16, page_cost=1)
    room = {"free_pages": 5, "reclaimable_pages": 0}
    assert admitted(A, B, small, **room) == [("a", 64)]
    assert admitted(started, A, B, small, order=[A, B, small, started], **room) == [
        ("a", 64),
        ("s", 32),
    ]
    assert admitted(A, order=[started, A], free_slots=0) == [("s", 32)]


def test_a_budget_cuts_prompts_or_takes_them_whole() -> None:
    assert admitted(A, B, C, budget=100, split=True) == [("a", 64), ("b", 36)]
    assert admitted(A, B, C, budget=65, split=True) == [("a", 64), ("b", 1)]
    assert admitted(A, B, C, budget=64, split=True) == [("a", 64)]
    assert admitted(A, B, C, budget=128) == [("a", 64), ("b", 64)]
    assert admitted(A, B, C, budget=127) == [("a", 64)]
    assert admitted(A, B, budget=1) == [("a", 64)]
