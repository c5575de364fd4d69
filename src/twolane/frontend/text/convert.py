"""Converts a model's tokenizer to one file; runs as a separate program.

`tokenizer.json` is the truth for tokens, normalisation, splitting and decoding. `transformers`
rebuilds some tokenizers from the name of a class: it is asked for formats that only it reads, and
by `twolane doctor` for its opinion. It takes seconds to import and brings PyTorch with it, so no
process that serves should: `load_both` runs
`python -m twolane.frontend.text.convert TARGET SOURCE [CHAT_TEMPLATE]`.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateSyntaxError
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from twolane.common.checked_json import read_json
from twolane.frontend.sandboxed import SETUP_MEMORY, TookTooLong, limit_memory, within
from twolane.frontend.text.decoder_regexes import check_decoder
from twolane.frontend.text.parts import Parts, Template
from twolane.frontend.text.template import ChatTemplate
from twolane.frontend.text.template_form import TemplateForm
from twolane.frontend.text.tokenizer import Declared, TokenizerFile, tokenizer_errors
from twolane.model.load.hub import TEMPLATE_FOLDER

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in files and chat templates."""
CLASS_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}
"""Special tokens of classes of `transformers`, for files that name the class and not the tokens."""
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
"""Flags of an added token: how it is matched in a text, and whether it is special."""
SENTENCEPIECE = "tokenizer.model"
"""File of a SentencePiece tokenizer, which does not state whether texts begin with the BOS."""


@tokenizer_errors()
def convert(source: Path, chat_template: Path | None = None) -> TokenizerFile:
    """Return the converted tokenizer of a directory or GGUF file.

    Args:
        source: The directory or file.
        chat_template: The file of the chat template in place of the model's own.

    Raises:
        ValueError: it is none that can be read, or the given chat template is none that works.
    """
    if source.is_dir():
        parts = from_directory(source)
    else:
        from twolane.frontend.text.gguf_tokenizer import from_gguf

        found = from_gguf(source)
        if found is None:
            return TokenizerFile(backend=None, origin=source.name)
        parts = found
    # Left over from training in many files; a prompt is neither cut nor filled up.
    parts.backend.no_truncation()
    parts.backend.no_padding()
    check_decoder(parts.backend.decoder)
    add_named_tokens(parts)
    add_extra_tokens(parts)
    bos = settle_bos(parts)
    if chat_template is not None:
        text = chat_template.read_text(encoding="utf-8")
        parts.templates = {"default": Template(text, str(chat_template))}
    template, tool_template = (parts.templates.get(name) for name in ("default", "tool_use"))
    if template is None and parts.templates:
        named = ", ".join(sorted(parts.templates))
        chat = "no chat" if tool_template is None else "no chat without tools"
        parts.notes.append(f"there is no default among the chat templates ({named}): {chat}")
    form, tool_form = form_of(template, parts), form_of(tool_template, parts)
    if chat_template is not None and form is None:
        raise ValueError(parts.notes[-1])
    ends = ends_by_name(parts)
    for each in (form, tool_form):
        if each is not None:
            ends += turn_ends(parts.backend, each.turn_end)
    return TokenizerFile(
        backend=parts.backend.to_str(),
        origin=parts.origin,
        chat_template=template and template.text,
        template_source=template and template.source,
        form=form,
        tool_template=tool_template and tool_template.text,
        tool_form=tool_form,
        special_tokens=parts.special_tokens,
        longest=longest_token(parts.backend),
        bos=bos,
        ends=list(dict.fromkeys(ends)),
        notes=parts.notes,
    )


class NamedTemplate(msgspec.Struct):
    """A chat template in a list of several."""

    name: str
    template: str


Templates = str | list[NamedTemplate] | dict[str, str] | None
"""What the field `chat_template` of a tokenizer's config may be."""


def form_of(template: Template | None, parts: Parts) -> TemplateForm | None:
    """Probe how a template reads messages; None: there is none, or it is broken."""
    if template is None:
        return None
    try:
        # Most seconds of probing how a chat template reads messages.
        form = within(10.0, lambda: ChatTemplate(template.text, parts.special_tokens).form)
        msgspec.json.encode(form)  # a template may write halves of characters
        return form
    except TemplateSyntaxError as error:
        parts.notes.append(f"the chat template in {template.source} is broken: {error}")
    except (TookTooLong, RecursionError, MemoryError, UnicodeEncodeError) as error:
        problem = f"the chat template in {template.source} cannot be run: {type(error).__name__}"
        parts.notes.append(problem)
    return None


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the most characters of a token; None: unbounded.

    The text that a token stands for may be longer than its name only where something is dropped
    on the way: by a normaliser, or by tokens that take the spaces around them.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.normalizer is not None or any(t.lstrip or t.rstrip for t in added):
        return None
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=None)


