"""Random schedules under random legal plans and every system, and without each guard.

The rules are those of docs/design/architecture.md, "Memory, and work in flight". Every schedule has
arrivals, shared prefixes, aborts, priorities, a pool too small for its load, and lanes that are
held back at random; after every turn the books are checked, at the end every output is compared
with the request's output alone.
"""

import random
from collections import Counter
from typing import Any

import pytest

from tests.engine.random_plans import RandomPlans
from tests.engine.world import FAMILY, World
from tests.systems.names import EXAMPLE, SYSTEM_NAMES
from twolane.engine import request
from twolane.engine.kv.manager import Allocation, KVCacheManager
from twolane.engine.kv.prefix_tree import PrefixTree
from twolane.engine.launches import launch, reap
from twolane.engine.state import State
from twolane.systems.base import System
from twolane.systems.plan import PlanError
from twolane.systems.registry import make_system

SCHEDULES = 6
FULL_SCHEDULES = 1000
EACH, FULL_EACH = 2, 272
"""Schedules of each system, in the short and in the long form."""
RANDOM = "random plans"
OPTIONS = {
    "prefill-first": {"max_batch_tokens": "40"},
    "chunked": {"token_budget": "12"},
    EXAMPLE: {"token_budget": "12"},
    "static-split": {"look_ahead": "2"},
    "bullet": {"max_batch_tokens": "40", "step_layers": "1"},
    "duetserve": {"token_budget": "24", "tbt_seconds": "0.0001"},
}
"""Where a system would not meet with what the schedules are for otherwise."""
QUICK = (RANDOM, "chunked", "static-split", "auto")
"""Hybrid batches, two lanes, levels that change, and all of it at random."""
SPLIT = (RANDOM, "static-split", "drift", "muxwise", "bullet")
"""Who must be seen to change levels."""

KINDS = ("penalised", "biased", "banned", "thinking", "scored", "scored prompts")


some_systems = pytest.mark.parametrize(
    "system",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.full)
        for name in (RANDOM, *SYSTEM_NAMES)
    ],
)


def policy(system: str, seed: int) -> System:
    return RandomPlans(seed) if system == RANDOM else make_system(system, OPTIONS.get(system))


def run_world(
    system: str, seed: int, *, prefix_cache: bool = True, family: str = FAMILY, pages: int = 14
) -> World:
    rng = random.Random(seed)
    world = World(policy(system, seed), rng, pages=pages, prefix_cache=prefix_cache, family=family)
    world.run()
    return world


@pytest.fixture
def schedules(request: pytest.FixtureRequest, system: str) -> range:
    full = request.config.getoption("--full")
    if system == RANDOM:
        return range(FULL_SCHEDULES if full else SCHEDULES)
    return range(FULL_EACH if full else EACH)


@pytest.mark.parametrize("system", [RANDOM, *SYSTEM_NAMES])
def test_random_schedules(system: str, schedules: range) -> None:
    total: Counter[str] = Counter()
    for seed in schedules:
        seen = run_world(system, seed).seen
        total += seen
        assert seen["memory preemptions"], f"seed {seed} preempts nothing"
        assert seen["aborted in flight"], f"seed {seed} aborts nothing in flight"
        assert seen["prefix hits"], f"seed {seed} reuses no page"
        if system in SPLIT:
            levels = [key for key in seen if key.startswith("level decode")]
            assert len(levels) > 1, f"seed {seed} never switches"
        if system == RANDOM:
            assert seen["preempted batches"], f"seed {seed} parks no batch"
    for what in ("held back", "stopped in flight", *KINDS):
        assert total[what] > len(schedules), what
    if system == "drift":
        assert total["preempted batches"]
    if system == RANDOM:
        assert total["held first tokens"]


@some_systems
def test_random_schedules_without_prefix_cache(system: str, schedules: range) -> None:
    for seed in schedules[::3]:
        world = run_world(system, seed, prefix_cache=False)
        assert not world.seen["prefix hits"]


@some_systems
def test_random_schedules_of_states(system: str, schedules: range) -> None:
    """Layers of linear attention: each token moves the state of its request on exactly once."""
    hits = 0
    for seed in schedules[::3]:
        seen = run_world(system, seed, family="qwen3.5").seen
        assert seen["memory preemptions"], f"seed {seed} preempts nothing"
        assert seen["aborted in flight"], f"seed {seed} aborts nothing in flight"
        hits += seen["prefix hits"]
    assert hits


@some_systems
def test_random_schedules_of_windows(system: str, schedules: range) -> None:
    """Layers with a window of two to three pages: those that have left it go to other requests."""
    total: Counter[str] = Counter()
    for seed in schedules[::3]:
        seen = run_world(system, seed, family="olmo3", pages=12).seen
        assert seen["aborted in flight"], f"seed {seed} aborts nothing in flight"
        total += seen
    assert total["prefix hits"]
    assert total["memory preemptions"]


