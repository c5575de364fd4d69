"""The books of the KV cache: pages, the radix tree, allocations."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.allocations import allocate_if_room
from twolane.common.errors import FieldError
from twolane.engine.build import make_kv_manager, with_running
from twolane.engine.config import EngineConfig
from twolane.engine.kv import prefix_tree
from twolane.engine.kv.manager import Allocation, KVCacheManager, Lookup
from twolane.engine.kv.page_hash import page_hashes, page_key
from twolane.engine.kv.prefix_tree import Node, PrefixTree
from twolane.lanes.base import Ticket

PAGE = 4


def books(pages: int = 16, slots: int = 8) -> KVCacheManager:
    return KVCacheManager(pages, PAGE, slots, prefix_cache=True)


def allocate(kv: KVCacheManager, tokens: list[int]) -> Allocation:
    allocation = allocate_if_room(kv, tokens)
    assert allocation is not None
    return allocation


def test_a_shared_prefix_is_found_page_by_page() -> None:
    kv = books()
    first = allocate(kv, list(range(14)))
    kv.share(first, list(range(14)), 14)
    second = allocate(kv, [*range(10), 99, 98])
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]  # tokens 8 to 11 differ
    kv.check()


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    kv = books()
    tokens = list(range(8))
    kv.share(allocate(kv, tokens), tokens, 8)
    assert len(kv.match(tokens)) == 1  # the page that holds the last token is computed again
    assert len(kv.match([*tokens, 8])) == 2


def test_a_page_that_is_not_full_is_not_shared() -> None:
    kv = books()
    tokens = list(range(7))
    kv.share(allocate(kv, tokens), tokens, 7)
    assert kv.match([*tokens, 7, 8]) == kv.match(tokens)
    assert len(kv.match(tokens)) == 1


def test_pages_return_when_the_last_launch_has_ended() -> None:
    kv = books()
    held = allocate(kv, [1, 2, 3])
    kv.launched([held], Ticket("prefill", 1))
    kv.launched([held], Ticket("decode", 1))
    kv.give_up(held)
    assert kv.free_pages == 15
    assert kv.returning_pages == 1
    kv.reaped([held])
    assert kv.free_pages == 15
    kv.reaped([held])
    assert (kv.free_pages, kv.free_slots, kv.returning_pages) == (16, 8, 0)


def test_what_will_return_is_what_nobody_else_holds() -> None:
    kv, tokens = books(), list(range(10))
    gone, other = allocate(kv, tokens), allocate(kv, list(range(20, 30)))
    kv.share(gone, tokens, 8)
    also = allocate(kv, tokens[:5])  # has the first page, too
    kv.launched([gone, other], Ticket("decode", 1))
    assert kv.returning_pages == 0
    kv.give_up(gone)
    before = kv.free_pages + kv.reclaimable_pages
    assert kv.returning_pages == 2
    kv.reaped([gone, other])
    assert kv.free_pages + kv.reclaimable_pages == before + 2
    kv.check()
    kv.give_up(also)
    assert kv.returning_pages == 0


def test_the_least_recently_used_leaf_goes_first_and_pinned_ones_never() -> None:
    kv = books(pages=5)
    old, new, pinned = [1] * 5, [2] * 5, [3] * 5
    for tokens in (old, new):
        held = allocate(kv, tokens)
        kv.share(held, tokens, 4)
        kv.give_up(held)
    kv.give_up(allocate(kv, old))  # used again: `new` is the older one now
    held = allocate(kv, pinned)
    kv.share(held, pinned, 4)
    assert kv.grow(held, 16)  # two more pages; one free, one from `new`
    assert len(kv.match(old)) == 1
    assert len(kv.match(new)) == 0
    assert len(kv.match(pinned)) == 1
    assert not kv.grow(held, 100)
    kv.check()


def test_leaves_go_before_what_they_continue() -> None:
    kv = books(pages=4)
    tokens = list(range(12))
    held = allocate(kv, tokens)
    kv.share(held, tokens, 12)
    kv.give_up(held)
    allocate(kv, [50, 51, 52, 53, 54])  # one free page, one evicted
    assert len(kv.match([*tokens, 1])) == 2


def test_what_is_remembered_of_leaves_does_not_grow_with_the_requests() -> None:
    """A pool that is never full never has to evict, and a server may run for months. Who is used
    least recently is known all the same."""
    kv = books(pages=256)
    rng, order = random.Random(0), list(range(100))
    for _ in range(5000):
        order.append(order.pop(rng.randrange(len(order))))
        tokens = [order[-1]] * 9
        held = allocate(kv, tokens)
        kv.share(held, tokens, 9)
        kv.give_up(held)
    kv.check()
    assert len(kv.tree._leaves._heap) < 2000
    held = allocate(kv, [1000] * PAGE * kv.free_pages)
    for prompt in order:
        assert len(kv.match([prompt] * 9)) == 2
        assert kv.grow(held, (len(held.pages) + 2) * PAGE)
        assert not kv.match([prompt] * 9)


def test_the_order_holds_when_what_is_remembered_is_sifted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages of one token come, are used again and go; each is called like its token."""
    monkeypatch.setattr(prefix_tree, "SPARE_IDLE", 5)
    tree, rng, order = PrefixTree(1), random.Random(0), list[int]()
    for step in range(2000):
        turn = rng.choice(["new", "again", "evict"]) if len(order) > 20 else "new"
        if turn == "evict":
            assert tree.evict() == [order.pop(0)]
            continue
        order.append(step if turn == "new" else order.pop(rng.randrange(len(order))))
        path = tree.match(order[-1:], 1)
        for node in path:
            tree.pin(node)
        tree.unpin(path or [tree.add([], page_key(order[-1:], 0, 1, b""), order[-1])])