def from_directory(source: Path) -> Parts:
    """Read the files of a model directory.

    Raises:
        ValueError: there is no tokenizer among them that can be read.
    """
    config = optional_json(source / "tokenizer_config.json")
    named = optional_json(source / "special_tokens_map.json")
    declared = declared_tokens(source, config)
    backend, origin = read_backend(source, config, declared)
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if origin == SENTENCEPIECE and not kind:
        kind = "LlamaTokenizer"
    # As in `transformers`, the map is of an older form, and holds where nothing is of the newer.
    first, second = (config, named) if "added_tokens_decoder" in config else (named, config)
    special_tokens = {}
    for name in NAMES:
        token = content(first.get(name)) or content(second.get(name))
        default = CLASS_DEFAULTS.get(kind, {}).get(name)
        if token is None and default is not None and backend.token_to_id(default) is not None:
            token = default
        if token is not None:
            special_tokens[name] = token
    begins = config.get("add_bos_token")
    if begins is None and origin == SENTENCEPIECE and kind == "LlamaTokenizer":
        begins = True  # its documented default; llama.cpp's, too
    parts = Parts(backend, origin, special_tokens, begins)
    parts.add_eos = config.get("add_eos_token")
    parts.extra_tokens = [*extra_tokens(first), *extra_tokens(second)]
    parts.templates = read_templates(source, config)
    add_declared_tokens(parts, declared)
    return parts


def extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens that a file names besides those of `NAMES`: in a list, by names of
    their own in a table, or in fields of a model's own such as `image_token`."""
    values: list[object] = []
    for name in ("extra_special_tokens", "additional_special_tokens"):
        value = config.get(name)
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
    values += [v for name, v in config.items() if name.endswith("_token") and name not in NAMES]
    return [token for token in map(content, values) if token is not None]


