from pathlib import Path

import msgspec
import pytest

from twolane.frontend.text import convert
from twolane.frontend.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


@pytest.fixture
def converts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and conversions in this process: the program does the same."""
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))

    def converted(name: str, path: Path, _kept: Path) -> bytes:
        try:
            return msgspec.json.encode(convert.convert(path))
        except Exception as error:
            raise ValueError(f"{name}: no tokenizer: {error}") from error

    monkeypatch.setattr("twolane.frontend.text.tokenizer._convert", converted)
