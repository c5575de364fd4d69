"""Log-probabilities in the formats of OpenAI's two endpoints, and in vLLM's for prompts."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from twolane.common.checked_json import Json
from twolane.engine.messages import TokenLogprobs
from twolane.frontend.text.codec import TextCodec

MIN_LOGPROB = -9999.0
"""Number for minus infinity, which JSON does not have, as at OpenAI and vLLM."""


class TokenPlace(NamedTuple):
    """A token in a text."""

    token: int
    offset: int
    """Position of its first character in the text."""
    logprobs: TokenLogprobs | None
    """Log-probabilities; None for the first token of a prompt, which nothing predicts."""


class JsonList:
    """A JSON array that is encoded value by value, so that the values are never all in memory.

    Args:
        values: the first ones.
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._text = bytearray(b"[")
        for value in values:
            self.add(value)

    def add(self, value: object) -> None:
        """Append a value."""
        if len(self._text) > 1:
            self._text += b","
        self._text += msgspec.json.encode(value)

    def written(self) -> msgspec.Raw:
        """Return the array; nothing may be added afterwards."""
        return msgspec.Raw(self._text + b"]")


class LogprobWriter:
    """Writes tokens and their log-probabilities as JSON.

    Args:
        codec: the tokenizer.
        count: number of alternatives to show; the engine may send more.
        as_ids: name tokens "token_id:5" instead of by their text.
    """

    def __init__(self, codec: TextCodec, count: int, *, as_ids: bool) -> None:
        self._codec = codec
        self._count = count
        self._as_ids = as_ids or not codec.has_tokenizer

    def piece(self, token: int) -> str:
        """Return the text of a token; bytes that are no text become U+FFFD."""
        return self._codec.token_bytes(token).decode(errors="replace")

    def pieces(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Return the texts of consecutive tokens, each with the number of its characters that are
        of earlier tokens; characters that span tokens are complete."""
        detokenizer = self._codec.detokenizer(skip_special_tokens=False)
        return [(detokenizer.step(token), detokenizer.before) for token in tokens]

    def name(self, token: int) -> str:
        """Return a token's name: its text, or its bytes where they are not valid text."""
        if self._as_ids:
            return f"token_id:{token}"
        data = self._codec.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, entry: TokenLogprobs) -> Json:
        """Return a token of a chat answer as JSON."""
        top = [self._chat_token(token, logprob) for token, logprob in entry.top[: self._count]]
        return {**self._chat_token(entry.token, entry.logprob), "top_logprobs": top}

    def completion(self, places: Iterable[TokenPlace]) -> Json:
        """Return the tokens of a completion in OpenAI's older format."""
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
        """Return a token of a prompt in vLLM's format: by id, with ranks and texts."""
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
        """Return the alternatives and the token itself by name, as vLLM does.

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
    """Return a log-probability with minus infinity replaced by `MIN_LOGPROB`."""
    return max(logprob, MIN_LOGPROB)


def offsets_in(text: str, pieces: Sequence[tuple[str, int]]) -> list[int]:
    """Return the position of each token in the text; those that are not shown have no length.

    Args:
        text: the text.
        pieces: see `LogprobWriter.pieces`.
    """
    place = 0
    offsets = []
    for piece, before in pieces:
        shown = text.startswith(piece, place)
        offsets.append(place + before * shown)
        place += len(piece) * shown
    return offsets
