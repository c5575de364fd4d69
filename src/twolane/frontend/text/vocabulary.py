"""The text that each token of a tokenizer stands for in an answer."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel

from twolane.engine.messages import Vocabulary

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
MARK = re.compile("<.*>", re.DOTALL)
"""Added tokens of this form are marks, as of calls, even if they are not declared special."""
CHANGING = ("continuing_subword_prefix", "dropout", "end_of_word_suffix")
"""Options of a model by which its tokens are not those of the text."""
STEPS = frozenset(("ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"))
"""Steps of decoders that write a token the same after any other."""


def vocabulary_of(
    tokenizer: Tokenizer, bytes_of: Callable[[int], bytes] | None, ends: Sequence[int]
) -> Vocabulary:
    """Return the texts of a tokenizer's tokens inside an answer, as its own decoder writes them.

    Args:
        tokenizer: the tokenizer.
        bytes_of: returns the bytes of a token of a byte-level tokenizer; None: it is another kind.
        ends: tokens that end an answer, besides those of the model's config.

    Raises:
        ValueError: the decoder writes a token differently after different ones.
    """
    count = 1 + max(tokenizer.get_vocab().values(), default=-1)
    added = tokenizer.get_added_tokens_decoder()
    special = {id for id, token in added.items() if token.special or MARK.fullmatch(token.content)}
    special |= {end for end in ends if end < count}
    if bytes_of is None:
        texts = decoded_texts(tokenizer, count)
        for id in special & added.keys():
            texts[id] = added[id].content.encode()
    else:
        texts = [bytes_of(id) for id in range(count)]
    return Vocabulary(texts, sorted(special))


def exact_tokenizer(backend: str, vocabulary: Vocabulary) -> str | None:
    """Return a byte-level tokenizer of any text, without what changes texts; None: it has more.

    Args:
        backend: the model's `tokenizer.json`.
        vocabulary: the texts of its tokens.
    """
    form = json.loads(backend)
    model, steps = form["model"], _steps(form["pre_tokenizer"], "pretokenizers")
    written = {byte for text in vocabulary.texts for byte in text}
    alone = {name for name, byte in byte_alphabet().items() if byte in written}
    if model["type"] != "BPE" or not alone <= model["vocab"].keys():
        return None
    if any(model.get(key) for key in CHANGING) or not all(map(_keeps, steps)):
        return None
    if all(step["type"] != "ByteLevel" for step in steps):
        return None
    for step in steps:
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
    # The library takes added tokens for special ones by names in this form, which no text has. It
    # would take some of those that are text for other bytes, if they are not ASCII.
    texts = {token["id"]: token["content"] for token in form["added_tokens"]}
    hidden = {*vocabulary.special, *(id for id, text in texts.items() if not text.isascii())}
    names = texts | {id: f"<\U0010ffff{id}>" for id in hidden}
    kept = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    form["added_tokens"] = [
        {"id": id, "content": name, "special": id in hidden, **kept} for id, name in names.items()
    ]
    # A special token may be one that merges make: `</s>` of Qwen's in GGUF files.
    lost = {name for name, id in model["vocab"].items() if names.get(id, name) != name}
    model["merges"] = [merge for merge in model["merges"] if not lost & _merged(merge)]
    model["vocab"] = {names.get(id, name): id for name, id in model["vocab"].items()}
    nothing = dict.fromkeys(("normalizer", "post_processor", "truncation", "padding"))
    return json.dumps({**form, **nothing})


def _merged(merge: str | Sequence[str]) -> set[str]:
    """Return the names of the tokens of a merge: its parts and what they make."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return {first, second, first + second}


def _keeps(step: Mapping[str, Any]) -> bool:
    """Return whether a step before tokenising only splits a text, or writes its bytes."""
    splits = step["type"] in ("Split", "Punctuation") and step.get("behavior") != "Removed"
    return splits or step["type"] in ("ByteLevel", "Digits")


def decoded_texts(tokenizer: Tokenizer, count: int) -> list[bytes]:
    """Return what each of the first tokens adds to a text before it.

    Raises:
        ValueError: see `vocabulary_of`.
    """
    steps = decoder_steps(tokenizer.decoder)
    for place, step in enumerate(steps):
        check_step(step, fused=any(before["type"] == "Fuse" for before in steps[:place]))
    anchor = anchor_of(tokenizer, count)
    before = "" if anchor is None else tokenizer.decode([anchor], skip_special_tokens=False)
    after = [] if anchor is None else [anchor]
    texts = tokenizer.decode_batch([[*after, id] for id in range(count)], skip_special_tokens=False)
    found = [text.removeprefix(before).encode() for text in texts]
    if any(step["type"] == "ByteFallback" for step in steps):
        for name, id in tokenizer.get_vocab().items():
            if byte := BYTE_TOKEN.fullmatch(name):
                found[id] = bytes.fromhex(byte[1])
    return found


def decoder_steps(decoder: decoders.Decoder | None) -> Sequence[Mapping[str, Any]]:
    """Return the steps of a decoder, as a `tokenizer.json` has them."""
    return _steps(None if decoder is None else json.loads(decoder.__getstate__()), "decoders")


def _steps(whole: Any, key: str) -> Sequence[dict[str, Any]]:
    """Return the steps of a part of a `tokenizer.json`, whose sequences have a key."""
    steps = [whole or {"type": "none"}]
    while any(key in step for step in steps):
        steps = [part for step in steps for part in step.get(key, [step])]
    return steps


def check_step(step: Mapping[str, Any], *, fused: bool) -> None:
    """Refuse a step of a decoder that may write a token differently after different ones.

    Args:
        step: the step.
        fused: true if an earlier step has joined the tokens.

    Raises:
        ValueError: it may.
    """
    replaced = step.get("pattern", {}).get("String")
    joins = step["type"] == "Replace" and fused and (replaced is None or len(replaced) != 1)
    if step["type"] not in STEPS or joins or (fused and step.get("stop")):
        raise ValueError(
            f"the step {step['type']!r} of its decoder may change a token's text by those around it"
        )


def anchor_of(tokenizer: Tokenizer, count: int) -> int | None:
    """Return a token that decodes to itself wherever it is; None: there is none.

    Decoders drop the space that a text begins with. After this token there is a text already.
    """
    for id in range(count):
        name = tokenizer.id_to_token(id) or ""
        if name.isascii() and name.isalpha():
            texts = tokenizer.decode_batch([[id], [id, id]], skip_special_tokens=False)
            if texts == [name, 2 * name]:
                return id
    return None


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of byte-level token names (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table
