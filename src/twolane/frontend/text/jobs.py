"""What the programs of a checkpoint are asked in their sandbox, and what they answer."""

import array
from collections.abc import Sequence
from typing import Any

import msgspec


class Listing(msgspec.Struct, frozen=True):
    """That tokens are wanted as they are shown to people."""

    names: bool
    """Whether the tokens' names are wanted, too."""


class Encode(msgspec.Struct, tag=True, frozen=True):
    """A text to be made tokens of."""

    text: str
    add_special_tokens: bool
    listing: Listing | None = None
    """How they are listed; None: the tokens alone are wanted."""


class Chat(msgspec.Struct, tag=True, frozen=True):
    """A conversation to be made tokens of: the arguments of `TextCodec.chat`."""

    messages: list[dict[str, Any]]
    how: dict[str, Any]
    listing: Listing | None = None
    """How the tokens are listed; None: they alone are wanted."""


class Decode(msgspec.Struct, tag=True, frozen=True):
    """Tokens to be made text of, special ones included."""

    tokens: bytes
    """See `packed`."""


class Encoded(msgspec.Struct, tag=True, frozen=True):
    """The tokens of a text."""

    tokens: bytes
    """See `packed`."""


class Listed(msgspec.Struct, tag=True, frozen=True):
    """The tokens of a text, written where that holds nobody up: there may be millions."""

    count: int
    """How many they are."""
    tokens: bytes
    """A JSON list of their ids."""
    names: bytes | None
    """A JSON list of the tokens as the vocabulary spells them, if they are wanted."""


class Decoded(msgspec.Struct, tag=True, frozen=True):
    """The text of tokens."""

    text: str


class WrongText(msgspec.Struct, tag=True, frozen=True):
    """Why a text cannot be made tokens of: see `TextError`."""

    message: str
    param: str | None


class TokenizerSetup(msgspec.Struct, frozen=True):
    """The checkpoint whose programs are set up."""

    name: str
    tokenizer: str
    """Directory or GGUF file with the tokenizer."""


class Loaded(msgspec.Struct, frozen=True):
    """What is told of a checkpoint's programs once they are set up."""

    file: bytes
    """The tokenizer, a `TokenizerFile` as JSON."""
    template: str | None
    """The program of the chat template for tools; None: there is none that works."""
    has_chat: bool
    """Whether there is a chat template that works without tools."""
    variables: frozenset[str]
    """The variables of the chat template that requests may set."""
    tool_variables: frozenset[str]
    """Those of requests with tools, for which there may be another template."""


Job = Encode | Chat | Decode
Result = Encoded | Listed | Decoded | WrongText
read_job = msgspec.msgpack.Decoder(Job).decode
read_result = msgspec.msgpack.Decoder(Result).decode


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as an array of 32-bit integers."""
    return array.array("I", tokens).tobytes()


def unpacked(data: bytes) -> list[int]:
    """Return the token ids of such an array."""
    return array.array("I", data).tolist()
