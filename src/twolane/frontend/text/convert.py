"""Reads the tokenizer of a model and writes it as one file. A program of its own.

`tokenizer.json` is the truth for tokens, normalisation, splitting and decoding. `transformers`
rebuilds some tokenizers from the name of a class: it is asked for its opinion alone, and for
formats that only it reads. It takes seconds to import and brings PyTorch with it, so no process
that serves should. `load_file` runs `python -m twolane.frontend.text.convert SOURCE TARGET`.
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
from twolane.frontend.text.parts import Parts
from twolane.frontend.text.template import ChatTemplate
from twolane.frontend.text.tokenizer import Declared, TokenizerFile

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that files name, as chat templates know them."""
CLASS_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}
"""Special tokens of classes of `transformers`, for files that name the class and not the tokens."""
PROBES = (
    *("one", " one", "  two spaces", "trailing  ", "\n\n\tx = 1\r\n", "3.14 12345", "don't WE'LL"),
    *(
        "naïve e\u0301 ﬁ Å",
        "你好,世界 日本",
        "مرحبا שלום",
        "😀🏳️‍🌈 👍🏽",
        "\x00\x07\u200b",
        "a" * 99,
    ),
)
"""Texts whose tokens are compared with those of `transformers`."""


def convert(source: Path) -> TokenizerFile:
    """Return what serving needs of the tokenizer of a directory or GGUF file.

    Raises:
        ValueError: it is none that can be read.
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
    add_named_tokens(parts)
    bos = settle_bos(parts)
    template = parts.templates.get("default")
    if template is None and parts.templates:
        named = ", ".join(sorted(parts.templates))
        parts.notes.append(f"there is no default among the chat templates ({named}): no chat")
    form, ends = None, ends_by_name(parts)
    if template is not None:
        try:
            form = ChatTemplate(template, parts.special_tokens).form
            ends += turn_ends(parts.backend, form.turn_end)
        except TemplateSyntaxError as error:
            parts.notes.append(f"the chat template is broken: {error}")
    if source.is_dir() and parts.origin == "tokenizer.json":
        parts.notes += disagreements(source, parts.backend)
    return TokenizerFile(
        backend=parts.backend.to_str(),
        origin=parts.origin,
        chat_template=template,
        form=form,
        special_tokens=parts.special_tokens,
        bos=bos,
        ends=list({end.id: end for end in reversed(ends)}.values())[::-1],
        notes=parts.notes,
    )


def from_directory(source: Path) -> Parts:
    """Read the files of a model directory.

    Raises:
        ValueError: there is no tokenizer among them that can be read.
    """
    config = optional_json(source / "tokenizer_config.json")
    named = optional_json(source / "special_tokens_map.json")
    backend, origin = read_backend(source)
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    special_tokens = {}
    for name in NAMES:
        token = content(config.get(name)) or content(named.get(name))
        default = CLASS_DEFAULTS.get(kind, {}).get(name)
        if token is None and default is not None and backend.token_to_id(default) is not None:
            token = default
        if token is not None:
            special_tokens[name] = token
    parts = Parts(backend, origin, special_tokens, config.get("add_bos_token"))
    parts.add_eos = config.get("add_eos_token")
    parts.templates = read_templates(source, config)
    add_declared_tokens(parts, config.get("added_tokens_decoder") or {})
    return parts


def read_backend(source: Path) -> tuple[Tokenizer, str]:
    """Read the tokens of a directory, and name the file they come from.

    Raises:
        ValueError: no file can be read.
    """
    if (source / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(source / "tokenizer.json")), "tokenizer.json"
    if (source / "tokenizer.model").is_file():
        from twolane.frontend.text.sentencepiece import read_model

        return read_model(source / "tokenizer.model"), "tokenizer.model"
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(source)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("its tokenizer has no fast form")
    return tokenizer.backend_tokenizer, "vocab.json"


def read_templates(source: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read the chat templates of a directory, by name; its template files come first."""
    given = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        templates |= {entry["name"]: entry["template"] for entry in given}
    elif isinstance(given, dict):
        templates |= given
    in_json = optional_json(source / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    if (source / "chat_template.jinja").is_file():
        templates["default"] = (source / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((source / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that need not be there."""
    return read_json(path) if path.is_file() else {}


def content(token: object) -> str | None:
    """Return the text of a special token, which files give alone or with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def add_declared_tokens(parts: Parts, declared: Mapping[str, Any]) -> None:
    """Add the tokens of `added_tokens_decoder` that the tokenizer lacks, where their ids fit."""
    for text_id, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        token, known = content(entry), parts.backend.token_to_id(content(entry) or "")
        if token is None or known == int(text_id):
            continue
        if known is not None or int(text_id) != parts.backend.get_vocab_size():
            there = "lacks it" if known is None else f"has {known}"
            note = f"tokenizer_config.json gives {token!r} the id {text_id}, {parts.origin} {there}"
            parts.notes.append(note)
            continue
        flags = {f: bool(entry.get(f)) for f in ("lstrip", "rstrip", "normalized", "special")}
        parts.backend.add_tokens([AddedToken(token, **flags)])


def add_named_tokens(parts: Parts) -> None:
    """Let special tokens that files name be special, if the tokenizer has them as plain ones."""
    added = {entry.content for entry in parts.backend.get_added_tokens_decoder().values()}
    for name, token in parts.special_tokens.items():
        if token in added:
            continue
        if parts.backend.token_to_id(token) is None:
            parts.notes.append(f"{name} {token!r} is no token of {parts.origin}")
        else:
            parts.backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def settle_bos(parts: Parts) -> Declared | None:
    """Let texts begin and end as the files say; return the BOS that is put before them."""
    backend = parts.backend
    plain = backend.encode("x", add_special_tokens=False).ids
    ids = backend.encode("x").ids
    tokens = [parts.special_tokens.get(name) for name in ("bos_token", "eos_token")]
    bos, eos = (None if token is None else backend.token_to_id(token) for token in tokens)
    begins, ends = ids[:1] != plain[:1] and ids[0] == bos, ids[-1:] != plain[-1:] and ids[-1] == eos
    wanted = [
        has if said is None or token_id is None else said
        for has, said, token_id in (
            (begins, parts.add_bos, bos),
            (ends, parts.add_eos, eos),
        )
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
    source = f"eos_token of {parts.config_name}"
    return parts.ends + ([] if named is None else [Declared(named, token, source)])


def turn_ends(backend: Tokenizer, text: str) -> list[Declared]:
    """Return the token that a chat template puts behind an answer, if it is one of the added."""
    added = backend.get_added_tokens_decoder()
    found = [id for id, entry in added.items() if text.startswith(entry.content)]
    longest = max(found, key=lambda id: len(added[id].content), default=None)
    if longest is None:
        return []
    return [Declared(longest, str(added[longest].content), "the chat template")]


def disagreements(source: Path, backend: Tokenizer) -> list[str]:
    """Return where `transformers` cuts a text otherwise than the file, if it can tell."""
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(source)
        for probe in PROBES:
            ids, others = backend.encode(probe).ids, theirs(probe).input_ids
            if ids != others:
                return [
                    f"{probe!r} is {ids} by tokenizer.json, which holds, and {others} "
                    f"by {type(theirs).__name__} of transformers"
                ]
    except Exception:  # its opinion is not needed
        return []
    return []


def main() -> int:
    """Convert; the exit code. What went wrong is the last line on standard error."""
    source, target = map(Path, sys.argv[1:])
    try:
        target.write_bytes(msgspec.json.encode(convert(source)))
    except Exception as error:  # whatever a broken tokenizer leads to
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
