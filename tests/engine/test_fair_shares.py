"""API keys take turns: a flood of one key's requests does not hold up another key."""

from array import array
from types import SimpleNamespace

import pytest

from tests.systems.names import SYSTEM_NAMES
from tests.systems.simulation import Simulation, simulate, submit
from twolane.engine.kv.manager import Lookup
from twolane.engine.request import Request
from twolane.engine.waiting_queue import WaitingQueue
from twolane.slo import Slo
from twolane.systems.registry import make_system

PROMPT = 900
MOST = {"auto": 3.5}
"""Times the wait beside one request of the other key, 3.0 where there is none; `auto` slows a
prompt down for the gaps of all that decode."""
COUNT = 20
"""Requests of the flood; more than fit into the slots and pages."""
ROOMY = {"pages": 60_000, "slots": 400}
CASES = {
    "queue": (0.02, 4, ROOMY),
    "slots": (1.5, 150, {"pages": 60_000, "slots": 8}),
    "pages": (1.5, 150, {"pages": 560, "slots": 400}),
}
"""When the other key comes, tokens of an answer, and what there is for all."""
IN_ORDER = ("static-split", "chunked", "prefill-first", "temporal", "two-stream")
"""Systems that admit prompts in order of arrival."""

SHORT = ("static-split", "chunked", "auto")
"""Systems of the short form."""


def served(system: str, count: int, case: str) -> Simulation:
    """So many requests of key 0 at once, and one of key 1 later."""
    late, output, room = CASES[case]
    flood = [(0.0, submit(f"a{i:03}", PROMPT, output, key=0)) for i in range(count)]
    return simulate(make_system(system), [*flood, (late, submit("b", PROMPT, 4, key=1))], **room)


@pytest.mark.parametrize(
    ("system", "case"),
    [
        pytest.param(name, case, marks=[] if name in SHORT else [pytest.mark.full])
        for name in SYSTEM_NAMES
        for case in CASES
    ],
)
def test_a_key_waits_about_as_long_as_beside_one_request(system: str, case: str) -> None:
    late = CASES[case][0]
    alone = served(system, 1, case).times["b"][0] - late
    flooded = served(system, COUNT, case)
    assert flooded.times["b"][0] - late <= MOST.get(system, 3.0) * alone
    assert set(flooded.finish.values()) == {"length"}
    if system in IN_ORDER:
        firsts = [flooded.times[f"a{i:03}"][0] for i in range(COUNT)]
        assert firsts == sorted(firsts)


def waiting(key: int, order: int) -> Request:
    tokens = array("q", [5] * PROMPT)
    bounds = {"prompt_tokens": PROMPT, "limit": PROMPT + 8, "to_generate": 8, "priority": 0}
    nothing = {"slo": Slo(), "sampling": SimpleNamespace(), "stops": frozenset()}
    about = {"order": order, "arrival": order, "key": key, **bounds, **nothing}
    return Request(f"{key}-{order}", tokens, lookup=lambda _: Lookup(0, 1, 0), **about)


def test_a_prompt_between_two_chunks_still_has_its_key_s_turn() -> None:
    """Systems that go by deadlines take earlier requests first: those of a flood, for minutes."""
    queue, flood, other = WaitingQueue(), [waiting(0, order) for order in range(5)], waiting(1, 5)

    def admit(request: Request) -> None:
        queue.dequeue(request)
        queue.note_admission(request)

    for request in (*flood, other):
        queue.enqueue(request)
    assert queue.visible == [flood[0], other]
    admit(flood[0])
    assert queue.visible == [other]
    admit(other)
    assert queue.visible == flood[1:]  # while its first chunk is computed
    other.allocation = SimpleNamespace()
    queue.enqueue(other)
    assert queue.visible == [other]
    queue.dequeue(other)
    assert queue.visible == flood[1:]


def test_systems_know_that_several_keys_ask_also_while_one_waits() -> None:
    queue = WaitingQueue()
    queue.enqueue(waiting(0, 0))
    queue.enqueue(waiting(0, 1))
    assert not queue.table().shared
    other = waiting(1, 2)
    queue.enqueue(other)
    queue.dequeue(other)
    assert queue.table().shared