def test_sifting_takes_a_few_looks_for_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(node: Node) -> bool:
        nonlocal looks
        looks += 1
        return stands(node)

    stands = prefix_tree._is_idle_leaf
    monkeypatch.setattr(prefix_tree, "_is_idle_leaf", counted)
    monkeypatch.setattr(prefix_tree, "SPARE_IDLE", 5)
    tree = PrefixTree(1)
    for page in range(2000):
        tree.unpin([tree.add([], page_key([page], 0, 1, b""), page)])
    assert 0 < looks < 4 * 2000


def test_two_requests_that_compute_the_same_page_keep_their_own() -> None:
    kv = books()
    tokens = list(range(9))
    one, other = allocate(kv, tokens), allocate(kv, tokens)
    kv.share(one, tokens, 9)
    kv.share(other, tokens, 9)
    assert not set(one.pages) & set(other.pages)
    kv.check()
    kv.give_up(one)  # its pages make way for those of the other, which stands on the same nodes
    assert (kv.reclaimable_pages, kv.free_pages) == (0, 13)
    kv.check()
    third = allocate(kv, tokens)
    assert third.pages[:2] == other.pages[:2]
    kv.give_up(other)
    kv.check()
    kv.give_up(third)
    assert (kv.reclaimable_pages, kv.free_pages) == (2, 14)
    kv.check()


def test_a_copy_of_a_page_that_nobody_uses_takes_its_place() -> None:
    """A request that may not reuse the tree does not keep it from being reclaimed."""
    kv = books(pages=6)
    tokens = list(range(9))
    first = allocate(kv, tokens)
    kv.share(first, tokens, 9)
    kv.give_up(first)
    second = allocate_if_room(kv, tokens, reuse=False)
    assert second is not None
    assert not second.path
    assert (kv.free_pages, kv.reclaimable_pages) == (1, 2)
    kv.share(second, tokens, 9)
    assert (kv.free_pages, kv.reclaimable_pages) == (3, 0)
    kv.check()


def test_allocation_is_all_or_nothing() -> None:
    kv = books(pages=3, slots=1)
    assert allocate_if_room(kv, list(range(13))) is None
    kv.check()
    assert allocate(kv, list(range(12))).slot == 0
    assert allocate_if_room(kv, [1]) is None
    kv.check()


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    kv = KVCacheManager(8, PAGE, 4, prefix_cache=False)
    tokens = list(range(9))
    held = allocate(kv, tokens)
    kv.share(held, tokens, 9)
    kv.give_up(held)
    assert (kv.match(tokens), kv.free_pages, kv.reclaimable_pages) == ([], 8, 0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), pages=st.integers(3, 30))
