"""The life of a request on the API process's side: from tokens to the engine, and back to text."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from twolane.engine.messages import (
    FinishReason,
    Output,
    PackedLogprobs,
    Refused,
    Submit,
    TokenLogprobs,
)
from twolane.frontend.engine_client import EngineClient, EngineGone, Event
from twolane.frontend.parsers.reasoning import AnswerGate, Thinking
from twolane.frontend.text.codec import TextCodec, TextError
from twolane.frontend.text.stops import StopStrings
from twolane.sampling import SamplingParams
from twolane.slo import Slo

SEEDS = 2**64
"""Number of different seeds, which are signed numbers of 64 bits."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become text, and which text ends an answer."""

    stop: tuple[str, ...] = ()
    """The answer ends where one of these begins."""
    include_stop: bool = False
    """Show what stopped the answer, string or token."""
    skip_special_tokens: bool = True
    thinking: Thinking | None = None
    """Whether thinking comes first, in which stop strings do not count; None: all text counts."""


class Delta(msgspec.Struct, frozen=True):
    """What one engine event adds to one answer."""

    index: int
    """Index of the answer within its request."""
    text: str
    tokens: list[int]
    offsets: list[int]
    """Where in the answer's text each token begins, in characters, from before anything is held
    back or cut off."""
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or string that ended the answer; None: end of sequence, or length."""
    cached: int | None = None
    """Prompt tokens found in the prefix cache; with the first delta only."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, if asked for."""
    prompt_logprobs: PackedLogprobs | None = None
    """One for each prompt token but the first, if asked for; with the first delta only."""
    embedding: bytes | None = None
    """The last hidden state of the prompt's last token in float32, if asked for; with the first
    delta only."""


Taker = Callable[[Delta], bool]
"""Takes a delta, or says that it does not."""


class GenerationFailed(Exception):
    """The request ended without a full answer; the message says why."""


class GenerationRefused(ValueError):
    """The engine refused the request.

    Args:
        refused: what the engine said.
    """

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused

    @property
    def param(self) -> str | None:
        """Name of the request field at fault, if the engine named one."""
        return self.refused.field


class Observer(Protocol):
    """Is told of every event of a generation; each answer has one ending."""

    def tokens(self, index: int, count: int, now: float, cached: int | None) -> None:
        """New tokens arrived that are part of the answer; with the first, how many prompt tokens
        the prefix cache had."""
        ...

    def ended(self, index: int, event: Event | None, now: float) -> None:
        """The answer's last event arrived; None: it was given up."""
        ...


class Unobserved:
    """Is told and does nothing."""

    def tokens(self, index: int, count: int, now: float, cached: int | None) -> None:
        """Do nothing."""

    def ended(self, index: int, event: Event | None, now: float) -> None:
        """Do nothing."""


UNOBSERVED = Unobserved()


