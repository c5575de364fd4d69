"""Tokenizers and chat templates, in the form that serving needs. No torch, no `transformers`."""

import hashlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from twolane.common.files import keep
from twolane.model.load.hub import ModelSource, cache_dir

log = logging.getLogger("twolane.frontend")

_FORMAT = 3
"""Version of `TokenizerFile` and of how it is made; files of another version are made anew."""
_READ_BY = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")
"""The files of a model directory that a tokenizer may be made of."""


class TokenizerFile(msgspec.Struct, frozen=True):
    """A converted tokenizer, as `convert` writes it."""

    backend: str
    """JSON of `tokenizers`."""
    chat_template: str | None
    special_tokens: dict[str, str]
    """By name ("bos_token", ...), as chat templates know them."""


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer of a model, with its chat template."""

    backend: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]


def load_tokenizer(source: ModelSource) -> ModelTokenizer:
    """The tokenizer of a model.

    It is converted by a short-lived process the first time, and kept in the cache: `transformers`
    reads every kind of tokenizer, but imports PyTorch.

    Raises:
        ValueError: the model has no tokenizer, or not one that `transformers` can read.
    """
    if source.tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer")
    kept = cache_dir() / "tokenizers" / f"{_fingerprint(source.tokenizer)}.json"
    try:
        return _read(kept.read_bytes())
    except OSError:
        pass
    except ValueError as error:
        log.warning("%s is damaged and is made anew: %s", kept, error)
    return _read(_convert(source.name, source.tokenizer, kept))


def _read(data: bytes) -> ModelTokenizer:
    """Make a tokenizer of what `convert` wrote.

    Raises:
        ValueError: it is damaged.
    """
    file = msgspec.json.decode(data, type=TokenizerFile)
    try:
        backend = Tokenizer.from_str(file.backend)
    except Exception as error:  # the library has no type of its own for it
        raise ValueError(f"no tokenizer: {error}") from error
    return ModelTokenizer(backend, file.chat_template, file.special_tokens)


def _fingerprint(path: Path) -> str:
    """Changes when the tokenizer's files do, or what reads them."""
    files = [path] if path.is_file() else sorted(f for p in _READ_BY for f in path.glob(p))
    parts = [str(_FORMAT), version("transformers"), version("tokenizers")]
    for file in files:
        stat = file.stat()
        parts.append(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _convert(name: str, path: Path, kept: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="twolane-") as scratch:
        made = Path(scratch) / "tokenizer.json"
        command = [sys.executable, "-m", "twolane.frontend.text.convert", str(path), str(made)]
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            said = run.stderr.strip().splitlines()
            raise ValueError(f"{name}: no tokenizer: {said[-1] if said else 'unknown reason'}")
        data = made.read_bytes()
    keep(kept, data)
    return data
