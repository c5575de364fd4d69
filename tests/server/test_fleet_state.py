"""What a server publishes for a router."""

import msgspec

from twolane.engine.kv.prefix_digest import Landmarks
from twolane.engine.prompt_work import PromptWork
from twolane.router.state import ReplicaState

from .serving import wait_for

PROMPT = [3 + i % 97 for i in range(700)]


def state(served, known=-1) -> ReplicaState:
    status, _, body = served.request(f"/fleet/state?known={known}")
    assert status == 200
    return msgspec.convert(body, ReplicaState)


def test_what_a_server_has_computed_is_in_its_digest(tiny):
    asked = {"prompt": PROMPT, "max_tokens": 2}
    status, _, found = tiny.request("/fleet/landmarks/completions", asked)
    assert status == 200
    page_size = state(tiny).page_size
    expected = Landmarks.of(PROMPT, page_size)
    hashes = found.pop("hashes")
    assert found == {
        "prompt_tokens": len(PROMPT),
        "page_size": page_size,
        "tokens": list(expected.tokens),
        "token_ids": None,
        "states": False,
    }
    assert tiny.request("/v1/completions", asked)[0] == 200
    wait_for(lambda: set(hashes) <= state(tiny).digest.as_set())
    # Who sees them cannot compute those of a guessed prompt.
    assert not set(expected.hashes) & state(tiny).digest.as_set()
    salted = tiny.request("/fleet/landmarks/completions", {**asked, "cache_salt": "x"})[2]
    assert not set(salted["hashes"]) & state(tiny).digest.as_set()


def test_the_digest_is_left_out_for_who_has_it(tiny):
    version = wait_for(lambda: stable(tiny))
    assert state(tiny, version).digest is None
    assert state(tiny, version + 1).digest is not None


def stable(served) -> int | None:
    """The digest's version, when nothing changes it any more; it is positive."""
    first = state(served)
    return first.digest.version if state(served).digest == first.digest else None


def test_a_conversations_landmarks_are_those_of_its_prompt(real):
    body = {"messages": [{"role": "user", "content": "What is the capital of France? " * 9}]}
    status, _, found = real.request("/fleet/landmarks/chat", body)
    assert status == 200
    ids = real.request("/tokenize", body)[2]["tokens"]
    shown = real.request("/fleet/landmarks/chat?token_ids=true", body)[2]
    assert shown == {**found, "token_ids": ids}
    expected = Landmarks.of(ids, found["page_size"])
    assert found["prompt_tokens"] == len(ids)
    assert found["tokens"] == list(expected.tokens)
    assert len(found["hashes"]) == len(expected.hashes)


def test_an_idle_server_says_so(tiny):
    told = wait_for(lambda: (s := state(tiny)).running + s.waiting == 0 and s)
    assert told.ready and not told.draining
    assert told.queued.tokens == 0
    assert 0 < told.pages_free <= told.pages
    assert told.prompt_pace.seconds(PromptWork.of(100, 0)) >= 0
