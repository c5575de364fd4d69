"""The JSON of OpenAI's answers: whole ones and the chunks of streams."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from twolane.api.generation import Delta
from twolane.engine.messages import FinishReason

Json = dict[str, Any]
Kind = Literal["chat", "completion"]
DONE = b"data: [DONE]\n\n"


def event(body: Json) -> bytes:
    """Write a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass
class Choice:
    """The answer to one prompt, as far as it has come."""

    prompt: list[int]
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached: int = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def add(self, delta: Delta) -> bool:
        """Take a delta; return whether it is the first."""
        first = not self.tokens and self.finish is None
        self.pieces.append(delta.text)
        self.tokens += delta.tokens
        self.finish = delta.finish
        self.cached = self.cached if delta.cached is None else delta.cached
        return first


class Answer:
    """One answer under way.

    Args:
        kind: which endpoint answers.
        model: the served model's name.
        prompts: the tokens of each prompt; one choice each.
        return_token_ids: whether token ids are part of the answer, with vLLM's field names.
    """

    def __init__(
        self, kind: Kind, model: str, prompts: Sequence[list[int]], *, return_token_ids: bool
    ) -> None:
        self.choices = [Choice(prompt) for prompt in prompts]
        self._kind: Kind = kind
        self._return_token_ids = return_token_ids
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    def whole(self) -> Json:
        """Return the answer that does not stream."""
        name = "chat.completion" if self._kind == "chat" else "text_completion"
        body = self._headed(name, [self._choice(i, c) for i, c in enumerate(self.choices)])
        body["usage"] = self.usage()
        if self._kind == "chat" and self._return_token_ids:
            body["prompt_token_ids"] = self.choices[0].prompt
        return body

    def chunks(self, delta: Delta) -> list[Json]:
        """Take a delta; return the chunks of the stream that it makes."""
        choice = self.choices[delta.index]
        first = choice.add(delta)
        if self._kind == "completion":
            return [self._completion_chunk(delta, first)]
        opening = [self._chat_opening(delta.index)] if first else []
        return [*opening, self._chat_chunk(delta)]

    def usage_chunk(self) -> Json:
        """Return the chunk with which a stream ends that was asked for its usage."""
        return {**self._headed(self._chunk_name, []), "usage": self.usage()}

    def usage(self) -> Json:
        """Return the token counts of all prompts together."""
        prompt = sum(len(choice.prompt) for choice in self.choices)
        output = sum(len(choice.tokens) for choice in self.choices)
        cached = sum(choice.cached for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._kind == "chat" else "text_completion"

    def _headed(self, name: str, choices: list[Json]) -> Json:
        return {**self._head, "object": name, "choices": choices}

    def _choice(self, index: int, choice: Choice) -> Json:
        body: Json = {"index": index, "logprobs": None, "finish_reason": choice.finish}
        if self._kind == "chat":
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = choice.text
        if self._return_token_ids:
            body["token_ids"] = choice.tokens
            if self._kind == "completion":
                body["prompt_token_ids"] = choice.prompt
        return body

    def _completion_chunk(self, delta: Delta, first: bool) -> Json:
        body: Json = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish,
        }
        if self._return_token_ids:
            body["token_ids"] = delta.tokens
            if first:
                body["prompt_token_ids"] = self.choices[delta.index].prompt
        return self._headed(self._chunk_name, [body])

    def _chat_opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._headed(self._chunk_name, [choice])
        if self._return_token_ids:
            body["prompt_token_ids"] = self.choices[index].prompt
        return body

    def _chat_chunk(self, delta: Delta) -> Json:
        choice: Json = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": None,
            "finish_reason": delta.finish,
        }
        if self._return_token_ids:
            choice["token_ids"] = delta.tokens
        return self._headed(self._chunk_name, [choice])
