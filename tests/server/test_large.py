"""Bodies that would hold others up are refused before anything is made of them."""

import json
import threading
import time
from itertools import pairwise

import pytest

from .test_lifecycle import LONG, Stream

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


@pytest.mark.parametrize("kind", BODIES)
def test_a_large_body_is_refused_while_a_stream_goes_on(tiny, kind):
    at, over = [], threading.Event()
    stream = Stream(tiny, LONG)

    def read():
        for _ in stream.events():
            at.append(time.monotonic())
            if over.is_set():
                return

    reading = threading.Thread(target=read)
    reading.start()
    while len(at) < 20:
        time.sleep(0.01)
    sent = time.monotonic()
    status, _, body = tiny.request("/v1/completions", data=BODIES[kind])
    answered = time.monotonic()
    over.set()
    reading.join()
    stream.close()
    assert status in (400, 413)
    assert body["error"]["message"]
    before = [b - a for a, b in pairwise(at) if b <= sent]
    during = [b - a for a, b in pairwise(at) if b > sent and a < answered]
    # Far from the five seconds and more of a body that is parsed whole, on a noisy machine.
    assert max(during) < max(2.5, 4 * max(before))


def test_what_one_answer_holds_in_memory_is_bounded(tiny):
    prompts = [[5] * 900 for _ in range(128)]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20}
    status, _, answer = tiny.request("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
    body = {"prompt": [5], "max_tokens": 60_000, "logprobs": 5, "n": 128}
    status, _, answer = tiny.request("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


def test_a_conversation_is_bounded_as_a_whole(textual):
    turns = [{"role": "user", "content": "a" * 900}] * (16 * MIB // 950)
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
