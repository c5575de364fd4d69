"""JSON of OpenAI's answers: complete ones and the chunks of streams."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Literal

import msgspec

from twolane.common.checked_json import Json
from twolane.engine.messages import FinishReason, TokenLogprobs
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from twolane.frontend.text.output_reader import CollectedAnswer, Delta
from twolane.server.http.events import EventForm, event
from twolane.server.openai.logprobs import JsonList, LogprobWriter, TokenPlace, offsets_in

Kind = Literal["chat", "completion"]
DONE = b"data: [DONE]\n\n"
EMPTY: Json = {"content": ""}
"""The delta of a chunk that adds nothing."""


class Echo(msgspec.Struct, frozen=True):
    """Prompts that are shown before the answers."""

    texts: list[str]
    """Text of each prompt."""
    only: bool
    """Whether only the prompts are shown."""


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of an answer a request asks for."""

    n: int = 1
    """Number of answers to each prompt."""
    return_token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    """Whether vLLM's field `prompt_logprobs` is part of the answer."""
    echo: Echo | None = None
    continuous_usage: bool = False
    include_usage: bool = False
    parsed: Callable[[], AnswerReader] | None = None
    """Makes a parser of an answer's thinking and tool calls; None: all of it is text."""
    forced_call: bool = False
    """Whether the request named the tool to call, so that a call is no reason to finish."""
    reasoning_field: str = "reasoning_content"
    """Field of the thinking."""


def add_text(deltas: list[Json], field: str, text: str) -> None:
    """Add text of a field to the deltas of a message."""
    if deltas and field in deltas[-1]:
        deltas[-1][field] += text
    else:
        deltas.append({field: text})


def add_arguments(deltas: list[Json], call: int, text: str) -> None:
    """Add arguments of a call to the deltas of a message. Clients want each call of a delta in one
    entry: the first list of a stream is kept by some as it is."""
    [last] = deltas[-1].get("tool_calls", [{}]) if deltas else [{}]
    if last.get("index") == call:
        last["function"]["arguments"] += text
    else:
        deltas.append({"tool_calls": [{"index": call, "function": {"arguments": text}}]})


