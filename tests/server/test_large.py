"""Bodies that would hold others up are refused before anything is made of them."""

import http.client
import json
import os
import select
from pathlib import Path

import pytest

from ..hardening.footprint import rss
from .serving import PATIENCE, children, stopped, wait_for
from .test_lifecycle import Stream

JSON = "application/json"
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


LOOP_SECONDS = 1.0
"""The event loop's thread computes for less than this a body: 0.03 to 0.07 s, most of it to receive
it; whole on the loop, such a body took 5 s."""


def checker_of(served):
    """The process that checks bodies, once there is one."""
    small = {"prompt": [5], "max_tokens": 1, "metadata": {"a": "x" * 70_000}}
    assert served.request("/v1/completions", small)[0] == 200
    for zygote in children(served.process.pid):
        if b"body_check_worker" in Path(f"/proc/{zygote}/cmdline").read_bytes():
            [worker] = children(zygote)
            return worker
    raise AssertionError("large bodies are checked in no other process")


def loop_seconds(served):
    """The seconds for which the thread of the server's event loop has computed."""
    pid = served.process.pid
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", BODIES)
def test_a_large_body_is_refused_while_a_stream_goes_on(tiny, kind):
    """The process that checks it stands still: it waits, and nobody else does."""
    checker, stream, address = checker_of(tiny), Stream(tiny), tiny.base.removeprefix("http://")
    asking = http.client.HTTPConnection(address, timeout=PATIENCE)
    with stopped(checker):
        before = loop_seconds(tiny)
        asking.request("POST", "/v1/completions", BODIES[kind], {"Content-Type": JSON})
        for _ in range(50):
            stream.next_token()
        assert tiny.request("/health")[0] == 200
        assert not select.select([asking.sock], [], [], 0)[0], "it was checked elsewhere"
    answer = asking.getresponse()
    assert answer.status in (400, 413)
    assert json.loads(answer.read())["error"]["message"]
    assert loop_seconds(tiny) - before < LOOP_SECONDS
    stream.close()
    asking.close()


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
    wait_for(lambda: rss(pid) < 1.25 * resting)  # it was 1.6 times as much


def test_a_conversation_is_bounded_as_a_whole(textual):
    turns = [{"role": "user", "content": "a" * 9000}] * (8 * MIB // 9000)
    for path, told in (
        ("/v1/chat/completions", "has at least"),  # it was not tokenised
        ("/tokenize", " are tokenised"),
    ):
        body = json.dumps({"messages": turns}).encode()
        status, _, answer = textual.request(path, data=body)
        assert status == 400
        assert answer["error"]["param"] == "messages"
        assert told in answer["error"]["message"]


def test_a_long_text_for_tokenize_is_refused(textual):
    status, _, answer = textual.request("/tokenize", {"prompt": "a b" * (5 * MIB)})
    assert (status, answer["error"]["param"]) == (400, "prompt")
