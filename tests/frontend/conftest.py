from pathlib import Path

import msgspec
import pytest

from twolane.frontend.text import convert
from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import ModelSource


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


@pytest.fixture
def converts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and conversions in this process: the program does the same."""
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))

    def converted(source: ModelSource) -> bytes:
        assert source.tokenizer is not None
        try:
            return msgspec.json.encode(convert.convert(source.tokenizer))
        except Exception as error:
            raise ValueError(f"{source.name}: no tokenizer: {error}") from error

    monkeypatch.setattr("twolane.frontend.text.tokenizer._convert", converted)
