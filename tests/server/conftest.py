import json
import os

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.kernels.cpu.availability import available
from twolane.model.load.hub import resolve

from .serving import serving, write_tiny_model

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(resolve(MODEL))


@pytest.fixture(scope="session")
def real():
    """A server of the real model, shared by all tests that only ask. Its answers do not depend on
    what runs beside them: compiled layers promise it, and float32 keeps it in practice."""
    compiled = available() and "TWOLANE_TEST_SERVE" not in os.environ  # which may be for a GPU
    exact = () if compiled else ("--dtype", "float32")
    with serving(MODEL, *exact, "--kv-tokens", "20000", "--allow-priority") as served:
        yield served


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


TEMPLATE = """{% for m in messages %}{{ m.name + ': ' if m.name }}{{ m.content }}
{% endfor %}{{ 'Think! ' if enable_thinking }}"""


@pytest.fixture(scope="session")
def textual(tmp_path_factory, tokenizer):
    """A server of random weights that runs one request at a time. Its tokenizer puts a token in
    front of every text; its template shows names and has a variable."""
    path = write_tiny_model(tmp_path_factory.mktemp("textual"), vocab_size=49152)
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    begin = "<|im_start|>"
    backend.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=[(begin, 1)])
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    args = ("--served-model-name", MODEL, "--load-format", "dummy", "--kv-tokens", "70000")
    with serving(str(path), *args, "--max-running", "1", "--allow-priority") as served:
        yield served


TINY = ("--load-format", "dummy", "--kv-tokens", "200000")
OPERATOR = "operators-key"
"""The operator's key of a guarded server."""
KEYS = ("first-key", "second-key")
MAX_BODY = 10_000
"""Bytes of a body that a guarded server takes."""
ORIGIN = "http://localhost:3000"
"""Where the pages are from that may ask a guarded server."""


@pytest.fixture(scope="session")
def guarded(tiny_model, tmp_path_factory):
    """A server with keys and bounds: one request runs, and each key may have two in the queue."""
    log = tmp_path_factory.mktemp("log") / "err"
    keys = {"TWOLANE_API_KEY": " ".join(KEYS), "TWOLANE_OPERATOR_KEY": OPERATOR}
    bounds = ("--max-body-bytes", str(MAX_BODY), "--max-running", "1", "--max-queued-per-key", "2")
    args = (*TINY, *bounds, "--cors-origins", ORIGIN, "--log-level", "debug")
    with serving(str(tiny_model), *args, stderr=log, variables=keys) as served:
        served.log = log
        yield served


@pytest.fixture(scope="session")
def tiny(tiny_model):
    """A server of random weights without a tokenizer, for all tests that leave it as it was."""
    with serving(str(tiny_model), *TINY) as served:
        yield served


@pytest.fixture
def doomed(tiny_model):
    """Such a server for one test, which may end it."""
    with serving(str(tiny_model), *TINY) as served:
        yield served
