"""Offline use: a model in the user's own program, its engine in a process beside it."""

import asyncio
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twolane.engine.config import EngineConfig
from twolane.engine.messages import FinishReason
from twolane.frontend.engine_client import EngineClient, ignore_progress
from twolane.frontend.generation import Delta, Generation, TextOptions
from twolane.frontend.progress import progress_bars
from twolane.frontend.startup import start_engine
from twolane.sampling import SamplingParams, TokenLogprobs
from twolane.server.openai.answers import Choice

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # in typing from Python 3.13 on

T = TypeVar("T")
Conversation = Sequence[Mapping[str, Any]]
Prompt = str | list[int]
Params = SamplingParams | Sequence[SamplingParams] | None
OPEN_MOST = 1024
"""Answers that the engine works on at once."""


class GenerateOptions(TypedDict, total=False):
    """What may be asked for beside the sampling parameters, by keyword."""

    n: int
    """Answers to each prompt; 1."""
    stop: str | Sequence[str]
    """The answer ends where one of these begins; none."""
    include_stop_str_in_output: bool
    """Show what stopped the answer; False."""
    skip_special_tokens: bool
    """Leave special tokens out of the text; True."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, or a piece of one: the pieces put together are the answer."""

    index: int
    """Of the answer among the `n` to its prompt."""
    text: str
    """Without special tokens, and without what stopped it."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    """None: there is more to come."""
    stop_reason: int | str | None
    """The stop token or string that ended the answer."""
    logprobs: list[TokenLogprobs] | None
    """One for each token, if `SamplingParams.logprobs` asked for them."""


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt."""

    prompt: str | None
    """As given; None for token ids and conversations."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs] | None
    """One for each prompt token but the first, if `SamplingParams.prompt_logprobs` asked for it."""
    outputs: list[CompletionOutput]
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The first answer's log-probabilities, if asked for."""
        return self.outputs[0].logprobs