def test_cost_is_what_allocation_takes(seed: int, pages: int) -> None:
    """Whatever happened before: `cost` pages less are to be had after `allocate`.

    A lookup that begins where an earlier one ended finds what one from the start finds.
    """
    rng = random.Random(seed)
    kv = books(pages)
    waiting = [rng.randrange(2) for _ in range(29)]
    seen = kv.lookup(waiting)
    answers: dict[int, Lookup] = {}
    held: list[tuple[Allocation, list[int]]] = []
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        before, cost = kv.free_pages + kv.reclaimable_pages, kv.lookup(tokens).cost
        allocation = allocate_if_room(kv, tokens)
        assert (allocation is not None) == (cost <= before and len(held) < 8)
        if allocation is not None:
            assert kv.free_pages + kv.reclaimable_pages == before - cost
            held.append((allocation, tokens))
            kv.share(allocation, tokens, rng.randrange(len(tokens) + 1))
        while held and (allocation is None or rng.random() < 0.3):
            kv.give_up(held.pop(rng.randrange(len(held)))[0])
            allocation = held[0][0] if held else None
        kv.check()
        if rng.random() < 0.05:
            kv.forget_prefixes()
            assert kv.lookup(waiting).reused == 0
        seen = kv.lookup(waiting, before=seen)
        assert seen == kv.lookup(waiting)
        assert seen == answers.setdefault(seen.version, seen), "it has changed, and its version not"


@pytest.mark.parametrize("fault", ["lost page", "page owned twice", "wrong pin", "slot twice"])
def test_check_notices(fault: str) -> None:
    kv = books()
    held = allocate(kv, list(range(9)))
    kv.share(held, list(range(9)), 9)
    if fault == "lost page":
        held.private.pop()
    elif fault == "page owned twice":
        held.private.add(held.pages[0])
    elif fault == "wrong pin":
        held.path[0].pins += 1
    else:
        allocate(kv, [7]).slot = held.slot
    with pytest.raises(AssertionError):
        kv.check()


def test_another_salt_shares_nothing() -> None:
    kv, tokens = books(), list(range(13))
    for salt in (b"", b"a" * 32, b"b" * 32):
        assert kv.lookup(tokens, salt=salt).reused == 0
        held = allocate_if_room(kv, tokens, salt=salt)
        assert held is not None
        kv.share(held, tokens, 13)
        kv.check()
        kv.give_up(held)
        assert kv.lookup(tokens, salt=salt).reused == 12
    assert kv.free_pages + kv.reclaimable_pages == 16


def test_a_node_has_the_hash_of_its_path() -> None:
    kv = books()
    tokens = list(range(14))
    for salt in (b"", b"tenant"):
        allocation = allocate_if_room(kv, tokens, salt=salt)
        assert allocation is not None
        kv.share(allocation, tokens, 14)
        assert [node.hash for node in allocation.path] == list(page_hashes(tokens, PAGE, salt))


def test_nothing_that_was_forgotten_is_found_again() -> None:
    """Also while a launch holds its pages; what is computed later is shared as ever."""
    kv, tokens = books(), list(range(13))
    held = allocate(kv, tokens)
    kv.share(held, tokens, 9)
    kv.launched([held], Ticket("decode", 1))
    kv.give_up(held)
    seen = kv.lookup(tokens)
    assert seen.reused == 8
    kv.forget_prefixes()
    assert kv.lookup(tokens, before=seen).reused == 0
    running = allocate(kv, tokens)
    kv.share(held, tokens, 13)  # it goes on below what was forgotten
    assert kv.lookup(tokens).reused == 0
    kv.share(running, tokens, 13)
    kv.give_up(running)
    kv.reaped([held])  # it was in use later than what is found
    kv.check()
    assert kv.lookup(tokens).reused == 12
    assert kv.reclaimable_pages == 6
    assert allocate(kv, list(range(50, 90))).pages  # ten pages are free: none is reclaimed
    assert allocate(kv, list(range(90, 98))).pages  # what was forgotten is reclaimed first
    assert kv.lookup(tokens).reused == 12
    kv.check()