def _free_at_once(books: KVCacheManager, allocation: Allocation) -> None:
    allocation.in_flight, in_flight = 0, allocation.in_flight
    if allocation.given_up and allocation in books._allocations:
        FREE_IF_IDLE(books, allocation)
    allocation.in_flight = in_flight


def _admit_and_publish(
    state: State, admitted: request.Request, allocation: Allocation, count: int
) -> Any:
    state.kv.share(allocation, admitted.tokens, admitted.context + count)
    return MEMBER(state, admitted, allocation, count)


def _share_unwritten(state: State, waiting: request.Request) -> None:
    if waiting.allocation is not None and len(waiting.tokens) % state.kv.page_size == 0:
        state.kv.share(waiting.allocation, waiting.tokens, len(waiting.tokens))


def _forget_sent(state: State, victim: request.Request) -> None:
    del victim.tokens[victim.prompt_tokens :]
    SEND_BACK(state, victim)


def _steps_before_done(flight: request.InFlightLaunch) -> Any:
    ticket, taken = flight.ticket, flight.taken
    steps = [*zip(ticket.steps[taken:], ticket.times[taken:], strict=True)]
    flight.taken += len(steps)
    return ticket.done or ticket.end is not None, steps  # it runs on while it is asked


FREE_IF_IDLE = KVCacheManager._free_if_idle
MEMBER = launch._member
SLIDE = KVCacheManager.slide
SEND_BACK = State.send_back

GUARDS: dict[str, tuple[Any, str, Any]] = {
    "pages and slots are freed when the last launch that names them has ended": (
        KVCacheManager,
        "_free_if_idle",
        _free_at_once,
    ),
    "results for a request that was stopped, aborted or preempted are dropped": (
        reap,
        "_expected",
        lambda request, allocation: request.phase is not request.phase.FINISHED,
    ),
    "a launch waits for launches in other lanes that name its requests": (
        launch,
        "_tickets_elsewhere",
        lambda lane, allocations: [],
    ),
    "a page enters the tree when all layers have written it": (
        launch,
        "_member",
        _admit_and_publish,
    ),
    "the last token's key and value are not written yet": (
        reap,
        "_share_full_pages",
        _share_unwritten,
    ),
    "a page of the tree that is in use is pinned": (
        PrefixTree,
        "pin",
        lambda tree, node: None,
    ),
    "a full hit leaves the last token to compute": (
        KVCacheManager,
        "match",
        lambda books, tokens, **_: books.tree.match(tokens, len(tokens) // books.page_size),
    ),
    "pages for all steps are reserved before the launch": (
        KVCacheManager,
        "grow",
        lambda books, allocation, tokens: True,
    ),
    "recompute starts from prompt and sent tokens": (State, "send_back", _forget_sent),
    "an aborted prompt leaves its batch at the slice boundary": (
        request.PrefillBatch,
        "chunks",
        property(lambda batch: batch.members),
    ),
    "the lanes forget a batch that is given up": (State, "_drop", lambda state, batch: None),
    "whether a launch has ended is read before its steps": (reap, "_poll", _steps_before_done),
    "the launch that others wait for is polled after them": (
        reap,
        "reversed",
        list,
    ),
}

WINDOW_GUARDS: dict[str, tuple[str, Any]] = {
    "a page stays until the launches that see it have ended": (
        "slide",
        lambda books, held, computed: SLIDE(books, held, computed + books.page_size),
    ),
    "a prefix is found where the window before its end is held": (
        "_reach",
        lambda books, path: len(path),
    ),
}


SLOW = "the last token's key and value are not written yet"
"""Noticed only after many schedules."""

NOTICED = (AssertionError, KeyError, ValueError, PlanError)
"""What the checks raise, whichever is the first. A replacement that does not fit raises others."""


@pytest.mark.parametrize(
    "guard", [pytest.param(g, marks=[pytest.mark.full] if g == SLOW else []) for g in GUARDS]
)
def test_without_a_guard_the_schedules_fail(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, replacement = GUARDS[guard]
    monkeypatch.setattr(where, name, replacement, raising=name != "reversed")
    with pytest.raises(NOTICED):
        for seed in range(4 * SCHEDULES):
            run_world(RANDOM, seed)


@pytest.mark.parametrize("guard", WINDOW_GUARDS)
def test_without_a_guard_windows_fail(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, replacement = WINDOW_GUARDS[guard]
    monkeypatch.setattr(KVCacheManager, name, replacement)
    with pytest.raises(NOTICED):
        for seed in range(SCHEDULES):
            run_world(RANDOM, seed, family="olmo3", pages=12)
