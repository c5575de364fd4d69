"""Other streams go on while clients send grammars that are made to take long."""

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from ..hardening.hostile_grammars import HOSTILE, gaps_until, send_all
from .parrot import TEMPLATE, write_parrot
from .serving import PATIENCE, children, serving

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


def send(client, grammars):
    """Have a thread send grammars; return how each request has ended so far, and what waits for
    all of them."""
    outcomes = []
    args = client, "parrot", outcomes, threading.Event(), grammars
    sending = threading.Thread(target=send_all, args=args)
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


def no_more():
    """What ends a stream at its 300th token."""
    ended = threading.Event()
    ended.set()
    return ended


def test_a_stream_goes_on_while_a_grammar_is_made(server, client):
    """However long that takes: here, longer than the stream."""
    _, all_of_them = send(client, HOSTILE[:1])
    all_of_them()
    group = maker(server)
    with held(group):
        outcomes, all_of_them = send(client, HOSTILE[:1])
        assert len(gaps_until(client, "parrot", no_more())) == 300
        assert not outcomes
    all_of_them()


def test_hostile_grammars_are_refused_or_served_and_not_made_in_the_api_process(client):
    _, all_of_them = send(client, HOSTILE)
    gaps_until(client, "parrot", no_more())
    outcomes = all_of_them()
    assert set(outcomes) <= {200, 400}
    assert {outcomes[1], outcomes[3]} == {400}
