"""Text to tokens and back: prompts, chat templates and incremental detokenising."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8
"""A character has at most four bytes; what is still broken after this many tokens stays broken."""


class TextError(ValueError):
    """A prompt that cannot be turned into tokens; the message says why."""


class Detokenizer(Protocol):
    """The text of one request, piece by piece.

    The pieces put together are the decoded text of all tokens without the special ones, and no
    piece ends inside a character. Each call takes constant time.
    """

    def step(self, token: int) -> str:
        """Take the next token; return the text that it completes, which may be empty."""
        ...

    def flush(self) -> str:
        """Return what is still held back. Call it once, at the end."""
        ...


class ByteVocabulary:
    """What each token of a byte-level tokenizer stands for, looked up once a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._byte_of = byte_alphabet()
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of `token`: none for special tokens and ids beyond the vocabulary."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        name = None if token in self._special else self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        try:
            return bytes(self._byte_of[char] for char in name)
        except KeyError:  # an added token, which is plain text
            return name.encode()


class ByteDetokenizer:
    """For byte-level tokenizers (GPT-2's kind): exact, whatever the tokens are."""

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        """See `Detokenizer.step`."""
        return self._decoder.decode(self._vocabulary.bytes_of(token))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers (SentencePiece's kind): decodes the last few tokens twice.

    Where the bytes of the tokens are not valid UTF-8, the number of replacement characters may
    differ from that of a decode of the whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._window: list[int] = []
        self._sent_tokens = 0
        self._sent = ""  # the text of the window's first `_sent_tokens` tokens, already returned

    def step(self, token: int) -> str:
        """See `Detokenizer.step`."""
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        held = len(self._window) - self._sent_tokens
        if text.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS:
            return ""
        piece = text[len(self._sent) :]
        # Keep the tokens of this piece: how the next one is written depends on what is before it.
        self._window = self._window[self._sent_tokens :]
        self._sent_tokens = len(self._window)
        self._sent = self._tokenizer.decode(self._window, skip_special_tokens=True)
        return piece

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        return text[len(self._sent) :]


class NoText:
    """For models without a tokenizer (dummy weights): no text, only token ids."""

    def step(self, token: int) -> str:
        """Return nothing."""
        return ""

    def flush(self) -> str:
        """Return nothing."""
        return ""


class TextCodec:
    """The tokenizer of the served model, as the front uses it.

    Args:
        tokenizer: one of `transformers`, or None for a model that has none.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if tokenizer is not None and self._backend is None:
            raise TextError(f"{type(tokenizer).__name__} is not a fast tokenizer")
        self._bytes: ByteVocabulary | None = None
        if self._backend is not None and isinstance(self._backend.decoder, decoders.ByteLevel):
            self._bytes = ByteVocabulary(self._backend)

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be served at all."""
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a plain prompt, with the special ones the model expects around it.

        Raises:
            TextError: the model has no tokenizer.
        """
        return self._encode(text, add_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's answer begins.

        Raises:
            TextError: the model has no tokenizer or chat template, or the template refuses.
        """
        if self._tokenizer is None:
            raise no_tokenizer()
        if not self.has_chat_template:
            raise TextError("this model has no chat template: use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs that come with the model
            raise TextError(f"the model's chat template refused the messages: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """Return the detokeniser of a new request."""
        if self._backend is None:
            return NoText()
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes)
        return WindowDetokenizer(self._backend)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._backend is None:
            raise no_tokenizer()
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def no_tokenizer() -> TextError:
    """Return the refusal of text where there is no tokenizer."""
    return TextError(
        "this model was loaded without a tokenizer: send prompts of token ids to /v1/completions, "
        'with "return_token_ids": true'
    )


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that are never part of the text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)


def byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character of byte-level token names (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table