class OutputReader:
    """Turns the engine's news of one answer into text, and finds its stop strings.

    Args:
        index: of the answer.
        codec: the tokenizer.
        prompt: its tokens.
        params: of the answer.
        options: of its text.
        eos_token_ids: which end an answer without being its reason to stop.
    """

    def __init__(
        self,
        index: int,
        codec: TextCodec,
        prompt: Sequence[int],
        params: SamplingParams,
        options: TextOptions,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.count = 0
        """Tokens of the answer so far."""
        self.stopped = False
        """A stop string has come: nothing after it belongs to the answer."""
        self._index = index
        self._params = params
        self._include_stop = options.include_stop
        self._no_reason = () if params.ignore_eos else tuple(eos_token_ids)
        self._detokenizer = codec.detokenizer(
            prompt, skip_special_tokens=options.skip_special_tokens
        )
        self._stops = StopStrings(options.stop, include=options.include_stop)
        gated = options.stop and options.thinking
        self._gate = AnswerGate(gated) if gated else None
        self._length = 0

    def read(self, output: Output) -> Delta:
        """Take the engine's news of this answer."""
        texts: list[str] = []
        offsets: list[int] = []
        stop: int | str | None = None
        for token in output.tokens:
            self.count += 1
            offsets.append(self._length)
            last = output.finish == "stop" and len(offsets) == len(output.tokens)
            if last and token not in self._no_reason:
                stop = token
            if last and not self._include_stop:
                break
            text, stop_string = self._show(self._detokenizer.step(token))
            texts.append(text)
            if stop_string is not None:
                self.stopped, stop = True, stop_string
                break
        if output.finish is not None and not self.stopped:
            text, stop_string = self._show(self._detokenizer.flush(), last=True)
            self.stopped, stop = stop_string is not None, stop_string or stop
            texts += [text, self._stops.flush()]
        kept = len(offsets)
        return Delta(
            self._index,
            "".join(texts),
            output.tokens[:kept],
            offsets,
            "stop" if self.stopped else output.finish,
            stop,
            output.cached,
            None if output.logprobs is None else output.logprobs[:kept],
            output.prompt_logprobs,
            output.embedding,
        )

    def _show(self, piece: str, *, last: bool = False) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it."""
        self._length += len(piece)
        thought, early = "", self.count < self._params.min_tokens
        if self._gate is not None:
            thought, piece = self._gate.feed(piece)
            piece += self._gate.release() if early or last else ""
        if early:
            return thought + piece, None
        found = self._stops.feed(piece)
        return thought + found.text, found.stop


class Generation:
    """One or more prompts of one request, each answered once or `n` times, side by side.

    Iterate over the deltas of all answers; leave the context to give up what has not ended. The
    answers to the first prompt come first: answer j of prompt i has the index i * n + j.

    Raises:
        EngineError: on construction, when the engine is gone.
        GenerationFailed: while iterating, when the engine dies or breaks an answer off.
        GenerationRefused: while iterating, when the engine refuses a prompt or the tokenizer fails
            to decode an answer; on construction, when it fails to decode a prompt.
    """

    def __init__(
        self,
        engine: EngineClient,
        codec: TextCodec,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        n: int = 1,
        text: TextOptions = TextOptions(),  # noqa: B008  # frozen
        priority: int = 0,
        cache_salt: str | None = None,
        slo: Slo = Slo(),  # noqa: B008  # frozen
        lora: str | None = None,
        observer: Observer = UNOBSERVED,
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._events: asyncio.Queue[Delta | Event | Exception | None] = asyncio.Queue()
        self._taker: Taker | None = None
        self._awaited = False
        """Somebody iterates, and has had all that was in the queue."""
        self._readers: list[OutputReader] = []
        base = uuid.uuid4().hex
        eos = engine.ready.eos_token_ids
        # Those that only the tokenizer's files declare; the engine does not read them.
        more = [t for t in codec.ends if t not in eos and t < engine.ready.vocab_size]
        self._open = {index: f"{base}-{index}" for index in range(len(prompts) * n)}
        try:
            for index, id in list(self._open.items()):
                prompt, place = divmod(index, n)
                leader = self._open.get(index - place) if place else None
                chosen = of_answer(params[prompt], place)
                tokens = prompts[prompt]
                self._readers.append(
                    OutputReader(index, codec, tokens, chosen, text, [*eos, *more])
                )
                ended = ended_by(chosen, more)
                submit = Submit(id, tokens, ended, priority, slo, leader, cache_salt, lora)
                self._submit(index, submit)
        except TextError as error:  # of the prompt's end, behind which the answer is read
            broken = Refused(base, "broken", str(error))
            self.close(broken)
            raise GenerationRefused(broken) from error
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until every answer has ended."""
        while self._open or not self._events.empty():
            self._awaited = self._events.empty()
            match await self._events.get():
                case Delta() as delta:
                    yield delta
                case Output():
                    raise GenerationFailed("the engine gave the request up")
                case Refused() as refused:
                    raise GenerationRefused(refused)
                case EngineGone() as gone:
                    raise GenerationFailed(gone.message)
                case Exception() as error:
                    raise error

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def offer(self, taker: Taker) -> None:
        """From now on offer `taker` each delta that comes while the next one is awaited, at once,
        but for those with which answers end. Who iterates gets what it does not take, and the rest.
        """
        self._taker = taker

    def close(self, reason: Event | None = None) -> None:
        """Give up the answers that have not ended; None: because nobody waits for them."""
        for index, id in list(self._open.items()):
            self._engine.abort(id)
            self._end(index, reason, time.monotonic())

    def _submit(self, index: int, submit: Submit) -> None:
        def sink(event: Event) -> None:
            self._receive(index, event)

        self._engine.submit(submit, sink)

    def _receive(self, index: int, event: Event) -> None:
        """Take an event of the engine, at once: what is counted is what the client gets."""
        reader, now = self._readers[index], time.monotonic()
        told: Delta | Event | None = event
        if reader.stopped:
            told = None  # the client has its full answer, whatever comes now
        elif isinstance(event, Output) and event.finish != "abort":
            try:
                told = self._read(reader, index, event, now)
            except TextError as error:  # others' tokens come this way, too
                self._engine.abort(self._open[index])
                told = event = Refused(self._open[index], "broken", str(error))
        if not isinstance(event, Output) or event.finish is not None:
            if isinstance(event, Output) and reader.stopped:
                event = msgspec.structs.replace(event, finish="stop")
            self._end(index, event, now)
        if not self._taken(told):
            self._put(told)

    def _taken(self, told: Delta | Event | None) -> bool:
        if self._taker is None or not self._awaited:
            return False
        try:
            return isinstance(told, Delta) and told.finish is None and self._taker(told)
        except Exception as error:  # whoever iterates gets it: others' tokens come this way, too
            self._put(error)
            return True

    def _put(self, told: Delta | Event | Exception | None) -> None:
        self._awaited = False
        self._events.put_nowait(told)

    def _read(self, reader: OutputReader, index: int, output: Output, now: float) -> Delta:
        delta = reader.read(output)
        if delta.tokens:
            self._observer.tokens(index, len(delta.tokens), now, output.cached)
        if reader.stopped and output.finish is None:
            self._engine.finish(self._open[index], reader.count)
        return delta

    def _end(self, index: int, event: Event | None, now: float) -> None:
        del self._open[index]
        self._observer.ended(index, event, now)


def ended_by(params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
    """Return the parameters with further end tokens, unless the request ignores those."""
    if not tokens or params.ignore_eos:
        return params
    stops = dict.fromkeys((*params.stop_token_ids, *tokens))
    return msgspec.structs.replace(params, stop_token_ids=tuple(stops))


def of_answer(params: SamplingParams, place: int) -> SamplingParams:
    """Return the parameters of one of several answers to a prompt.

    Each has a seed of its own, as in vLLM, and only the first computes what concerns the prompt.
    """
    if place == 0:
        return params
    seed = params.seed
    if seed is not None:
        seed = (seed + place + SEEDS // 2) % SEEDS - SEEDS // 2
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
