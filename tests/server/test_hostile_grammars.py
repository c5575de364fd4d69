"""Other streams go on while clients send grammars that are made to take long."""

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from ..frontend.test_structured import chain, nested
from .parrot import TEMPLATE, write_parrot
from .serving import PATIENCE, children, serving

TOOL = {"name": "f", "parameters": {"properties": {f"p{i}": nested(10) for i in range(300)}}}
NUMBERS = {f"p{i}": {"type": "number"} for i in range(3_000)}
MANY = [{"properties": {f"a{i}": {"const": i}}} for i in range(600)]
HOSTILE = (
    {"json": {"properties": NUMBERS}},
    {"json": {"anyOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(2_000)]}},
    {"json": {"enum": [f"v{i}" for i in range(30_000)]}},
    {"json": chain(3_000)},
    {"regex": "|".join(f"w{i}x*" for i in range(10_000))},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"grammar": 'start: start start | "a" | '},
    {"json": {"items": {"properties": dict([*NUMBERS.items()][:400])}, "minItems": 9}},
    {"json": {"properties": {"k": {"anyOf": MANY}}, "required": ["k"]}},  # slow in the middle
    {"grammar": "start: s\ns: s s | /./"},  # slower with each token
)

MAKES_NONE = """
import sys
if sys.orig_argv[1:4] == ["-m", "twolane", "serve"]:
    import llguidance

    llguidance.LLMatcher = llguidance.LLTokenizer = None
"""
"""Makes requests fail in an API process that makes or tries their grammars itself."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "sitecustomize.py").write_text(MAKES_NONE)
    before = ("env", f"PYTHONPATH={folder}:{os.environ.get('PYTHONPATH', '')}")
    made = str(write_parrot(folder / "model", (), TEMPLATE))
    args = (made, "--served-model-name", "parrot", "--kv-tokens", "40000")
    with serving(*args, before=before) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    made = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
    with made.with_options(timeout=PATIENCE) as client:
        yield client


def stream(client):
    """Read a stream of 300 tokens; return why it ended."""
    asked = {"model": "parrot", "prompt": "a", "max_tokens": 300, "stream": True}
    with client.completions.create(**asked, extra_body={"ignore_eos": True}) as events:
        return [event.choices[0].finish_reason for event in events][-1]


def send_all(client, outcomes, grammars):
    """Send a request with each grammar and one with the tool, one after the other; note how each
    ended."""
    asked = {"model": "parrot", "prompt": "a", "max_tokens": 8}
    ask = {"model": "parrot", "messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    tools = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
    for each in grammars:
        body = {"structured_outputs": each}
        outcomes.append(status(lambda b=body: client.completions.create(extra_body=b, **asked)))
    outcomes.append(status(lambda: client.chat.completions.create(**ask, **tools)))


def status(ask):
    try:
        ask()
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def send(client, grammars):
    """Have a thread send grammars; return how each request has ended so far, and what waits for
    all of them."""
    outcomes = []
    sending = threading.Thread(target=send_all, args=(client, outcomes, grammars))
    sending.start()

    def all_of_them():
        sending.join(PATIENCE)
        assert len(outcomes) == len(grammars) + 1
        return outcomes

    return outcomes, all_of_them


@contextmanager
def held(group):
    """Have all processes of a group stand still."""
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def maker(server):
    """The process that forks those that make grammars; it is started for the first one."""
    module = b"twolane.frontend.structured.worker"
    started = children(server.process.pid)
    return next(p for p in started if module in Path(f"/proc/{p}/cmdline").read_bytes())


def test_a_stream_goes_on_while_a_grammar_is_made(server, client):
    """However long that takes: here, longer than the stream."""
    _, all_of_them = send(client, HOSTILE[:1])
    all_of_them()
    group = maker(server)
    with held(group):
        outcomes, all_of_them = send(client, HOSTILE[:1])
        assert stream(client) == "length"
        assert not outcomes
    all_of_them()


def test_hostile_grammars_are_refused_or_served_and_not_made_in_the_api_process(client, request):
    full = request.config.getoption("--full")
    _, all_of_them = send(client, HOSTILE if full else HOSTILE[:4])
    assert stream(client) == "length"
    outcomes = all_of_them()
    assert set(outcomes) <= {200, 400}
    assert {outcomes[1], outcomes[3]} == {400}
