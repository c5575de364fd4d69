"""Tokenizers and chat templates in serving format. No torch, no `transformers`."""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from twolane.common.files import keep, kept
from twolane.frontend.text.template_form import TemplateForm
from twolane.model.load.hub import ModelSource, cache_dir

_FORMAT = 17
"""Version of `TokenizerFile` and of its conversion; files of other versions are converted again."""
_MAX_METADATA = 64 << 20
"""Bytes at a file's beginning that the tokenizer is in: weights follow it in a GGUF file."""
_READ_BY = ("*.json", "*.model", "*.jinja", "*.txt", "*.py", "additional_chat_templates/*.jinja")
"""Files of a model directory that a tokenizer may consist of."""


class Declared(msgspec.Struct, frozen=True):
    """A special token, and the file and key that declare its role."""

    id: int
    token: str
    source: str


class TokenizerFile(msgspec.Struct, frozen=True, kw_only=True):
    """A converted tokenizer, as `convert` writes it."""

    backend: str | None
    """JSON of the library `tokenizers`; None: the model's file states that it has none."""
    origin: str
    """File of the tokens."""
    chat_template: str | None = None
    template_source: str | None = None
    """File of the template."""
    form: TemplateForm | None = None
    """Format in which the template reads messages, if there is one that works."""
    tool_template: str | None = None
    """Template of conversations with tools, where the model has a separate one."""
    tool_form: TemplateForm | None = None
    special_tokens: dict[str, str] = {}
    """Special tokens by their names in chat templates ("bos_token", ...)."""
    longest: int | None = None
    """A token takes at most this many characters; None: as many as the text has."""
    bos: Declared | None = None
    """Token before every text."""
    ends: list[Declared] = []
    """Tokens that end an answer, besides those of the model's config; each may be declared in
    several places."""
    notes: list[str] = []
    """Contradictions among the model's files, one sentence each."""


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer of a model, with its chat template."""

    backend: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    form: TemplateForm | None = None
    tool_template: str | None = None
    tool_form: TemplateForm | None = None
    ends: tuple[int, ...] = ()
    """Tokens that end an answer, besides those of the model's config."""
    longest: int | None = None
    """A token takes at most this many characters; None: as many as the text has."""
    json: str | None = None
    """Complete tokenizer as JSON, where `backend` only decodes."""

    @property
    def tools_form(self) -> TemplateForm | None:
        """Format in which the template for conversations with tools reads messages, if there is one
        that works."""
        return self.form if self.tool_template is None else self.tool_form


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Convert panics of the tokenizers library, which are no `Exception`, to errors.

    Raises:
        ValueError: there was one.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"the tokenizers library failed: {error}") from error
        raise


def load_tokenizer(source: ModelSource) -> ModelTokenizer:
    """Load the tokenizer of a model.

    Raises:
        ValueError: the model has no tokenizer, or not one that can be read.
    """
    tokenizer = load_both(source)[1]
    if tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer")
    return tokenizer


def load_file(source: ModelSource) -> TokenizerFile:
    """Return the converted tokenizer of a model.

    Raises:
        ValueError: the model has no tokenizer, or not one that can be read.
    """
    return load_both(source)[0]


def add_note(source: ModelSource, note: str) -> None:
    """Store a note about a model's tokenizer, which every server that loads it logs."""
    file = load_file(source)
    if source.tokenizer is not None and note not in file.notes:
        noted = msgspec.structs.replace(file, notes=[*file.notes, note])
        keep(_file(source), msgspec.json.encode(noted))


def load_both(source: ModelSource) -> tuple[TokenizerFile, ModelTokenizer | None]:
    """Load a tokenizer from the cache, or convert it; None: the model's file states that it has
    none.

    It is converted by a short-lived process the first time: reading it needs libraries that no
    process that serves should import.

    Raises:
        ValueError: the model has no tokenizer, or not one that can be read.
    """
    if source.tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer")
    return read_file(kept(_file(source), partial(_convert, source)))


def read_file(
    data: bytes, *, decodes_only: bool = False
) -> tuple[TokenizerFile, ModelTokenizer | None]:
    """Return a tokenizer from a file of `convert`.

    Args:
        data: output of `convert`.
        decodes_only: true if the tokenizer's `backend` need not encode, which takes longer to load.

    Raises:
        ValueError: it is damaged.
    """
    file = msgspec.json.decode(data, type=TokenizerFile)
    if file.backend is None:
        return file, None
    try:
        with tokenizer_errors():
            backend = Tokenizer.from_str(decoding(file.backend) if decodes_only else file.backend)
    except Exception as error:  # the library has no type of its own for it
        raise ValueError(f"no tokenizer: {error}") from error
    ends = tuple(dict.fromkeys(end.id for end in file.ends))
    templates = file.form, file.tool_template, file.tool_form
    tokenizer = ModelTokenizer(
        backend,
        file.chat_template,
        file.special_tokens,
        *templates,
        ends,
        file.longest,
        file.backend if decodes_only else None,
    )
    return file, tokenizer


class _TokenizerModel(msgspec.Struct):
    """Fields of a tokenizer's model that decoding needs."""

    vocab: msgspec.Raw
    """Ids by piece, or for unigram models a list of pieces with their scores."""


class _Decoding(msgspec.Struct):
    """Fields of `tokenizer.json` that decoding needs."""

    model: _TokenizerModel
    decoder: msgspec.Raw
    normalizer: msgspec.Raw
    """Normaliser, since added tokens may be looked up by their normalised text."""
    added_tokens: msgspec.Raw


def decoding(backend: str) -> str:
    """Return a tokenizer with the same tokens and decoder, which loads in half the time.

    Args:
        backend: a `tokenizer.json`.

    Raises:
        ValueError: it is none.
    """
    form = msgspec.json.decode(backend, type=_Decoding)
    if not bytes(form.model.vocab).startswith(b"{"):
        return backend
    nothing = dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor"))
    words = {"type": "WordLevel", "vocab": form.model.vocab, "unk_token": ""}
    needed = {name: getattr(form, name) for name in ("added_tokens", "normalizer", "decoder")}
    return msgspec.json.encode({"version": "1.0", **nothing, **needed, "model": words}).decode()


def _file(source: ModelSource) -> Path:
    return cache_dir() / "tokenizers" / f"{_fingerprint(source)}.json"


def _read(source: ModelSource) -> list[Path]:
    """Return the paths that a tokenizer is converted from."""
    return [path for path in (source.tokenizer, source.chat_template) if path is not None]


def _fingerprint(source: ModelSource) -> str:
    """Return a fingerprint of what the tokenizer's files contain and of the code that reads
    them."""
    files = list[Path]()
    for path in _read(source):
        files += [path] if path.is_file() else sorted(f for p in _READ_BY for f in path.glob(p))
    parts = [str(_FORMAT), version("transformers"), version("tokenizers")]
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.sha256(stream.read(_MAX_METADATA)).hexdigest()
        parts.append(f"{file.resolve()} {file.stat().st_size} {digest}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _convert(source: ModelSource) -> bytes:
    with tempfile.TemporaryDirectory(prefix="twolane-") as scratch:
        made = Path(scratch) / "tokenizer.json"
        command = [sys.executable, "-m", "twolane.frontend.text.convert", str(made)]
        command += map(str, _read(source))
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            lines = run.stderr.strip().splitlines()
            raise ValueError(
                f"{source.name}: no tokenizer: {lines[-1] if lines else 'unknown reason'}"
            )
        return made.read_bytes()
