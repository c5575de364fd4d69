"""Offline use: a model in the user's own program, its engine in a process beside it."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from twolane.api.answers import Choice
from twolane.api.generation import Generation
from twolane.api.startup import start_engine
from twolane.engine.config import EngineConfig
from twolane.engine.messages import FinishReason
from twolane.sampling import SamplingParams

T = TypeVar("T")
Conversation = Sequence[Mapping[str, str]]
OPEN_MOST = 1024
"""Prompts that are with the engine at once."""


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt."""

    prompt: str | None
    """As given; None for token ids."""
    prompt_token_ids: list[int]
    text: str
    """Without special tokens, and without the token that stopped it."""
    token_ids: list[int]
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


class LLM:
    """A model for offline use.

    Example:
        >>> from twolane import LLM, SamplingParams
        >>> with LLM("smollm2-135m-instruct") as llm:
        ...     outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))

    Args:
        model: an alias, a local directory, a GGUF file, a built-in shape or a Hugging Face id.
        settings: fields of `twolane.engine.config.EngineConfig`, such as `system` or `kv_tokens`.

    Raises:
        ValueError: a setting is wrong, or the model is not there.
        PullError: the model could not be fetched.
        EngineError: the engine could not start, for instance with an unsupported model.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        config = EngineConfig(model=model, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="twolane-llm", daemon=True
        )
        self._thread.start()
        self._closed = False
        try:
            self._engine, self._codec = self._run(start_engine(config))
        except BaseException:
            self._stop_loop()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts of text or token ids, all side by side; answers are in their order.

        Args:
            prompts: one text, texts, or lists of token ids.
            params: for all prompts, or one each.

        Raises:
            ValueError: a prompt is empty, too long or not text where text is needed.
            GenerationFailed: the engine died.
        """
        given: list[str | list[int]] = [prompts] if isinstance(prompts, str) else [*prompts]
        tokens = [p if isinstance(p, list) else self._codec.encode(p) for p in given]
        texts = [None if isinstance(p, list) else p for p in given]
        return self._answer(texts, tokens, params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several side by side, through the model's chat template.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
            GenerationFailed: the engine died.
        """
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        tokens = [self._codec.chat(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self._answer([None] * len(tokens), tokens, params)

    def close(self) -> None:
        """End the engine process. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._run(self._engine.close())
            self._stop_loop()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(
        self,
        texts: Sequence[str | None],
        tokens: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(tokens)
        if len(params) != len(tokens):
            raise ValueError(f"{len(params)} sampling parameters for {len(tokens)} prompts")
        self._check(tokens)
        choices = self._run(self._generate(tokens, params))
        return [_output(text, choice) for text, choice in zip(texts, choices, strict=True)]

    def _check(self, prompts: Sequence[list[int]]) -> None:
        ready = self._engine.ready
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < ready.max_model_len:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; it must have at least 1 and at "
                    f"most {ready.max_model_len - 1}"
                )
            if not 0 <= min(prompt) <= max(prompt) < ready.vocab_size:
                raise ValueError(f"prompt {index} has token ids outside 0..{ready.vocab_size - 1}")

    async def _generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[Choice]:
        room = asyncio.Semaphore(OPEN_MOST)

        async def one(prompt: list[int], chosen: SamplingParams) -> Choice:
            choice = Choice(prompt)
            async with room:
                with Generation(self._engine, self._codec, [prompt], [chosen]) as generation:
                    async for delta in generation:
                        choice.add(delta)
            return choice

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(p, c)) for p, c in zip(prompts, params, strict=True)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop's thread; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _output(prompt: str | None, choice: Choice) -> RequestOutput:
    assert choice.finish is not None
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=choice.prompt,
        text=choice.text,
        token_ids=choice.tokens,
        finish_reason=choice.finish,
        cached_tokens=choice.cached,
    )
