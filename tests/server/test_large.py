"""Bodies that would hold others up are refused before anything is made of them."""

import json
import time
from itertools import pairwise

import pytest

from ..hardening.footprint import rss
from ..hardening.stalls import Watcher, longest
from .serving import wait_for

MIB = 1 << 20


def filled(opening, unit, closing, size=31 * MIB):
    return opening + unit * ((size - len(opening) - len(closing)) // len(unit)) + closing


BODIES = {
    "prompts": filled(b'{"max_tokens":1,"prompt":[', b"[0],", b"[0]]}"),
    "ids": filled(b'{"max_tokens":1,"prompt":[', b"0,", b"0]}"),
    "unknown field": filled(b'{"prompt":[5],"x":[', b"{},", b"{}]}"),
    "metadata": filled(b'{"prompt":[5],"metadata":{"a":[', b'"a",', b'"a"]}}'),
    "stop": filled(b'{"prompt":[5],"stop":[', b'"a",', b'"a"]}'),
    "logit_bias": filled(b'{"prompt":[5],"logit_bias":{', b'"1":1,', b'"2":1}}'),
    "brackets": filled(b'{"prompt":', b"[", b"]}"),
    "text": filled(b'{"max_tokens":1,"prompt":"', b"a b", b'"}'),
    "bad UTF-8": filled(b'{"prompt":"', b"\xff\xfe", b'"}'),
}


def watch(tiny, kinds):
    """What becomes of these bodies, and the longest gaps of another client meanwhile."""
    stream, health = Watcher(tiny.base, "stream"), Watcher(tiny.base, "health")
    time.sleep(2.0)
    answers, at = {}, [time.monotonic()]
    for kind in kinds:
        answers[kind] = tiny.request("/v1/completions", data=BODIES[kind])
        at.append(time.monotonic())
    time.sleep(2.0)
    gaps = stream.close() + health.close()
    calm = max(longest(gaps, 0, at[0]), longest(gaps, at[-1], at[-1] + 99))
    during = [longest(gaps, begin, end) for begin, end in pairwise(at)]
    # 0.03 to 0.15 s here, alone; whole on the loop, such a body took 5 s.
    held_up = {kind for kind, gap in zip(kinds, during, strict=True) if gap >= max(1.0, 3 * calm)}
    return answers, held_up


@pytest.fixture(scope="module")
def watched(tiny):
    """What became of every kind of body, and those that held another client up whenever they were
    sent: on a busy machine any of them may seem to do so once."""
    tiny.request("/v1/completions", data=BODIES["bad UTF-8"])  # the judge starts
    answers, held_up = watch(tiny, [*BODIES])
    for _ in range(2):
        if held_up:
            _, held_up = watch(tiny, sorted(held_up))
    return answers, held_up


@pytest.mark.parametrize("kind", BODIES)
def test_a_large_body_is_refused_while_a_stream_goes_on(watched, kind):
    answers, held_up = watched
    status, _, body = answers[kind]
    assert status in (400, 413)
    assert body["error"]["message"]
    assert kind not in held_up


def test_a_large_body_that_is_good_is_served(tiny):
    body = {"prompt": [5] * 40, "max_tokens": 1, "metadata": {"a": "x" * 70_000}}
    status, _, answer = tiny.request("/v1/completions", body)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 40)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("prompt", [5] * 40_000 + ["a"], "prompt"),
        ("prompt", [[5]] * 40_000, None),
        ("logit_bias", {str(token): 1 for token in range(40_000)}, None),
        ("metadata", {"a": [{}] * 40_000}, None),
        ("nonsense", "x" * 70_000, "nonsense"),
        ("metadata", {"a": "x" * (17 << 20)}, None),
    ],
)
def test_a_large_body_is_refused_by_name_or_for_its_size(tiny, field, value, named):
    body = {"prompt": [5], "max_tokens": 1, field: value}
    status, _, answer = tiny.request("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400 if named else 413, named)


def test_what_one_answer_holds_in_memory_is_bounded(tiny):
    prompts = [[5] * 900 for _ in range(128)]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20}
    status, _, answer = tiny.request("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
    body = {"prompt": [5], "max_tokens": 60_000, "logprobs": 5, "n": 128}
    status, _, answer = tiny.request("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


def test_the_memory_of_a_large_answer_is_given_back(tiny):
    pid, scored = tiny.process.pid, {"prompt": [[5] * 500] * 16, "prompt_logprobs": 20}
    resting = rss(pid)
    for _ in range(2):
        status, _, answer = tiny.request("/v1/completions", {**scored, "max_tokens": 4})
        assert status == 200
        assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [500] * 16
    wait_for(lambda: rss(pid) < 1.25 * resting, seconds=60)  # it was 1.6 times as much


def test_a_conversation_is_bounded_as_a_whole(textual):
    turns = [{"role": "user", "content": "a" * 9000}] * (8 * MIB // 9000)
    for path in ("/v1/chat/completions", "/tokenize"):
        body = json.dumps({"messages": turns}).encode()
        began = time.monotonic()
        status, _, answer = textual.request(path, data=body)
        assert status == 400
        assert answer["error"]["param"] == "messages"
        assert time.monotonic() - began < 10


def test_a_long_text_for_tokenize_is_refused(textual):
    status, _, answer = textual.request("/tokenize", {"prompt": "a b" * (5 * MIB)})
    assert (status, answer["error"]["param"]) == (400, "prompt")