class LLM:
    """A model for offline use.

    The engine is a process of its own, and the talk with it has a thread of its own. So an LLM
    works in scripts, in Jupyter and in programs that run an event loop; there a call holds the
    loop, as any call that computes does, unless it is `await asyncio.to_thread(llm.generate, …)`.
    Ctrl-C breaks the call off, frees what it held, and leaves the LLM usable. The engine ends with
    `close`, with the `with` block, or when nobody holds the LLM any more.

    Every method takes `GenerateOptions` by keyword: `n`, `stop`, `include_stop_str_in_output`,
    `skip_special_tokens`.

    Example:
        >>> from twolane import LLM, SamplingParams
        >>> with LLM("smollm2-135m-instruct") as llm:
        ...     outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))

    Args:
        model: an alias, a local directory, a GGUF file, a built-in shape or a Hugging Face id.
        progress: whether to show bars, on standard error; None: if that is a terminal.
        settings: fields of `twolane.engine.config.EngineConfig`, such as `system` or `kv_tokens`.

    Raises:
        ValueError: a setting is wrong, or the model is not there.
        PullError: the model could not be fetched.
        EngineError: the engine could not start, for instance with an unsupported model.
    """

    def __init__(self, model: str, *, progress: bool | None = None, **settings: Any) -> None:
        config = EngineConfig(model=model, **settings)
        self._progress = sys.stderr.isatty() if progress is None else progress
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=run_loop, args=[self._loop], name="twolane-llm", daemon=True
        )
        self._thread.start()
        self._closed = False
        self._closing = threading.RLock()
        bars = progress_bars() if self._progress else contextlib.nullcontext(ignore_progress)
        try:
            with bars as show:
                self._engine, self._codec, sampling = self._run(start_engine(config, show))
                self._params = SamplingParams(**sampling)
        except BaseException:
            self._stop_loop()
            raise
        self._dropped = weakref.finalize(self, end_dropped, self._engine, self._loop)

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[list[int]],
        params: Params = None,
        *,
        progress: bool | None = None,
        **wishes: Unpack[GenerateOptions],
    ) -> list[RequestOutput]:
        """Continue prompts of text or token ids, all side by side; answers are in their order.

        Args:
            prompts: one text, texts, one list of token ids, or lists of token ids.
            params: for all prompts, or one each; None: as the model's `generation_config.json` has
                it, and otherwise `SamplingParams()`.
            progress: whether to show a bar; None: as the LLM does, for more than one prompt.
            wishes: see `GenerateOptions`.

        Raises:
            ValueError: a prompt is empty, too long or not text where text is needed, or something
                has the wrong type.
            EngineError, GenerationFailed: the engine died.
        """
        given: list[Prompt] = [prompts] if is_one(prompts) else list(prompts)
        tokens = [self._tokens(prompt) for prompt in given]
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._answer(texts, tokens, params, progress, wishes)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **wishes: Unpack[GenerateOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or several side by side, through the model's chat template.

        Arguments and errors are those of `generate`, and `chat_template_kwargs`: variables for the
        template. It is a ValueError, too, if there is no template or it refuses the messages.
        """
        conversations = [messages] if is_conversation(messages) else messages
        tokens = [self._conversation(turns, chat_template_kwargs) for turns in conversations]
        return self._answer([None] * len(tokens), tokens, params, progress, wishes)

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        **wishes: Unpack[GenerateOptions],
    ) -> Iterator[CompletionOutput]:
        """Answer one prompt or conversation piece by piece, as the tokens come.

        Each piece has what is new of one answer. Whoever stops reading (`break`, or `close()` on
        the result) gives the rest up.

        Example:
            >>> for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
            ...     print(piece.text, end="", flush=True)

        Raises:
            ValueError, EngineError, GenerationFailed: see `generate`; the last two while reading.
        """
        if is_conversation(prompt):
            tokens = self._conversation(prompt, None)
        else:
            tokens = self._tokens(prompt)
        self._check([tokens])
        params = params or self._params
        check_type(params, SamplingParams, "sampling parameters")
        options = self._options(wishes)
        return self._pieces(tokens, params, wishes.get("n", 1), options)

    def close(self) -> None:
        """End the engine process. Closing twice does nothing.

        Calls that run in other threads raise GenerationFailed.
        """
        with self._closing:
            if not self._closed:
                self._run(self._end())
                self._closed = True
                self._dropped.detach()
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

    def _tokens(self, prompt: Prompt) -> list[int]:
        return prompt if isinstance(prompt, list) else self._codec.encode(prompt)

    def _conversation(self, turns: Conversation, variables: Mapping[str, Any] | None) -> list[int]:
        return self._codec.chat([dict(turn) for turn in turns], variables=variables)

    def _check(self, prompts: Sequence[list[int]]) -> None:
        ready = self._engine.ready
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < ready.max_model_len:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; it must have at least 1 and at "
                    f"most {ready.max_model_len - 1}"
                )
            check_type(prompt, list[int], f"prompt {index}")
            if not 0 <= min(prompt) <= max(prompt) < ready.vocab_size:
                raise ValueError(f"prompt {index} has token ids outside 0..{ready.vocab_size - 1}")

    def _options(self, wishes: GenerateOptions) -> TextOptions:
        options = text_options(wishes)
        if options.stop and not self._codec.has_tokenizer:
            raise ValueError("stop needs text: this model was loaded without a tokenizer")
        return options

    def _answer(
        self,
        texts: Sequence[str | None],
        tokens: Sequence[list[int]],
        params: Params,
        progress: bool | None,
        wishes: GenerateOptions,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self._params] * len(tokens)
        if len(params) != len(tokens):
            raise ValueError(f"{len(params)} sampling parameters for {len(tokens)} prompts")
        self._check(tokens)
        for one in params:
            check_type(one, SamplingParams, "sampling parameters")
        options, n = self._options(wishes), wishes.get("n", 1)
        shown = self._progress and len(tokens) > 1 if progress is None else progress
        with Bar(len(tokens), shown=shown) as bar:
            work = self._answer_all(list(zip(texts, tokens, params, strict=True)), n, options, bar)
            return self._run(work)

    async def _answer_all(
        self,
        prompts: Sequence[tuple[str | None, list[int], SamplingParams]],
        n: int,
        options: TextOptions,
        bar: "Bar",
    ) -> list[RequestOutput]:
        """Keep a bounded number of prompts with the engine, until all are answered."""
        answers: dict[int, RequestOutput] = {}
        waiting = iter(enumerate(prompts))

        async def work() -> None:
            for index, (text, tokens, params) in waiting:  # shared: each prompt is taken once
                answers[index] = await self._one(text, tokens, params, n, options)
                bar.add(answers[index])

        workers = min(len(prompts), max(1, OPEN_MOST // n))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answers[index] for index in range(len(prompts))]

    async def _one(
        self,
        text: str | None,
        tokens: list[int],
        params: SamplingParams,
        n: int,
        options: TextOptions,
    ) -> RequestOutput:
        choices = [Choice(tokens) for _ in range(n)]
        with self._generation(tokens, params, n, options) as generation:
            async for delta in generation:
                choices[delta.index].add(delta)
        return RequestOutput(
            prompt=text,
            prompt_token_ids=tokens,
            prompt_logprobs=choices[0].prompt_logprobs,
            outputs=[
                CompletionOutput(i, c.text, c.tokens, c.finish, c.stop_reason, c.logprobs)
                for i, c in enumerate(choices)
            ],
            cached_tokens=choices[0].cached,
        )

    def _pieces(
        self, tokens: list[int], params: SamplingParams, n: int, options: TextOptions
    ) -> Iterator[CompletionOutput]:
        """Fetch the deltas of one prompt from the loop's thread, one by one."""

        async def begin() -> Generation:
            return self._generation(tokens, params, n, options)

        async def more() -> Delta | None:
            return await anext(deltas, None)

        generation = self._run(begin())
        deltas = aiter(generation)
        try:
            while (delta := self._run(more())) is not None:
                yield CompletionOutput(
                    delta.index,
                    delta.text,
                    delta.tokens,
                    delta.finish,
                    delta.stop_reason,
                    delta.logprobs,
                )
        finally:
            # Nobody waits for it: an abandoned stream may be collected in the loop's own thread.
            with contextlib.suppress(RuntimeError):  # closed: it ended with the engine
                self._loop.call_soon_threadsafe(generation.close)

    def _generation(
        self, tokens: list[int], params: SamplingParams, n: int, options: TextOptions
    ) -> Generation:
        return Generation(self._engine, self._codec, [tokens], [params], n=n, text=options)

    async def _end(self) -> None:
        """End the engine, and let all fail that waited for it, before the loop stops."""
        await self._engine.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop's thread; an interrupt cancels it."""
        with self._closing:  # nothing comes to the loop behind `_end`
            if self._closed:
                work.close()
                raise RuntimeError("this LLM is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and close it."""
    loop.run_forever()
    loop.close()


def end_dropped(engine: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
    """End the engine of an LLM that nobody holds any more, or whose program ends.

    Nobody waits for it: whoever drops the last reference may be the loop's own thread.
    """

    async def end() -> None:
        await engine.close()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)


class Bar:
    """How many prompts are answered, and how fast tokens come; on standard error.

    Args:
        total: prompts.
        shown: whether there is a bar at all.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rates]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._progress.add_task("prompts", total=total, rates="")
        self._began = time.monotonic()
        self._read = self._written = 0

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def add(self, answer: RequestOutput) -> None:
        """A prompt is answered."""
        self._read += len(answer.prompt_token_ids)
        self._written += sum(len(output.token_ids) for output in answer.outputs)
        seconds = max(time.monotonic() - self._began, 1e-9)
        read, written = self._read / seconds, self._written / seconds
        rates = f"{read:,.0f} prompt tokens/s, {written:,.0f} output tokens/s"
        self._progress.update(self._task, advance=1, rates=rates)


def is_conversation(
    given: Prompt | Conversation | Sequence[Conversation],
) -> "TypeIs[Conversation]":
    """Whether this is one conversation: a list of messages."""
    return bool(given) and not isinstance(given, str) and isinstance(given[0], Mapping)


def is_one(prompts: Prompt | Sequence[str] | Sequence[list[int]]) -> "TypeIs[Prompt]":
    """Whether this is one prompt: a text, or a list of token ids."""
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))


def check_type(given: object, form: type, name: str) -> None:
    """Look at the types inside of what is sent to the engine, as constructors do not.

    The engine would end at what it cannot read, and with it all that runs.

    Raises:
        ValueError: one of them is wrong.
    """
    try:
        msgspec.convert(msgspec.to_builtins(given), form)
    except (TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"{name}: {error}") from error


def text_options(wishes: GenerateOptions) -> TextOptions:
    """Return the form in which the front knows these wishes.

    Raises:
        ValueError: one of them cannot be.
        TypeError: there is no such keyword.
    """
    unknown = wishes.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"there is no argument {min(unknown)!r}")
    if not wishes.get("n", 1) >= 1:
        raise ValueError(f"n must be at least 1, not {wishes['n']!r}")
    stop = wishes.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stop):
        raise ValueError("stop must not be empty text")
    return TextOptions(
        stop=stop,
        include_stop=wishes.get("include_stop_str_in_output", False),
        skip_special_tokens=wishes.get("skip_special_tokens", True),
    )
