"""Snapshots of states: where prompts save them, which prompts find them, and what evicts them."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.allocations import allocate_if_room
from twolane.common.errors import FieldError
from twolane.engine.build import with_states
from twolane.engine.config import EngineConfig
from twolane.engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVJournal
from twolane.engine.kv.landmarks import LandmarkWatcher
from twolane.engine.kv.manager import Allocation, KVCacheManager
from twolane.engine.kv.prefix_digest import OPENING_TOKENS, Landmarks
from twolane.engine.settings import check_settings

PAGE = 4


def books(pages: int = 32, snapshots: int = 4, slots: int = 4) -> KVCacheManager:
    return KVCacheManager(pages, PAGE, slots, prefix_cache=True, snapshots=snapshots)


def serve(kv: KVCacheManager, tokens: list[int], chunks: list[int] | None = None) -> Allocation:
    """Compute a prompt in chunks of these sizes, as the engine does; it still has its slot."""
    held = allocate_if_room(kv, tokens)
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


def test_a_prompt_saves_the_last_border_before_it_opens_the_answer() -> None:
    """The next turn may lack the last tokens, which say that the model is to think."""
    kv, prompt = books(), text(0, 18)
    kv.give_up(serve(kv, prompt))
    assert reused(kv, prompt) == 12
    assert reused(kv, [*prompt, *text(50, 9)]) == 12
    assert reused(kv, [*prompt[: 18 - OPENING_TOKENS], *text(50, 9)]) == 12
    assert reused(kv, prompt[:12]) == 0, "there are pages, and no state after them"
    short = text(100, 3)
    kv.give_up(serve(kv, short))
    assert reused(kv, [*short, *text(50, 9)]) == 0


@pytest.mark.parametrize(
    ("borders", "found"),
    [
        ("prompt", [0, 16, 16]),
        ("turn", [0, 0, 32]),
        ("branch", [12, 0, 12]),
        ("prompt+branch", [12, 16, 16]),
        ("prompt+turn+branch", [12, 16, 32]),
    ],
)
def test_prompts_save_where_they_are_told_to(borders: str, found: list[int]) -> None:
    """Found by a third prompt with the same beginning, by the next turn, and by that turn again
    with another message."""
    kv = KVCacheManager(64, PAGE, 4, prefix_cache=True, snapshots=8, borders=borders)
    system, said = text(0, 12), text(100, 11)
    answered = [*system, *said, *text(500, 9)]
    held = serve(kv, [*system, *said])
    kv.grow(held, len(answered))
    kv.share(held, answered, len(answered))
    kv.give_up(held)
    turn = kv.lookup([*answered, *text(600, 9)]).reused
    kv.give_up(serve(kv, [*system, *text(200, 11)]))
    branch = kv.lookup([*system, *text(300, 11)]).reused
    kv.give_up(serve(kv, [*answered, *text(600, 15)]))
    again = kv.lookup([*answered, *text(700, 15)]).reused
    assert [branch, turn, again] == found
    kv.check()


def test_observers_hear_of_each_snapshot_that_a_node_holds() -> None:
    kv = books(pages=6, snapshots=1)
    journal, marks = KVJournal(PAGE, states=True), LandmarkWatcher(PAGE, states=True)
    assert kv.snapshots is not None
    for watcher in (journal, marks):
        kv.tree.watchers.append(watcher)
        kv.snapshots.watchers.append(watcher)
    prompt, other = text(0, 13), text(100, 13)
    kv.give_up(serve(kv, prompt))
    first, *_ = Landmarks.of(prompt, PAGE, states=True).left_by(len(prompt))
    assert marks.take_changes() == {first: 2}
    stored, state = journal.take()
    assert isinstance(stored, BlockStored)
    assert isinstance(state, BlockStored)
    assert (stored.group_idx, len(stored.block_hashes)) == (0, 3)
    assert (state.group_idx, state.block_hashes, state.token_ids) == (1, [first], prompt[4:8])
    assert state.parent_block_hash == stored.block_hashes[0]
    kv.give_up(serve(kv, other))  # takes the only snapshot, and a page
    second, *_ = Landmarks.of(other, PAGE, states=True).left_by(len(other))
    assert marks.take_changes() == {first: 0, second: 2}
    removed, lost, *added = journal.take()
    assert isinstance(removed, BlockRemoved)
    assert removed.group_idx == 0, "a page that has no snapshot"
    assert lost == BlockRemoved([first], group_idx=1)
    assert [event.group_idx for event in added if isinstance(event, BlockStored)] == [0, 1]
    kv.forget_prefixes()
    assert marks.take_changes() == {second: 0}
    assert journal.take() == [AllBlocksCleared()]


def test_a_prompt_reuses_the_longest_prefix_with_a_snapshot() -> None:
    """Shorter ones may have none, and pages alone do not count."""
    marks = Landmarks.of(text(0, 40), PAGE, states=True)
    assert [*marks.tokens] == [*range(4, 40, 4)]
    assert marks.reused({marks.hashes[2], marks.hashes[5]}.__contains__) == 24
    assert marks.reused({marks.hashes[2]}.__contains__) == 12
    assert marks.reused(set[int]().__contains__) == 0
    assert marks.left_by(40) == (marks.hashes[8],)
    assert marks.left_by(39) == (marks.hashes[7],)
    assert Landmarks.of(text(0, 3), PAGE, states=True).left_by(3) == ()


def test_each_turn_of_a_conversation_begins_where_the_last_prompt_ended() -> None:
    kv, said, last = books(pages=256), text(0, 7), 0
    for turn in range(64):
        assert reused(kv, said) == last
        last = (len(said) - OPENING_TOKENS) // PAGE * PAGE
        kv.give_up(serve(kv, said))
        said = [*said, *text(1000 + 20 * turn, 5)]


def test_prompts_that_leave_a_known_beginning_save_the_branch() -> None:
    kv, system = books(), text(0, 12)
    kv.give_up(serve(kv, [*system, *text(100, 11)]))
    second = serve(kv, [*system, *text(200, 11)])
    assert second.source == -1, "it found pages, and no state"
    kv.give_up(second)
    third = allocate_if_room(kv, [*system, *text(300, 11)])
    assert third is not None
    assert len(third.path) * PAGE == 12
    assert third.source >= 0


@pytest.mark.parametrize("chunks", [[18], [5, 13], [12, 6], [13, 5], [1] * 18])
def test_a_border_is_saved_by_the_chunk_that_has_it(chunks: list[int]) -> None:
    kv, prompt = books(), text(0, 18)
    kv.give_up(serve(kv, prompt, chunks))
    assert reused(kv, prompt) == 12


def test_the_least_recently_used_gives_way_unless_it_is_in_use() -> None:
    kv = books(snapshots=2)
    first, second, third = (text(100 * i, 12) for i in range(3))
    for prompt in (first, second):
        kv.give_up(serve(kv, prompt))
    kv.give_up(serve(kv, first))  # it is the latest used now
    kv.give_up(serve(kv, third))
    assert [reused(kv, prompt) for prompt in (first, second, third)] == [8, 0, 8]
    holders = [allocate_if_room(kv, prompt) for prompt in (first, third)]
    assert all(holders)
    kv.give_up(serve(kv, text(400, 12)))
    assert reused(kv, text(400, 12)) == 0, "launches are to read all snapshots"
    for held in holders:
        assert held is not None
        kv.saved(held, 12)
    kv.give_up(serve(kv, text(400, 12)))
    assert reused(kv, text(400, 12)) == 8
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
    held = allocate_if_room(kv, text(0, 9))
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


@pytest.mark.parametrize(
    ("settings", "running", "snapshots"),
    [
        ({}, 10, 10),
        ({"max_running": 2}, 2, 7),
        ({"max_running": 2, "kv_tokens": 64}, 2, 2),
        ({"snapshots": 3}, 17, 3),
        ({"prefix_cache": False}, 20, 0),
    ],
)
def test_states_take_half_of_the_room_at_most(
    settings: dict[str, Any], running: int, snapshots: int
) -> None:
    """Fewer requests run at a time; a model without states has as many as are asked for."""
    config = EngineConfig(model="any", **{"max_running": 64, **settings})
    machine: Any = SimpleNamespace(
        state_bytes=100, kv_bytes=lambda tokens: 2000 + tokens, page_token_bytes=1
    )
    made = with_states(config, machine, 2000)
    assert (made.max_running, made.snapshots) == (running, snapshots)
    if config.snapshots is None:
        machine.state_bytes = 0
        assert with_states(config, machine, 50) == config
    machine.state_bytes = 2000
    with pytest.raises(MemoryError if config.snapshots is None else FieldError, match="states"):
        with_states(config, machine, 0)


def test_snapshots_that_cannot_be_are_refused() -> None:
    machine: Any = SimpleNamespace(state_bytes=0)
    with pytest.raises(FieldError, match="snapshots are of states, which any has none of"):
        with_states(EngineConfig(model="any", snapshots=3), machine, 50)
    machine = SimpleNamespace(state_bytes=10, kv_bytes=lambda tokens: 100)
    with pytest.raises(FieldError, match="snapshots 7 leave no room for states: it is that of 5"):
        with_states(EngineConfig(model="any", snapshots=7), machine, 50)
    with pytest.raises(FieldError, match="snapshots need the prefix cache"):
        check_settings(EngineConfig(model="any", snapshots=3, prefix_cache=False))
