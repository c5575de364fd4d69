"""The text that each token of a tokenizer stands for in an answer."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders

from twolane.engine.messages import Vocabulary

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
MARK = re.compile("<.*>", re.DOTALL)
"""Added tokens of this form are marks, as of calls, even if they are not declared special."""
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
    if decoder is None:
        return [{"type": "none"}]
    whole = json.loads(decoder.__getstate__())
    steps = [whole]
    while any("decoders" in step for step in steps):
        steps = [part for step in steps for part in step.get("decoders", [step])]
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
