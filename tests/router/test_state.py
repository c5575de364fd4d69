"""What a router believes of a replica's state."""

import msgspec
import pytest

from twolane.engine.kv.prefix_digest import PrefixDigest
from twolane.engine.prompt_work import PromptPace, PromptWork, WaitingPrompt
from twolane.router.state import ReplicaState, read_state

WRONG = [
    {"running": -5},
    {"waiting": 10**18},
    {"page_size": 0},
    {"queued": [1e308, 0, 0]},
    {"prompt_pace": {"token": -1e300}},
    {"prompt_pace": {"pair": 1e308}},
    {"slo": {"ttft": 1e300}},
    {"attainment": 1e300},
    {"yielding": [[1, -7, 0.0]]},
    {"yielding": [[1, 7, -1e300]]},
    {"digest": {"version": 1, "page_size": -1, "hashes": ""}},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_numbers_that_no_server_has_are_no_state(wrong: dict[str, object]) -> None:
    """Times of routes would be infinite, or the best ones of all."""
    with pytest.raises(msgspec.ValidationError):
        read_state(msgspec.json.encode(wrong))


def test_states_are_read_as_they_are_told() -> None:
    waiting = [WaitingPrompt(512, 16, -3.0)]
    digest = PrefixDigest(1, 16, b"12345678")
    pace, work = PromptPace(0.1, 1e-4, 1e-9), PromptWork(-1e-9, 700.0, 1e9)
    state = ReplicaState(
        running=3, queued=work, prompt_pace=pace, yielding=waiting, digest=digest, attainment=1.0
    )
    assert read_state(msgspec.json.encode(state)) == state
    assert read_state(b"{}") == ReplicaState()
