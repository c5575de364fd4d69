"""The life of a request on the front's side: from tokens to the engine, and back to text."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Protocol

import msgspec

from twolane.api.engine_client import EngineClient, EngineGone, Event
from twolane.api.text import TextCodec
from twolane.engine.messages import FinishReason, Output, Refused
from twolane.sampling import SamplingParams


class Delta(msgspec.Struct, frozen=True):
    """What one engine event adds to one prompt's answer."""

    index: int
    """Of the prompt within its request."""
    text: str
    tokens: list[int]
    finish: FinishReason | None = None
    cached: int | None = None
    """Prompt tokens found in the prefix cache; with the first delta only."""


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


class Observer(Protocol):
    """Is told of every event of a generation; each prompt has one ending."""

    def tokens(self, index: int, count: int, now: float) -> None:
        """New tokens arrived."""
        ...

    def ended(self, index: int, event: Event | None, now: float) -> None:
        """The prompt's last event arrived; None: it was given up."""
        ...


class Unobserved:
    """Is told and does nothing."""

    def tokens(self, index: int, count: int, now: float) -> None:
        """Do nothing."""

    def ended(self, index: int, event: Event | None, now: float) -> None:
        """Do nothing."""


UNOBSERVED = Unobserved()


class Generation:
    """One or more prompts of one request, answered side by side.

    Iterate over the deltas of all prompts; leave the context to give up what has not ended.

    Raises:
        EngineError: on construction, when the engine is gone.
        GenerationFailed: while iterating, when the engine dies or breaks a prompt off.
        GenerationRefused: while iterating, when the engine refuses a prompt.
    """

    def __init__(
        self,
        engine: EngineClient,
        codec: TextCodec,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        observer: Observer = UNOBSERVED,
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._detokenizers = [codec.detokenizer() for _ in prompts]
        base = uuid.uuid4().hex
        self._open = {index: f"{base}-{index}" for index in range(len(prompts))}
        try:
            for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
                self._submit(index, prompt, chosen, priority)
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until every prompt has ended."""
        while self._open or not self._events.empty():
            index, event = await self._events.get()
            match event:
                case Output(finish="abort"):
                    raise GenerationFailed("the engine gave the request up")
                case Output():
                    yield self._delta(index, event)
                case Refused():
                    raise GenerationRefused(event)
                case EngineGone():
                    raise GenerationFailed(event.message)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the prompts that have not ended."""
        for index, id in list(self._open.items()):
            self._engine.abort(id)
            self._end(index, None)

    def _submit(self, index: int, prompt: list[int], params: SamplingParams, priority: int) -> None:
        def sink(event: Event) -> None:
            self._receive(index, event)

        self._engine.submit(self._open[index], prompt, params, priority, sink)

    def _receive(self, index: int, event: Event) -> None:
        if isinstance(event, Output) and event.tokens:
            self._observer.tokens(index, len(event.tokens), time.monotonic())
        if not isinstance(event, Output) or event.finish is not None:
            self._end(index, event)
        self._events.put_nowait((index, event))

    def _end(self, index: int, event: Event | None) -> None:
        del self._open[index]
        self._observer.ended(index, event, time.monotonic())

    def _delta(self, index: int, output: Output) -> Delta:
        detokenizer = self._detokenizers[index]
        tokens = output.tokens
        # The token that stopped the answer ends it and is no part of its text.
        shown = tokens[:-1] if output.finish == "stop" else tokens
        text = "".join(detokenizer.step(token) for token in shown)
        if output.finish is not None:
            text += detokenizer.flush()
        return Delta(index, text, tokens, output.finish, output.cached)
