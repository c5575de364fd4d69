"""Snapshots of states: where prompts save them, which prompts find them, and what evicts them."""

from types import SimpleNamespace
from typing import Any

import pytest

from twolane.engine.build import with_room_for_states
from twolane.engine.config import EngineConfig
from twolane.engine.kv.manager import Allocation, KVCacheManager

PAGE = 4


def books(pages: int = 32, snapshots: int = 4, slots: int = 4) -> KVCacheManager:
    return KVCacheManager(pages, PAGE, slots, prefix_cache=True, snapshots=snapshots)


def serve(kv: KVCacheManager, tokens: list[int], chunks: list[int] | None = None) -> Allocation:
    """Compute a prompt in chunks of these sizes, as the engine does; it still has its slot."""
    held = kv.allocate(tokens)
    assert held is not None
    done = len(held.path) * PAGE
    for count in chunks or [len(tokens) - done]:
        kv.plan_saves(held, len(tokens), done, count)
        done += count
        kv.share(held, tokens, min(done, len(tokens)))
        kv.saved(held, done)
        kv.check()
    assert done == len(tokens)
    assert not held.saves
    return held


def reused(kv: KVCacheManager, tokens: list[int]) -> int:
    return kv.lookup(tokens).reused


def text(first: int, count: int) -> list[int]:
    return [*range(first, first + count)]


def test_a_prompt_saves_the_last_border_that_it_could_reuse() -> None:
    kv, prompt = books(), text(0, 18)
    kv.give_up(serve(kv, prompt))
    assert reused(kv, prompt) == 16
    assert reused(kv, [*prompt, *text(50, 9)]) == 16
    assert reused(kv, prompt[:14]) == 0, "there are pages, and no state after them"
    whole = text(100, 16)
    kv.give_up(serve(kv, whole))
    assert reused(kv, whole) == 12, "the last token is computed again"


def test_each_turn_of_a_conversation_begins_where_the_last_prompt_ended() -> None:
    kv, said, last = books(pages=256), text(0, 7), 0
    for turn in range(64):
        assert reused(kv, said) == last
        last = (len(said) - 1) // PAGE * PAGE
        kv.give_up(serve(kv, said))
        said = [*said, *text(1000 + 20 * turn, 5)]


def test_prompts_that_leave_a_known_beginning_save_the_branch() -> None:
    kv, system = books(), text(0, 12)
    kv.give_up(serve(kv, [*system, *text(100, 7)]))
    second = serve(kv, [*system, *text(200, 7)])
    assert second.source == -1, "it found pages, and no state"
    kv.give_up(second)
    third = kv.allocate([*system, *text(300, 7)])
    assert third is not None
    assert len(third.path) * PAGE == 12
    assert third.source >= 0


@pytest.mark.parametrize("chunks", [[18], [5, 13], [16, 2], [17, 1], [1] * 18])
def test_a_border_is_saved_by_the_chunk_that_has_it(chunks: list[int]) -> None:
    kv, prompt = books(), text(0, 18)
    kv.give_up(serve(kv, prompt, chunks))
    assert reused(kv, prompt) == 16


def test_the_least_recently_used_gives_way_unless_it_is_in_use() -> None:
    kv = books(snapshots=2)
    first, second, third = (text(100 * i, 9) for i in range(3))
    for prompt in (first, second):
        kv.give_up(serve(kv, prompt))
    kv.give_up(serve(kv, first))  # it is the latest used now
    kv.give_up(serve(kv, third))
    assert [reused(kv, prompt) for prompt in (first, second, third)] == [8, 0, 8]
    holders = [kv.allocate(prompt) for prompt in (first, third)]
    assert all(holders)
    kv.give_up(serve(kv, text(400, 9)))
    assert reused(kv, text(400, 9)) == 0, "launches are to read all snapshots"
    for held in holders:
        assert held is not None
        kv.saved(held, 9)
    kv.give_up(serve(kv, text(400, 9)))
    assert reused(kv, text(400, 9)) == 8
    kv.check()


def test_a_page_that_is_evicted_gives_its_snapshot_back() -> None:
    kv = books(pages=5, snapshots=4)
    kv.give_up(serve(kv, text(0, 9)))
    kv.give_up(serve(kv, text(100, 17)))
    assert reused(kv, text(0, 9)) == 0
    kv.forget_prefixes()
    kv.check()
    assert kv.snapshots is not None
    assert len(kv.snapshots._free) == 4


def test_what_is_never_written_is_given_back() -> None:
    """An abort before the launch that saves has ended."""
    kv = books(snapshots=1)
    held = kv.allocate(text(0, 9))
    assert held is not None
    kv.plan_saves(held, 9, 0, 9)
    assert held.saves
    held.in_flight = 1
    kv.give_up(held)
    kv.check()
    kv.reaped([held])
    kv.check()
    assert kv.snapshots is not None
    assert kv.snapshots.reserve() is not None


@pytest.mark.parametrize(("cached", "most"), [(True, 5), (False, 10)])
def test_states_take_half_of_the_room_at_most(cached: bool, most: int) -> None:
    """Fewer requests run at a time; a model without states has as many as are asked for."""
    config = EngineConfig(model="any", max_running=64, prefix_cache=cached)
    machine: Any = SimpleNamespace(state_bytes=100, kv_bytes=lambda tokens: 2000 + tokens)
    assert with_room_for_states(config, machine, 50).max_running == most
    machine.state_bytes = 0
    assert with_room_for_states(config, machine, 50).max_running == 64
    machine.state_bytes = 2000
    with pytest.raises(MemoryError, match="states of a request"):
        with_room_for_states(config, machine, 0)
