"""Messages between the API process and the sandbox of the checkpoint's programs."""

import array
from collections.abc import Sequence
from typing import Any

import msgspec


class Listing(msgspec.Struct, frozen=True):
    """A request for tokens as JSON for clients."""

    names: bool
    """Whether the tokens' names are included."""


class Encode(msgspec.Struct, tag=True, frozen=True):
    """A text to tokenise."""

    text: str
    add_special_tokens: bool
    listing: Listing | None = None
    """How the tokens are listed; None: as plain ids."""


class Chat(msgspec.Struct, tag=True, frozen=True):
    """A conversation to tokenise: the arguments of `TextCodec.chat`."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    listing: Listing | None = None
    """How the tokens are listed; None: as plain ids."""


class Words(msgspec.Struct, tag=True, frozen=True):
    """Words that an answer must not contain, to tokenise."""

    words: tuple[str, ...]


class Decode(msgspec.Struct, tag=True, frozen=True):
    """Tokens to decode, special ones included."""

    tokens: bytes
    """See `packed`."""


class Encoded(msgspec.Struct, tag=True, frozen=True):
    """The tokens of a text."""

    tokens: bytes
    """See `packed`."""


class Sequences(msgspec.Struct, tag=True, frozen=True):
    """The token sequences of words; see `TextCodec.sequences`."""

    sequences: tuple[tuple[int, ...], ...]


class Listed(msgspec.Struct, tag=True, frozen=True):
    """The tokens of a text as JSON, encoded in the sandbox since there may be millions."""

    count: int
    """Number of tokens."""
    tokens: bytes
    """JSON list of token ids."""
    names: bytes | None
    """JSON list of the tokens as the vocabulary spells them; None: not requested."""


class Decoded(msgspec.Struct, tag=True, frozen=True):
    """The text of tokens."""

    text: str


class WrongText(msgspec.Struct, tag=True, frozen=True):
    """An error of tokenising a text; see `TextError`."""

    message: str
    param: str | None


class TokenizerSetup(msgspec.Struct, frozen=True):
    """The checkpoint of a sandbox."""

    name: str
    tokenizer: str
    """Directory or GGUF file with the tokenizer."""
    chat_template: str | None
    """File of the chat template in place of the model's own."""


class Loaded(msgspec.Struct, frozen=True):
    """Result of loading a checkpoint's tokenizer and template."""

    file: bytes
    """The tokenizer: a `TokenizerFile` as JSON."""
    template: str | None
    """Source of the chat template for tools; None: there is none that works."""
    shows_tools: bool
    """Whether that template shows tools."""
    has_chat: bool
    """Whether there is a chat template that works without tools."""
    variables: frozenset[str]
    """Variables of the chat template that requests may set."""
    tool_variables: frozenset[str]
    """Variables of requests with tools, which may have another template."""


Job = Encode | Chat | Decode | Words
Result = Encoded | Sequences | Listed | Decoded | WrongText
read_job = msgspec.msgpack.Decoder(Job).decode
read_result = msgspec.msgpack.Decoder(Result).decode


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as an array of 32-bit integers."""
    return array.array("I", tokens).tobytes()


def unpacked(data: bytes) -> list[int]:
    """Return the token ids of such an array."""
    return array.array("I", data).tolist()
