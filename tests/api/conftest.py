import pytest

from twolane.model.hub import resolve
from twolane.model.tokenizer import load_tokenizer

from .serving import serving, write_tiny_model

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(resolve(MODEL))


@pytest.fixture(scope="session")
def real():
    """A server of the real model, shared by all tests that only ask."""
    with serving(MODEL, "--kv-tokens", "20000") as served:
        yield served


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(tiny_model):
    """A server of random weights without a tokenizer, for one test alone."""
    with serving(str(tiny_model), "--load-format", "dummy", "--kv-tokens", "200000") as served:
        yield served
