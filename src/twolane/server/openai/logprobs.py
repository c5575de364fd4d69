"""Log-probabilities in the forms of OpenAI's two endpoints, and in vLLM's for prompts."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from twolane.engine.messages import TokenLogprobs
from twolane.frontend.text.codec import TextCodec

Json = dict[str, Any]
LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's and vLLM's number."""


class TokenPlace(NamedTuple):
    """A token in a text."""

    token: int
    offset: int
    """Where in the text it begins, in characters."""
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt, which nothing predicts."""


class JsonList:
    """A JSON array that is written value by value: they need not be in memory together.

    Args:
        values: the first ones.
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._text = bytearray(b"[")
        for value in values:
            self.add(value)

    def add(self, value: object) -> None:
        """Write one more value."""
        if len(self._text) > 1:
            self._text += b","
        self._text += msgspec.json.encode(value)

    def written(self) -> msgspec.Raw:
        """Return the array, to which nothing may be added any more."""
        return msgspec.Raw(self._text + b"]")


class LogprobWriter:
    """Names tokens, and writes what the model thought of them.

    Args:
        codec: the tokenizer.
        count: how many alternatives to show; the engine may send more.
        as_ids: name tokens "token_id:5" instead of by their text.
    """

    def __init__(self, codec: TextCodec, count: int, *, as_ids: bool) -> None:
        self._codec = codec
        self._count = count
        self._as_ids = as_ids or not codec.has_tokenizer

    def piece(self, token: int) -> str:
        """Return the text of a token, as far as it is text."""
        return self._codec.token_bytes(token).decode(errors="replace")

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of tokens in a row: characters of several tokens are whole."""
        detokenizer = self._codec.detokenizer(skip_special_tokens=False)
        return [detokenizer.step(token) for token in tokens]

    def name(self, token: int) -> str:
        """Return how a token is called: its text, or its bytes where they are no whole text."""
        if self._as_ids:
            return f"token_id:{token}"
        data = self._codec.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, entry: TokenLogprobs) -> Json:
        """Write a token of a chat answer."""
        top = [self._chat_token(token, logprob) for token, logprob in entry.top[: self._count]]
        return {**self._chat_token(entry.token, entry.logprob), "top_logprobs": top}

    def completion(self, places: Iterable[TokenPlace]) -> Json:
        """Write the tokens of a completion, OpenAI's older form."""
        tokens, values, top, offsets = JsonList(), JsonList(), JsonList(), JsonList()
        for place in places:
            entry = place.logprobs
            tokens.add(self.name(place.token))
            values.add(None if entry is None else finite(entry.logprob))
            top.add(None if entry is None else self._top(entry))
            offsets.add(place.offset)
        return {
            "tokens": tokens.written(),
            "token_logprobs": values.written(),
            "top_logprobs": top.written(),
            "text_offset": offsets.written(),
        }

    def ranked(self, entry: TokenLogprobs) -> Json:
        """Write a token of a prompt, vLLM's form: by id, with ranks and texts."""
        ranks = {token: (rank, lp) for rank, (token, lp) in enumerate(entry.top, 1)}
        ranks.setdefault(entry.token, (entry.rank, entry.logprob))
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self.piece(token),
            }
            for token, (rank, logprob) in ranks.items()
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The alternatives by name, and the token itself, as vLLM has it.

        Of tokens with one name, the likeliest counts.
        """
        named: dict[str, float] = {}
        for token, logprob in (*entry.top[: self._count], (entry.token, entry.logprob)):
            named.setdefault(self.name(token), finite(logprob))
        return named

    def _chat_token(self, token: int, logprob: float) -> Json:
        data = self._codec.token_bytes(token)
        return {"token": self.name(token), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """Return a number that JSON has."""
    return max(logprob, LEAST)


def offsets_in(text: str, pieces: Sequence[str]) -> list[int]:
    """Return where each piece begins in the text; pieces that are not shown have no length."""
    place = 0
    offsets = []
    for piece in pieces:
        offsets.append(place)
        if text.startswith(piece, place):
            place += len(piece)
    return offsets
