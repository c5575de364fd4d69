"""Servers of checkpoints whose own programs have no end or panic."""

import json
import os
import signal
import threading
import time
from contextlib import suppress

import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from .serving import PATIENCE, alive, children, serving, wait_for, write_tiny_model

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
ARGUMENTS = ("--load-format", "dummy", "--kv-tokens", "70000")
IMPATIENT = """
import sys
from twolane.frontend import sandboxed

within = sandboxed.within
sandboxed.within = lambda seconds, work: within(min(seconds, 1.5), work)
if sys.orig_argv[1:4] == ["-m", "twolane", "serve"]:
    from twolane.frontend import sandbox
    from twolane.frontend.text import texts

    sandbox.RAN_SHARE = 0.0
    texts.Texts.load.__func__.__defaults__ = (texts.Limits(seconds=1.5),)
"""
"""Has a server end a checkpoint's programs soon, at its start and when they are asked for.

It blames them also where other tests leave them little of the processor.
"""


def model(path, tokenizer, template, **changes):
    """Write a tiny model with a tokenizer, some parts of which are changed, and a template."""
    write_tiny_model(path, vocab_size=49152)
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    for name, part in changes.items():
        setattr(backend, name, part)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


def test_a_template_without_an_end_holds_nobody_up_but_its_caller(tmp_path, tokenizer):
    path = model(tmp_path / "endless", tokenizer, ENDLESS + "{{ messages[0].content }}")
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
    before = ("env", f"PYTHONPATH={tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with serving(path, *ARGUMENTS, before=before) as served:
        began = time.monotonic()
        status, _, body = served.request("/v1/chat/completions", HELLO)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert "did not end within 1.5 s" in body["error"]["message"]
        assert time.monotonic() - began < PATIENCE
        assert served.request("/v1/completions", {"prompt": "Hello", "max_tokens": 1})[0] == 200
        # While it is at it again, signals are obeyed.
        asking = threading.Thread(target=ask_and_be_left, args=[served])
        asking.start()
        wait_for(lambda: served.metrics()["requests_in_flight"])
        started = children(served.process.pid)
        served.process.send_signal(signal.SIGTERM)
        with suppress(OSError):  # the template was ended first, and then the server
            wait_for(lambda: served.request("/health")[0] == 503)
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(PATIENCE)
        asking.join()
        wait_for(lambda: not any(map(alive, started)))


def ask_and_be_left(served):
    with suppress(OSError):  # the server has stopped
        served.request("/v1/chat/completions", HELLO)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_panic_of_the_tokenizers_library_is_an_error_in_openais_form(panicking, path):
    status, _, body = panicking.request(path, {"prompt": "a" * 60 + "b"})
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert "tokenizer" in body["error"]["message"]
    assert panicking.request(path, {"prompt": "b"})[0] == 200


@pytest.fixture(scope="module")
def panicking(tmp_path_factory, tokenizer):
    splitting = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    parts = pre_tokenizers.Sequence([splitting, tokenizer.backend.pre_tokenizer])
    path = tmp_path_factory.mktemp("panicking") / "model"
    # The library's Strip panics when nothing is left of a token: here of that named "Q".
    steps = [decoders.Replace("Q", ""), decoders.Strip("~", 0, 1), tokenizer.backend.decoder]
    changes = {"pre_tokenizer": parts, "decoder": decoders.Sequence(steps)}
    with serving(model(path, tokenizer, "", **changes), *ARGUMENTS) as served:
        yield served


def answered(token, **more):
    """Ask for three tokens, all of them this one."""
    bias = {"logit_bias": {str(token): 100}, "ignore_eos": True}
    return {"prompt": [11], "max_tokens": 3, "temperature": 0, **bias, **more}


def test_a_panic_while_an_answer_is_decoded_ends_that_answer_alone(panicking, tokenizer):
    bad, good = (tokenizer.backend.token_to_id(name) for name in "QB")
    path, before = "/v1/completions", panicking.metrics()
    status, _, body = panicking.request(path, answered(bad))
    assert (status, body["error"]["code"]) == (500, "model_error")
    assert "tokenizer failed" in body["error"]["message"]
    status, _, events = panicking.request(path, answered(bad, stream=True))
    assert status == 500 or '"model_error"' in events
    status, _, body = panicking.request(path, answered(good, prompt=[bad], echo=True))
    assert (status, body["error"]["code"]) == (500, "model_error")
    status, _, body = panicking.request(path, answered(good))
    assert (status, body["choices"][0]["text"]) == (200, "BBB")
    wait_for(lambda: panicking.metrics()["requests_in_flight"] == 0)
    aborted = panicking.metrics()["requests_aborted_total"]
    assert aborted - before["requests_aborted_total"] == 2  # the third was never admitted
