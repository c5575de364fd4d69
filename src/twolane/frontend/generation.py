"""Life of a request in the API process: to the engine as tokens, and back to text."""

import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol

import msgspec

from twolane.engine.messages import GRAMMAR, Output, Refused, Submit
from twolane.frontend.backlog import Backlog
from twolane.frontend.engine_client import EngineClient, EngineGone, Event
from twolane.frontend.prepare import Prepared
from twolane.frontend.text.codec import TextCodec, TextError
from twolane.frontend.text.output_reader import Delta, OutputReader
from twolane.sampling import SamplingParams

SEEDS = 2**64
"""Number of different seeds, which are signed 64-bit integers."""


DeltaSink = Callable[[Delta], bool]
"""Consumes a delta, or returns False."""


class GenerationFailed(Exception):
    """The request ended without a complete answer; the message says why."""


class GenerationRefused(ValueError):
    """The engine refused the request.

    Args:
        refused: the engine's message.
    """

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused

    @property
    def param(self) -> str | None:
        """Name of the request field at fault, if the engine named one."""
        return self.refused.field


class Observer(Protocol):
    """Observes every event of a generation; each answer has one ending."""

    def tokens(
        self, index: int, count: int, now: float, cached: int | None, due: float | None
    ) -> None:
        """Handle new tokens of the answer; `cached` is the number of cached prompt tokens, with the
        first ones, and `due` when pacing wanted them delivered, if it did."""

    def ended(self, index: int, event: Event | None, now: float) -> None:
        """Handle the answer's last event; None: it was abandoned."""


class Generation:
    """The answers to one or more prompts of one request, `n` for each, computed concurrently.

    Iterate over the deltas of all answers; leave the context to give up what has not ended. The
    answers to the first prompt come first: answer j of prompt i has the index i * n + j.

    Args:
        engine: a running engine.
        codec: the tokenizer of the engine's model.
        prepared: the request.
        observer: gets every event; None: nobody does.

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
        prepared: Prepared,
        observer: Observer | None = None,
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._prepared = prepared
        self.backlog: Backlog[Event | Exception | None] = Backlog()
        """Events that have not been iterated over yet."""
        self._sink: DeltaSink | None = None
        self._awaited = False
        """Whether an iterator waits and the backlog is empty."""
        self._readers: list[OutputReader] = []
        base, answers = uuid.uuid4().hex, len(prepared.prompts) * prepared.request.n
        self._open = {index: f"{base}-{index}" for index in range(answers)}
        try:
            for index in list(self._open):
                self._begin(index, codec)
        except TextError as error:  # of the prompt's end, after which the answer is read
            broken = Refused(base, "broken", str(error))
            self.close(broken)
            raise GenerationRefused(broken) from error
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until every answer has ended."""
        while self._open or not self.backlog.empty:
            self._awaited = self.backlog.empty
            match await self.backlog.take():
                case Delta() as delta:
                    yield delta
                case Output():
                    raise GenerationFailed("the engine gave the request up")
                case Refused() as refused:
                    raise GenerationRefused(self._by_name(refused))
                case EngineGone() as gone:
                    raise GenerationFailed(gone.message)
                case Exception() as error:
                    raise error

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def offer(self, sink: DeltaSink) -> None:
        """Offer later deltas directly to `sink` while the iterator waits, except the last of each
        answer; the iterator gets the deltas that it does not take, and the rest."""
        self._sink = sink

    def close(self, reason: Event | None = None) -> None:
        """Abort the answers that have not ended, with `reason`; None: their client left."""
        for index, id in list(self._open.items()):
            self._engine.abort(id)
            self._end(index, reason, time.monotonic())

    def _begin(self, index: int, codec: TextCodec) -> None:
        """Send an answer to the engine."""
        prepared = self._prepared
        request = prepared.request
        prompt, place = divmod(index, request.n)  # the second among the answers to the prompt
        tokens, params = prepared.prompts[prompt].tokens, of_answer(prepared.params, place)
        ends = [*self._engine.ready.eos_token_ids, *prepared.rules.ends]
        reader = OutputReader(index, codec, tokens, params, prepared.text, ends)
        self._readers.append(reader)
        submit = Submit(
            self._open[index],
            tokens,
            params,
            request.priority,
            request.slo,
            self._open.get(index - place) if place else None,
            request.cache_salt,
            request.adapter,
            prepared.rules,
            request.key,
        )
        self._engine.submit(submit, partial(self._receive, index))

    def _receive(self, index: int, event: Event) -> None:
        """Handle an event of the engine when it arrives: what is counted is what the client
        gets."""
        reader, now = self._readers[index], time.monotonic()
        item: Delta | Event | None = event
        if reader.stopped:
            item = None  # the client has its full answer, whatever comes now
        elif isinstance(event, Output) and event.finish != "abort":
            try:
                item = self._read(reader, index, event, now)
            except TextError as error:  # others' tokens come this way, too
                self._engine.abort(self._open[index])
                item = event = Refused(self._open[index], "broken", str(error))
        if not isinstance(event, Output) or event.finish is not None:
            if isinstance(event, Output) and reader.stopped:
                event = msgspec.structs.replace(event, finish="stop")
            self._end(index, event, now)
        if not self._taken(item):
            self._put(item)

    def _by_name(self, refused: Refused) -> Refused:
        """Return a refusal with the client's name of the field at fault."""
        job = self._prepared.format.grammar_job
        if refused.field != GRAMMAR or job is None:
            return refused
        message = job.field + refused.message.removeprefix(GRAMMAR)
        return msgspec.structs.replace(refused, message=message, field=job.field)

    def _taken(self, item: Delta | Event | None) -> bool:
        if self._sink is None or not self._awaited:
            return False
        try:
            return isinstance(item, Delta) and item.finish is None and self._sink(item)
        except Exception as error:  # whoever iterates gets it: others' tokens come this way, too
            self._put(error)
            return True

    def _put(self, item: Delta | Event | Exception | None) -> None:
        self._awaited = False
        self.backlog.put(item)

    def _read(self, reader: OutputReader, index: int, output: Output, now: float) -> Delta:
        delta = reader.read(output)
        if delta.tokens and self._observer is not None:
            self._observer.tokens(index, len(delta.tokens), now, output.cached, output.due)
        if reader.stopped and output.finish is None:
            self._engine.finish(self._open[index], reader.count)
        return delta

    def _end(self, index: int, event: Event | None, now: float) -> None:
        del self._open[index]
        if self._observer is not None:
            self._observer.ended(index, event, now)


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