def declared_tokens(source: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the tokens that other files add to the tokenizer, by id.

    As in `transformers`, `added_tokens.json` counts without an `added_tokens_decoder` alone.
    """
    if "added_tokens_decoder" in config:
        declared = config["added_tokens_decoder"] or {}
        return {int(place): entry for place, entry in declared.items()}
    added = optional_json(source / "added_tokens.json")
    return {int(place): {"content": token} for token, place in added.items()}


def read_backend(
    source: Path, config: Mapping[str, Any], declared: Mapping[int, Mapping[str, Any]]
) -> tuple[Tokenizer, str]:
    """Read the tokenizer of a directory; return it with the name of its file.

    Args:
        source: the directory.
        config: the content of `tokenizer_config.json`.
        declared: see `declared_tokens`; those of SentencePiece's ids take the place of its pieces.

    Raises:
        ValueError: no file can be read.
    """
    if (source / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(source / "tokenizer.json")), "tokenizer.json"
    if (source / SENTENCEPIECE).is_file():
        from twolane.frontend.text.sentencepiece import read_model

        legacy = config.get("legacy") is not False
        names = {place: content(entry) for place, entry in declared.items()}
        return read_model(source / SENTENCEPIECE, names, legacy=legacy), SENTENCEPIECE
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        there = "tekken.json is not read" if (source / "tekken.json").is_file() else error
        raise ValueError(f"there is no tokenizer.json beside the weights: {there}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("its tokenizer has no fast form")
    return tokenizer.backend_tokenizer, "vocab.json"


def read_templates(source: Path, config: Mapping[str, Any]) -> dict[str, Template]:
    """Read the chat templates of a directory, by name; its template files come first.

    Raises:
        ValueError: they have no such form.
    """
    try:
        given = msgspec.convert(config.get("chat_template"), Templates)
    except msgspec.ValidationError as error:
        raise ValueError(f"tokenizer_config.json: chat_template: {error}") from error
    named: dict[str, str] = {}
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        named |= {entry.name: entry.template for entry in given}
    elif given is not None:
        named |= given
    templates = {name: Template(t, "tokenizer_config.json") for name, t in named.items()}
    in_json = optional_json(source / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = Template(in_json, "chat_template.json")
    files = {"default": source / "chat_template.jinja"}
    folder = source / TEMPLATE_FOLDER
    files |= {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            where = str(file.relative_to(source))
            templates[name] = Template(file.read_text(encoding="utf-8"), where)
    return templates


def optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from an optional file."""
    return read_json(path) if path.is_file() else {}


def content(token: object) -> str | None:
    """Return the text of a special token, given alone or with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def add_declared_tokens(parts: Parts, declared: Mapping[int, Mapping[str, Any]]) -> None:
    """Add the declared tokens that the tokenizer lacks, where their ids fit.

    Those that it has are found in texts, and hidden, as they are declared.
    """
    backend, added = parts.backend, parts.backend.get_added_tokens_decoder()
    size, new = backend.get_vocab_size(), list[AddedToken]()
    for place, entry in sorted(declared.items()):
        token, known = content(entry), backend.token_to_id(content(entry) or "")
        if token is None:
            continue
        if known != place and (known is not None or place != size):
            there = "lacks it" if known is None else f"has {known}"
            note = f"{token!r} is declared with the id {place}, and {parts.origin} {there}"
            parts.notes.append(note)
            continue
        flags = {flag: bool(entry[flag]) for flag in FLAGS if flag in entry}
        if place in added:
            flags = {**flags_of(added[place]), **flags}
            flags["special"] |= added[place].special
            if flags == flags_of(added[place]):
                continue
        elif known is not None and not flags:
            continue  # an older file, which names pieces, too
        size += known is None
        new.append(AddedToken(token, **{"normalized": False, **flags}))
    backend.add_tokens(new)  # at once, for each time the library sorts all of them


def flags_of(token: AddedToken) -> dict[str, bool]:
    """Return the flags of an added token."""
    return {flag: getattr(token, flag) for flag in FLAGS}


def add_named_tokens(parts: Parts) -> None:
    """Mark the special tokens that files name as special where the tokenizer has them as plain
    ones."""
    added = {e.content: e for e in parts.backend.get_added_tokens_decoder().values()}
    for name, token in parts.special_tokens.items():
        if parts.backend.token_to_id(token) is None:
            parts.notes.append(f"{name} {token!r} is no token of {parts.origin}")
        elif token not in added or not added[token].special:
            flags = flags_of(added[token]) if token in added else {"normalized": False}
            parts.backend.add_special_tokens([AddedToken(token, **{**flags, "special": True})])


def add_extra_tokens(parts: Parts) -> None:
    """Make ordinary pieces that files name as special tokens special, matched literally; added
    tokens keep their own flags."""
    added = {entry.content for entry in parts.backend.get_added_tokens_decoder().values()}
    new = dict[str, AddedToken]()
    for token in parts.extra_tokens:
        if parts.backend.token_to_id(token) is None:
            parts.notes.append(f"special token {token!r} is no token of {parts.origin}")
        elif token not in added:
            new[token] = AddedToken(token, special=True, normalized=False)
    parts.backend.add_special_tokens([*new.values()])


def settle_bos(parts: Parts) -> Declared | None:
    """Set the tokens before and after texts as the files state; return the BOS."""
    backend = parts.backend
    plain = backend.encode("x", add_special_tokens=False).ids
    ids = backend.encode("x").ids
    tokens = [parts.special_tokens.get(name) for name in ("bos_token", "eos_token")]
    bos, eos = (None if token is None else backend.token_to_id(token) for token in tokens)
    begins, ends = ids[:1] != plain[:1] and ids[0] == bos, ids[-1:] != plain[-1:] and ids[-1] == eos
    wanted = [
        has if stated is None or token_id is None else stated
        for has, stated, token_id in ((begins, parts.add_bos, bos), (ends, parts.add_eos, eos))
    ]
    source = parts.origin
    if wanted != [begins, ends]:
        source = parts.config_name
        around = [t for t, put in zip(tokens, wanted, strict=True) if put and t is not None]
        front = f"{tokens[0]} " if wanted[0] else ""
        back = f" {tokens[1]}" if wanted[1] else ""
        backend.post_processor = TemplateProcessing(
            single=f"{front}$A{back}",
            special_tokens=[(token, backend.token_to_id(token)) for token in around],
        )
    first = backend.encode("x").ids[0]
    if first == plain[0]:
        return None
    return Declared(first, backend.id_to_token(first) or "", source)


def ends_by_name(parts: Parts) -> list[Declared]:
    """Return the end tokens that files name."""
    token = parts.special_tokens.get("eos_token", "")
    named = parts.backend.token_to_id(token)
    if named is None or any(end.id == named for end in parts.ends):
        return parts.ends
    return [*parts.ends, Declared(named, token, f"eos_token of {parts.config_name}")]


def turn_ends(backend: Tokenizer, text: str) -> list[Declared]:
    """Return the added token that a chat template puts after an answer, if any."""
    added = backend.get_added_tokens_decoder()
    beginning = [id for id, entry in added.items() if text.startswith(entry.content)]
    longest = max(beginning, key=lambda id: len(added[id].content), default=None)
    if longest is None:
        return []
    return [Declared(longest, str(added[longest].content), "the chat template")]


def main() -> int:
    """Convert, and return the exit code; the last line on standard error states what failed."""
    target, *sources = map(Path, sys.argv[1:])
    limit_memory(SETUP_MEMORY)
    try:
        data = msgspec.json.encode(convert(*sources))
    except Exception as error:  # whatever a broken tokenizer leads to
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    try:
        target.write_bytes(data)
    except OSError as error:
        print(f"{target.parent} cannot hold its {len(data):,} bytes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