def test_what_was_forgotten_is_reclaimed_from_its_end() -> None:
    """A page of it was idle, and then one was added behind it."""
    kv, tokens = books(pages=8), list(range(13))
    one, other = allocate(kv, tokens), allocate(kv, tokens)
    kv.share(one, tokens, 4)
    kv.share(other, tokens, 4)
    kv.share(one, tokens, 8)
    kv.forget_prefixes()
    kv.give_up(one)
    kv.check()
    kv.share(other, tokens, 12)
    kv.give_up(other)
    kv.check()
    taker = allocate(kv, [99] * PAGE * kv.free_pages)
    while kv.reclaimable_pages:
        assert kv.grow(taker, len(taker.pages) * PAGE + PAGE)
        kv.check()
    kv.forget_prefixes()
    assert not kv.tree._former_roots


def test_an_earlier_answer_leads_on_to_what_was_added_since() -> None:
    kv, tokens = books(), list(range(17))
    held = allocate(kv, tokens)
    kv.share(held, tokens, 8)
    seen = kv.lookup(tokens)
    kv.share(held, tokens, 16)
    assert (seen.reused, kv.lookup(tokens, before=seen).reused) == (8, 16)


class Watcher:
    """Keeps the hashes of the pages that can be found."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}

    def stored(self, node: Node) -> None:
        self.nodes[node.hash] = node

    def removed(self, node: Node) -> None:
        if self.nodes.get(node.hash) is node:
            del self.nodes[node.hash]

    def forgotten(self) -> None:
        self.nodes.clear()


def test_who_watches_the_tree_knows_what_can_be_found() -> None:
    kv, watcher = books(), Watcher()
    kv.tree.watchers.append(watcher)
    tokens = list(range(14))
    held = allocate(kv, tokens)
    kv.share(held, tokens, 9)
    assert list(watcher.nodes) == list(page_hashes(tokens[:8], PAGE))
    assert [node.depth for node in watcher.nodes.values()] == [1, 2]
    kv.forget_prefixes()
    kv.share(held, tokens, 14)  # below what was forgotten
    assert not watcher.nodes
    again = allocate(kv, tokens)
    kv.share(again, tokens, 14)
    kv.give_up(held)
    while kv.reclaimable_pages:  # what was forgotten is reclaimed
        assert kv.grow(again, len(again.pages) * PAGE + PAGE)
    assert list(watcher.nodes) == list(page_hashes(tokens, PAGE))
    kv.give_up(again)
    kv.forget_prefixes()
    assert not watcher.nodes
    kv.check()


WINDOW, TABLES = 6, 2
"""Tokens that layers with a window see, and pages that they have for each page of tokens."""


def windowed(pages: int, slots: int = 8) -> KVCacheManager:
    return KVCacheManager(
        pages, PAGE, slots, prefix_cache=True, window=WINDOW, window_tables=TABLES
    )


def run_through(kv: KVCacheManager, tokens: list[int], answered: int = 1) -> Allocation:
    """Have a request read its prompt at once, and answer token by token."""
    prompt = len(tokens) - answered
    held = allocate(kv, tokens[:prompt])
    for written in range(prompt, len(tokens)):
        assert kv.grow(held, written + 1)
        kv.share(held, tokens, written)
        kv.slide(held, written)
        kv.check()
    return held


def test_pages_that_have_left_the_window_are_free_while_the_request_runs() -> None:
    kv = windowed(40)
    kv.prefix_cache = False
    held = run_through(kv, list(range(31)), answered=10)
    # The token at 30 sees those from 25 on, which lie in pages 6 and 7; all 8 are full layers'.
    assert kv.held(held) == 8 + 2 * TABLES
    assert kv.free_pages == 40 - 8 - 2 * TABLES
    kv.give_up(held)
    assert kv.free_pages == 40


def test_a_prefix_is_found_where_its_last_window_is_held() -> None:
    """With memory for all, any prefix is found; when the windows that were left behind are taken,
    the whole one alone is."""
    kv, tokens = windowed(100), list(range(33))
    kv.give_up(run_through(kv, tokens))
    assert kv.lookup(tokens[:19]).reused == 16
    assert kv.lookup([*tokens[:32], 99]).reused == 32
    other = allocate(kv, list(range(100, 100 + PAGE * (kv.free_pages // 3 + 4))))
    assert kv.free_pages < 3
    assert kv.lookup([*tokens[:32], 99]).reused == 32
    assert kv.lookup(tokens[:19]).reused < 16
    kv.give_up(other)
    kv.check()


def test_what_is_found_has_the_pages_that_its_next_token_sees_and_no_others() -> None:
    kv, tokens = windowed(100), list(range(33))
    kv.give_up(run_through(kv, tokens))
    free, found = kv.free_pages + kv.reclaimable_pages, kv.lookup([*tokens[:32], 99])
    held = allocate(kv, [*tokens[:32], 99])
    assert held.slid == 6  # the token at 32 sees those from 27 on
    assert kv.held(held) == 9 + 3 * TABLES
    assert found.cost == free - kv.free_pages - kv.reclaimable_pages == 9 + 3 * TABLES
    assert {*held.windows[:6]} == {held.windows[6]}, "what is sent is a page that it holds"
    kv.check()


def test_the_window_before_a_branch_outlives_those_that_nobody_shares() -> None:
    """A prompt that all share is found again after many that follow it have left it behind."""
    kv, system = windowed(90), list(range(16))
    for turn in range(20):
        held = run_through(kv, [*system, *range(1000 * turn + 100, 1000 * turn + 125)])
        kv.give_up(held)
        kv.check()
        if turn > 1:
            assert held.borders[0] == 4, f"request {turn} did not find the prompt"


def test_requests_that_are_begun_keep_what_they_found_while_others_are_filled() -> None:
    kv, first, second = windowed(60), list(range(33)), list(range(100, 125))
    for tokens in (first, second):
        kv.give_up(run_through(kv, tokens))
    found = [kv.lookup([*tokens[:-1], 99]) for tokens in (second, first)]
    assert [each.reused for each in found] == [24, 32]
    begun = [kv.begin(each) for each in found]
    room = kv.free_pages + kv.reclaimable_pages
    assert kv.fill(begun[0], 25 + PAGE * (room // 3 - 2))
    assert kv.fill(begun[1], 33)
    assert [len(held.path) for held in begun] == [6, 8]
    kv.check()


def test_a_model_without_keys_and_values_is_refused_by_name() -> None:
    """All layers of such a checkpoint have linear attention; a page of it would take no memory."""
    config, machine = EngineConfig(model="linear"), SimpleNamespace(page_token_bytes=0)
    with pytest.raises(FieldError, match="linear has no layer with keys and values"):
        make_kv_manager(config, cast(Any, machine), 100)


@pytest.mark.parametrize(
    ("settings", "machine", "running"),
    [
        ({}, {}, 512),
        ({}, {"kv_bytes": lambda tokens: 10 << 30}, 1024),
        ({}, {"kv_bytes": lambda tokens: 1 << 20}, 256),
        ({}, {"kind": "simulated"}, 512),
        ({}, {"kind": "cpu"}, 256),
        ({}, {"state_bytes": 1 << 10}, 256),
        ({"kv_tokens": 400 << 10}, {}, 384),
        ({"kv_tokens": 400 << 10, "max_running": 7}, {}, 7),
    ],
)
def test_the_pool_says_how_many_requests_run(
    settings: dict[str, int], machine: dict[str, Any], running: int
) -> None:
    """A request for each 1,024 tokens, in steps of 64, between the least and the most."""
    gpu = {"kind": "cuda", "page_token_bytes": 1 << 10, "state_bytes": 0}
    there = SimpleNamespace(**{**gpu, "kv_bytes": lambda tokens: (513 << 20) + tokens, **machine})
    config = EngineConfig(model="any", **settings)
    assert with_running(config, cast(Any, there), 50).max_running == running
