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
from twolane.frontend.text.template import TemplateForm
from twolane.model.load.hub import ModelSource, cache_dir

log = logging.getLogger("twolane.frontend")

_FORMAT = 4
"""The version of `TokenizerFile` and of how it is made; files of others are made anew."""
_READ_BY = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")
"""The files of a model directory that a tokenizer may be made of."""


class Declared(msgspec.Struct, frozen=True):
    """A special token, and the place that declares what it is for."""

    id: int
    token: str
    source: str


class TokenizerFile(msgspec.Struct, frozen=True, kw_only=True):
    """A converted tokenizer, as `convert` writes it."""

    backend: str | None
    """JSON of `tokenizers`; None: the model's file says that it has no tokenizer."""
    origin: str
    """The file that the tokens come from."""
    chat_template: str | None = None
    form: TemplateForm | None = None
    """How the template reads messages, if there is a template that works."""
    special_tokens: dict[str, str] = {}
    """By name ("bos_token", ...), as chat templates know them."""
    bos: Declared | None = None
    """The token that is put before every text."""
    ends: list[Declared] = []
    """The tokens that end an answer, beside those of the model's config."""
    notes: list[str] = []
    """What disagrees among the model's files, one sentence each."""


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer of a model, with its chat template."""

    backend: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    form: TemplateForm | None = None
    ends: tuple[int, ...] = ()
    """The tokens that end an answer, beside those of the model's config."""


def load_tokenizer(source: ModelSource) -> ModelTokenizer:
    """Load the tokenizer of a model.

    Raises:
        ValueError: the model has no tokenizer, or not one that can be read.
    """
    made = _load(source)[1]
    if made is None:
        raise ValueError(f"{source.name} has no tokenizer")
    return made


def load_if_any(source: ModelSource) -> ModelTokenizer | None:
    """Load the tokenizer of a model, and log what disagrees among its files.

    Raises:
        ValueError: it cannot be read.
    """
    if source.tokenizer is None:
        return None
    file, made = _load(source)
    for note in file.notes:
        log.warning("%s: %s", source.name, note)
    return made


def load_file(source: ModelSource) -> TokenizerFile:
    """Return the converted tokenizer of a model.

    Raises:
        ValueError: the model has no tokenizer, or not one that can be read.
    """
    return _load(source)[0]


def _load(source: ModelSource) -> tuple[TokenizerFile, ModelTokenizer | None]:
    """Load a tokenizer from the cache, or convert it.

    It is converted by a short-lived process the first time: reading it needs libraries that no
    process that serves should import.
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


def _read(data: bytes) -> tuple[TokenizerFile, ModelTokenizer | None]:
    """Make a tokenizer of what `convert` wrote.

    Raises:
        ValueError: it is damaged.
    """
    file = msgspec.json.decode(data, type=TokenizerFile)
    if file.backend is None:
        return file, None
    try:
        backend = Tokenizer.from_str(file.backend)
    except Exception as error:  # the library has no type of its own for it
        raise ValueError(f"no tokenizer: {error}") from error
    ends = tuple(end.id for end in file.ends)
    made = ModelTokenizer(backend, file.chat_template, file.special_tokens, file.form, ends)
    return file, made


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