class Answer:
    """A request's answer in progress: a choice for each answer to each prompt.

    Args:
        kind: the kind of the endpoint.
        model: the served model's name.
        prompts: the tokens of each prompt.
        writer: the writer of log-probabilities.
        options: the parts that are shown.
    """

    def __init__(
        self,
        kind: Kind,
        model: str,
        prompts: Sequence[list[int]],
        writer: LogprobWriter,
        options: AnswerOptions,
    ) -> None:
        self.choices = [CollectedAnswer(prompt) for prompt in prompts for _ in range(options.n)]
        self._kind: Kind = kind
        self._options = options
        parsed = options.parsed
        self._readers = None if parsed is None else [parsed() for _ in self.choices]
        self._writer = writer
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        varied = options.logprobs or options.return_token_ids or options.continuous_usage
        self._plain = not (varied or self._echo_only)
        """Whether the chunks within a stream differ in their text alone."""
        self._forms: dict[tuple[int, str], EventForm] = {}
        """Forms of such chunks by choice and field, once they are needed."""

    def whole(self) -> Json:
        """Return the complete answer."""
        name = "chat.completion" if self._kind == "chat" else "text_completion"
        body = self._headed(name, [self._choice(i) for i in range(len(self.choices))])
        body["usage"] = self.usage()
        if self._kind == "chat":
            if self._options.prompt_logprobs:
                body["prompt_logprobs"] = self._prompt_logprobs(0)
            if self._options.return_token_ids:
                body["prompt_token_ids"] = self.choices[0].prompt
        return body

    def add(self, delta: Delta) -> None:
        """Add a delta to an answer that does not stream."""
        self.choices[delta.index].add(delta)
        self._read(delta)

    def events(self, delta: Delta) -> bytes:
        """See `Answering.events`."""
        first = self.choices[delta.index].add(delta)
        within = self._plain and not first and delta.finish is None
        if within and self._readers is None:
            return self._form(delta.index, "content").event(delta.text)
        pieces = self._read(delta)
        if within:
            match pieces:
                case []:
                    return b""
                case [Content() as piece]:
                    return self._form(delta.index, "content").event(piece.joined)
                case [Reasoning(text)]:
                    return self._form(delta.index, self._options.reasoning_field).event(text)
        return b"".join(map(event, self._chunks(delta, pieces, first=first)))

    def _form(self, index: int, field: str) -> EventForm:
        """Return the form of chunks that only add text to a choice."""
        form = self._forms.get((index, field))
        if form is None:
            make = partial(self._adding, index, field)
            form = self._forms[index, field] = EventForm(make)
        return form

    def _adding(self, index: int, field: str, text: str) -> bytes:
        choice = self._choice_head(index, None, None)
        if self._kind == "chat":
            choice |= {"delta": {field: text}, "logprobs": None}
        else:
            choice |= {"logprobs": None, "text": text}
        return event(self._chunk(choice))

    def chunks(self, delta: Delta) -> list[Json]:
        """Add a delta; return the chunks that it adds to the stream."""
        first = self.choices[delta.index].add(delta)
        return self._chunks(delta, self._read(delta), first=first)

    def _chunks(self, delta: Delta, pieces: Sequence[Piece], *, first: bool) -> list[Json]:
        if self._kind == "completion":
            return [self._completion_chunk(delta, first)]
        opening = [self._chat_opening(delta.index)] if first else []
        return [*opening, *self._chat_chunks(delta, pieces)]

    def closing(self) -> bytes:
        """See `Answering.closing`."""
        usage = event(self.usage_chunk()) if self._options.include_usage else b""
        return usage + DONE

    def failing(self, error: Json) -> bytes:
        """See `Answering.failing`."""
        return event(error)

    def _read(self, delta: Delta) -> list[Piece]:
        if self._readers is None or self._kind == "completion":
            return [Content(delta.text)]
        reader, choice = self._readers[delta.index], self.choices[delta.index]
        pieces = reader.read(delta.text, ended=delta.finish is not None)
        if reader.only_thinks:
            choice.thinking = len(choice.tokens)
        return pieces

    def usage_chunk(self) -> Json:
        """Return the chunk of usage that ends a stream."""
        return {**self._headed(self._chunk_name, []), "usage": self.usage()}

    def usage(self) -> Json:
        """Return the token counts of all choices, each prompt counted once."""
        leaders = self.choices[:: self._options.n]
        prompt = sum(len(choice.prompt) for choice in leaders)
        output = 0 if self._echo_only else sum(len(choice.tokens) for choice in self.choices)
        cached = sum(choice.cached for choice in leaders)
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self._readers is not None:
            thought = sum(choice.thinking for choice in self.choices)
            counts["completion_tokens_details"] = {"reasoning_tokens": thought}
        return counts

    @property
    def _echo_only(self) -> bool:
        return self._options.echo is not None and self._options.echo.only

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._kind == "chat" else "text_completion"

    def _headed(self, name: str, choices: list[Json]) -> Json:
        return {**self._head, "object": name, "choices": choices}

    def _chunk(self, choice: Json) -> Json:
        body = self._headed(self._chunk_name, [choice])
        if self._options.continuous_usage:
            body["usage"] = self.usage()
        elif self._options.include_usage:
            body["usage"] = None
        return body

    def _choice(self, index: int) -> Json:
        choice = self.choices[index]
        body = self._choice_head(index, choice.finish, choice.stop_reason)
        if self._kind == "chat":
            body["logprobs"] = self._chat_logprobs(choice.logprobs)
            body["message"] = self._message(index)
        else:
            body["logprobs"] = self._completion_logprobs(index, choice, first=True)
            body["text"] = self._echo_text(index) + ("" if self._echo_only else choice.text)
            if self._options.prompt_logprobs:
                body["prompt_logprobs"] = self._prompt_logprobs(index)
        if self._options.return_token_ids:
            body["token_ids"] = [] if self._echo_only else choice.tokens
            if self._kind == "completion":
                body["prompt_token_ids"] = choice.prompt
        return body

    def _message(self, index: int) -> Json:
        message: Json = {"role": "assistant", "content": self.choices[index].text, "refusal": None}
        if self._readers is None:
            return message
        read = self._readers[index]
        message["content"] = read.content if read.content or not read.calls else None
        if read.thinking:
            message[self._options.reasoning_field] = read.thinking
        if read.calls:
            message["tool_calls"] = [call.shown for call in read.calls]
        return message

    def _choice_head(
        self, index: int, finish: FinishReason | None, stop_reason: int | str | None
    ) -> Json:
        if self._echo_only and finish is not None:
            finish, stop_reason = "length", None
        shown: str | None = finish
        if finish == "stop" and self._readers is not None and not self._options.forced_call:
            shown = "tool_calls" if self._readers[index].calls_are_whole else finish
        return {"index": index, "finish_reason": shown, "stop_reason": stop_reason}

    def _completion_chunk(self, delta: Delta, first: bool) -> Json:
        body = self._choice_head(delta.index, delta.finish, delta.stop_reason)
        body["logprobs"] = self._completion_logprobs(delta.index, delta, first=first)
        echo = self._echo_text(delta.index) if first else ""
        body["text"] = echo + ("" if self._echo_only else delta.text)
        if self._options.return_token_ids:
            body["token_ids"] = [] if self._echo_only else delta.tokens
            if first:
                body["prompt_token_ids"] = self.choices[delta.index].prompt
        return self._chunk(body)

    def _chat_opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._chunk(choice)
        if self._options.return_token_ids:
            body["prompt_token_ids"] = self.choices[index].prompt
        return body

    def _chat_chunks(self, delta: Delta, pieces: Sequence[Piece]) -> list[Json]:
        """Return the chunks of a delta; none while a parser holds its text back.

        Many clients read one thing from a chunk and drop the rest: each has thinking, text or one
        call, and that with the reason to finish has nothing else.
        """
        deltas = self._deltas(delta.index, pieces)
        if delta.finish is not None:
            deltas = [each for each in deltas if each != EMPTY]
        shown = delta.finish, delta.logprobs, self._options.return_token_ids or None
        if not deltas and all(each is None for each in shown):
            return []
        if delta.finish is not None or not deltas:
            deltas.append(EMPTY)
        last, logprobs, tokens = len(deltas) - 1, delta.logprobs, delta.tokens
        chunks: list[Json] = []
        for place, part in enumerate(deltas):
            ends = (delta.finish, delta.stop_reason) if place == last else (None, None)
            choice = self._choice_head(delta.index, *ends)
            choice["delta"] = part
            choice["logprobs"] = self._chat_logprobs(logprobs)
            if self._options.return_token_ids:
                choice["token_ids"] = tokens
            chunks.append(self._chunk(choice))
            logprobs, tokens = None, []
        return chunks

    def _deltas(self, index: int, pieces: Sequence[Piece]) -> list[Json]:
        """Return the deltas that pieces of an answer add to its message."""
        deltas: list[Json] = []
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    add_text(deltas, self._options.reasoning_field, text)
                case Content():
                    add_text(deltas, "content", piece.joined)
                case CallStart():
                    deltas.append({"tool_calls": [self._call_delta(index, piece)]})
                case CallArguments(call, text):
                    add_arguments(deltas, call, text)
        return deltas

    def _call_delta(self, index: int, piece: CallStart) -> Json:
        assert self._readers is not None
        call = self._readers[index].calls[piece.index]
        function = {"name": call.name, "arguments": ""}
        return {"index": piece.index, "id": call.id, "type": "function", "function": function}

    def _echo_text(self, index: int) -> str:
        echo = self._options.echo
        return "" if echo is None else echo.texts[index // self._options.n]

    def _chat_logprobs(self, logprobs: Iterable[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        content = JsonList(self._writer.chat(entry) for entry in logprobs)
        return {"content": content.written(), "refusal": None}

    def _prompt_logprobs(self, index: int) -> msgspec.Raw:
        leader = self.choices[index - index % self._options.n]
        ranked = (self._writer.ranked(entry) for entry in leader.prompt_logprobs or ())
        return JsonList(chain((None,), ranked)).written()

    def _completion_logprobs(
        self, index: int, of: CollectedAnswer | Delta, *, first: bool
    ) -> Json | None:
        if not self._options.logprobs:
            return None
        echo = self._prompt_places(index) if first and self._options.echo else ()
        return self._writer.completion(chain(echo, self._places(index, of)))

    def _places(self, index: int, of: CollectedAnswer | Delta) -> Iterator[TokenPlace]:
        """Yield the positions of output tokens in the shown text."""
        if self._echo_only:
            return
        begin = len(self._echo_text(index))
        known: Iterable[TokenLogprobs | None] = of.logprobs or repeat(None, len(of.tokens))
        for token, offset, entry in zip(of.tokens, of.offsets, known, strict=True):
            yield TokenPlace(token, begin + offset, entry)

    def _prompt_places(self, index: int) -> Iterator[TokenPlace]:
        leader = self.choices[index - index % self._options.n]
        known = chain((None,), leader.prompt_logprobs or ())
        offsets = offsets_in(self._echo_text(index), self._writer.pieces(leader.prompt))
        for token, offset, entry in zip(leader.prompt, offsets, known, strict=True):
            yield TokenPlace(token, offset, entry)
