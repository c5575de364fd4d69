"""`LLM`: a model in the user's own program, with its engine in a separate process."""

import asyncio
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec
from typing_extensions import TypeIs  # in typing from Python 3.13 on

from twolane.common.errors import FieldError
from twolane.common.resources import open_standard_files
from twolane.engine.config import EngineConfig
from twolane.engine.messages import FinishReason
from twolane.frontend.answer_formats import ModelFormats
from twolane.frontend.body import Body, read
from twolane.frontend.engine_client import EngineClient, ignore_progress
from twolane.frontend.fields import (
    FormatFields,
    Rendering,
    TextFields,
    read_messages,
    read_prompt,
    read_prompts,
)
from twolane.frontend.generate_request import GenerateRequest
from twolane.frontend.generation import Generation
from twolane.frontend.prepare import Prepared, Preparer
from twolane.frontend.progress import AnswerBar, progress_bars
from twolane.frontend.startup import start_engine
from twolane.frontend.text.output_reader import CollectedAnswer, Delta
from twolane.frontend.text.texts import Texts
from twolane.params import LLMSamplingParams
from twolane.sampling import PackedLogprobs, SamplingParams, TokenLogprobs

T = TypeVar("T")
B = TypeVar("B", bound=Body)
Conversation = Sequence[Mapping[str, Any]]
Prompt = str | list[int]
Params = SamplingParams | Sequence[SamplingParams] | None
VLLM_NAMES: Mapping[str, str] = {
    "max_num_seqs": "max_running",
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_cache",
}
"""Settings of vLLM's `LLM` that have another name here."""
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "enforce_eager": (False,),
    "trust_remote_code": (False, True),
}
"""Settings of vLLM's `LLM` with the values that ask for nothing: CUDA graphs are always used on a
GPU, and code of a checkpoint, which may run or not, is not needed."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of all methods, in addition to the sampling parameters."""

    n: int
    """Number of answers to each prompt; by default 1."""
    stop: str | Sequence[str]
    """Strings that end the answer where one of them begins; by default none."""
    include_stop_str_in_output: bool
    """Whether the text includes the string or token that stopped it; by default False."""
    skip_special_tokens: bool
    """Whether special tokens are left out of the text; by default True."""
    add_special_tokens: bool
    """Whether the tokenizer adds its own tokens around the prompt; by default True, but False for
    conversations, whose chat template adds them."""
    truncate_prompt_tokens: int
    """Number of last tokens of a prompt to keep; -1 keeps as many as fit into the context. By
    default all are kept."""
    cache_salt: str
    """Salt of the prefix cache: only calls with the same salt share prefixes; by default none."""
    structured_outputs: Mapping[str, Any]
    """Format of the answer, as the field of this name of /v1/completions; by default free text."""
    lora: str
    """Name of the adapter that answers, from the setting `lora`; by default the model itself."""


class AdapterChoice(Body):
    """The keyword `lora`, which requests to a server do not have: they name an adapter as model."""

    lora: str | None = None


class ChatOptions(GenerateOptions, total=False):
    """Keyword arguments for conversations, in addition to the sampling parameters."""

    add_generation_prompt: bool
    """Whether the prompt ends where the assistant's answer begins; by default True."""
    continue_final_message: bool
    """Whether the answer continues the last message; by default False."""
    chat_template_kwargs: Mapping[str, Any]
    """Variables of the chat template; by default none."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, or from `stream` the next piece of one."""

    index: int
    """Index of the answer among the `n` to its prompt."""
    text: str
    """The text, without special tokens and without what stopped it unless asked for."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Reason for which the answer ended; None for a piece that is not the last."""
    stop_reason: int | str | None
    """The stop token or string that ended the answer."""
    logprobs: list[TokenLogprobs] | None
    """Log-probabilities of each token, if `SamplingParams.logprobs` asks for them."""


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt."""

    prompt: str | None
    """The prompt as given; None for token ids and conversations."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs] | None
    """Log-probabilities of each prompt token but the first, if `SamplingParams.prompt_logprobs`
    asks for them."""
    outputs: list[CompletionOutput]
    cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason for which the first answer ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the first answer, if asked for."""
        return self.outputs[0].logprobs


class LLM:
    """A model for offline use.

    The engine is a separate process, and a thread of this process talks to it. So an LLM works in
    scripts, in Jupyter and in programs with an event loop, where calls block the loop unless they
    are made as `await asyncio.to_thread(llm.generate, …)`. Ctrl-C aborts a call, frees what it
    held, and leaves the LLM usable. The engine ends with `close`, with the `with` block, or when
    the LLM is garbage-collected.

    Every method takes `GenerateOptions` by keyword: `n`, `stop`, `include_stop_str_in_output`,
    `skip_special_tokens`, `add_special_tokens`, `truncate_prompt_tokens`, `cache_salt`,
    `structured_outputs`, `lora`.
    Methods for conversations take `ChatOptions` too.

    Examples:
        >>> from twolane import LLM, SamplingParams
        >>> with LLM("smollm2-135m-instruct") as llm:
        ...     outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))

    Args:
        model: an alias, a local directory, a GGUF file, a built-in shape or a Hugging Face id.
        progress: true if progress bars are shown on standard error; None shows them in a terminal.
        settings: fields of `twolane.engine.config.EngineConfig`, such as `system` or `kv_tokens`;
            also by vLLM's names `max_num_seqs`, `block_size` and `enable_prefix_caching`.

    Raises:
        TypeError: a setting does not exist; the message says what to use instead.
        ValueError: a setting is wrong, or the model does not exist.
        PullError: the model could not be downloaded.
        EngineError: the engine could not start, for instance with an unsupported model.
    """

    def __init__(self, model: str, *, progress: bool | None = None, **settings: Any) -> None:
        config = EngineConfig(model=model, **known_settings(settings))
        open_standard_files()  # which a daemon may lack
        self._progress = sys.stderr.isatty() if progress is None else progress
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=run_loop, args=[self._loop], name="twolane-llm", daemon=True
        )
        self._thread.start()
        self._closed = False
        self._process = os.getpid()
        """The process in which the loop's thread runs: one that is forked has no such thread."""
        self._closing = threading.RLock()
        bars = progress_bars() if self._progress else contextlib.nullcontext(ignore_progress)
        try:
            with bars as show:
                self._engine, self._texts, sampling, _ = self._run(start_engine(config, show))
                self._params = SamplingParams(**sampling)
                formats = ModelFormats(
                    self._texts.template_source, shows_tools=self._texts.shows_tools
                )
                self._preparer = Preparer(self._engine, self._texts, formats)
        except BaseException:
            self._stop_loop()
            raise
        self._dropped = weakref.finalize(self, end_dropped, self._engine, self._texts, self._loop)

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[list[int]],
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[RequestOutput]:
        """Continue prompts of text or token ids, all at the same time; answers keep their order.

        Args:
            prompts: one text, texts, one list of token ids, or lists of token ids.
            params: sampling parameters of all prompts, or one for each; None takes the defaults of
                the model's `generation_config.json`, and otherwise `SamplingParams()`.
            progress: true if a progress bar is shown; None shows it for several prompts if the LLM
                shows bars.
            options: see `GenerateOptions`.

        Raises:
            ValueError: a prompt is empty, too long or not text where text is needed, or something
                has the wrong type.
            EngineError, GenerationFailed: the engine died.
        """
        asked = [{"prompts": [prompt]} for prompt in read_prompts(prompts)]
        return self._answer(asked, params, progress, options)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at the same time, through the model's chat template.

        Messages are those of /v1/chat/completions. Arguments and errors are those of `generate`. A
        missing template, and one that refuses the messages or drops a word, are ValueErrors too.
        """
        rendering = chosen(Rendering, options)
        asked = [
            {"conversation": rendering.conversation(read_messages(turns, name))}
            for name, turns in conversations(messages)
        ]
        return self._answer(asked, params, progress, options, Rendering)

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[CompletionOutput]:
        """Answer one prompt or conversation in pieces, as the engine delivers tokens.

        Each piece has the new text and tokens of one answer. Leaving the loop (`break`, or
        `close()` on the result) aborts the rest.

        Examples:
            >>> for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
            ...     print(piece.text, end="", flush=True)

        Raises:
            ValueError, EngineError, GenerationFailed: see `generate`; the last two while reading.
        """
        asked: dict[str, Any]
        forms: tuple[type[Body], ...] = ()
        if is_conversation(prompt):
            forms, rendering = (Rendering,), chosen(Rendering, options)
            asked = {"conversation": rendering.conversation(read_messages(prompt, "messages"))}
        else:
            asked = {"prompts": [read_prompt(prompt)]}
        params = params or self._params
        request = self._request(params, options, *forms, stream=True, **asked)
        if params.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "cannot be streamed")
        return self._pieces(self._run(self._preparer.prepare(request)))

    def close(self) -> None:
        """End the engine process; a second call does nothing.

        Calls under way in other threads raise GenerationFailed. In a process that was forked from
        the one that started the engine it does nothing.
        """
        if self._process != os.getpid():
            return
        with self._closing:
            if not self._closed:
                self._run(self._end())
                self._closed = True
                self._dropped.detach()
                self._stop_loop()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _request(
        self, params: SamplingParams, options: GenerateOptions, *forms: type[Body], **more: Any
    ) -> GenerateRequest:
        """Return a request; `forms`: see `text_fields`."""
        own: dict[str, Any] = {}
        if isinstance(params, LLMSamplingParams):
            own, params = params.options, params.of_engine
        check_params(params)
        given = {**own, **options}
        fields, lora = text_fields(given, *forms), chosen(AdapterChoice, options).lora
        form = chosen(FormatFields, given).format
        if form.constraint is not None and params.grammar is not None:
            raise FieldError("structured_outputs", "cannot be combined with grammar")
        return GenerateRequest(
            sampling=params, adapter=lora, format=form, **fields.answering, **more
        )

    def _answer(
        self,
        asked: Sequence[Mapping[str, Any]],
        params: Params,
        progress: bool | None,
        options: GenerateOptions,
        *forms: type[Body],
    ) -> list[RequestOutput]:
        """Answer all; each of `asked` has the fields of `GenerateRequest` that are its own."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or self._params] * len(asked)
        if len(params) != len(asked):
            raise ValueError(f"{len(params)} sampling parameters for {len(asked)} prompts")
        requests = [
            self._request(one, options, *forms, label=f"prompt {index}", **own)
            for index, (one, own) in enumerate(zip(params, asked, strict=True))
        ]
        shown = self._progress and len(asked) > 1 if progress is None else progress
        prepared = self._run(self._prepare_all(requests))
        with AnswerBar(len(asked), shown=shown) as bar:
            return self._run(self._answer_all(prepared, bar))

    async def _prepare_all(self, requests: Sequence[GenerateRequest]) -> list[Prepared]:
        return [await self._preparer.prepare(request) for request in requests]

    async def _answer_all(
        self, requests: Sequence[Prepared], bar: AnswerBar
    ) -> list[RequestOutput]:
        """Keep a bounded number of prompts with the engine, until all are answered."""
        answers: dict[int, RequestOutput] = {}
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for index, prepared in waiting:  # shared: each prompt is taken once
                answers[index] = answer = await self._one(prepared)
                made = sum(len(output.token_ids) for output in answer.outputs)
                bar.add(len(answer.prompt_token_ids), made)

        most = max((prepared.request.n for prepared in requests), default=1)
        # Largest number of answers that the engine has at a time.
        workers = min(len(requests), max(1, 1024 // most))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answers[index] for index in range(len(requests))]

    async def _one(self, prepared: Prepared) -> RequestOutput:
        [prompt] = prepared.prompts
        choices = [CollectedAnswer(prompt.tokens) for _ in range(prepared.request.n)]
        with Generation(self._engine, self._texts.codec, prepared) as generation:
            async for delta in generation:
                choices[delta.index].add(delta)
        return RequestOutput(
            prompt=next((text for text in prepared.request.prompts if isinstance(text, str)), None),
            prompt_token_ids=prompt.tokens,
            prompt_logprobs=unpacked(choices[0].prompt_logprobs),
            outputs=[
                CompletionOutput(i, c.text, c.tokens, c.finish, c.stop_reason, unpacked(c.logprobs))
                for i, c in enumerate(choices)
            ],
            cached_tokens=choices[0].cached,
        )

    def _pieces(self, prepared: Prepared) -> Iterator[CompletionOutput]:
        """Yield the deltas of one prompt from the loop's thread."""

        async def begin() -> Generation:
            return Generation(self._engine, self._texts.codec, prepared)

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

    async def _end(self) -> None:
        """Stop the engine and fail all waiting calls, before the loop stops."""
        await self._preparer.close()
        await self._engine.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop's thread; an interrupt cancels it.

        Raises:
            RuntimeError: it is closed, or this process was forked from the one that it belongs to.
        """
        if self._process != os.getpid():  # before the lock, which a thread of that process may hold
            work.close()
            raise RuntimeError("this LLM belongs to the process that this one was forked from")
        with self._closing:  # nothing comes to the loop after `_end`
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


def known_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their names here.

    Raises:
        TypeError: there is no such setting, or it is given by two names.
    """
    known, made = EngineConfig.__struct_fields__[1:], dict[str, Any]()
    for given, value in settings.items():
        name = VLLM_NAMES.get(given, given)
        if value in WITHOUT_EFFECT.get(given, ()):
            continue
        if name not in known:
            raise TypeError(
                f"LLM: {name} is not a setting: there are {', '.join(sorted(known))}; "
                "docs/guides/from-vllm.md says what those of other engines are here"
            )
        if name in made:
            raise TypeError(f"LLM: {name} is given twice, once by vLLM's name")
        made[name] = value
    return made


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and close it."""
    loop.run_forever()
    loop.close()


def end_dropped(engine: EngineClient, texts: Texts, loop: asyncio.AbstractEventLoop) -> None:
    """Stop the engine of an LLM that is garbage or whose program ends.

    Nobody waits for it: whoever drops the last reference may be the loop's own thread.
    """

    async def end() -> None:
        await texts.close()
        await engine.close()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)


def is_conversation(
    messages: Prompt | Conversation | Sequence[Conversation],
) -> "TypeIs[Conversation]":
    """Return whether this is one conversation: a list of messages."""
    return bool(messages) and not isinstance(messages, str) and isinstance(messages[0], Mapping)


def conversations(
    messages: Conversation | Sequence[Conversation],
) -> Iterator[tuple[str, Conversation]]:
    """Yield each conversation of one or several, with the name that errors give it."""
    several = (
        isinstance(messages, list | tuple) and bool(messages) and not is_conversation(messages)
    )
    if not several or not all(isinstance(turns, list | tuple) for turns in messages):
        yield "messages", messages  # type: ignore[misc]  # one, or none, which is refused
        return
    for place, turns in enumerate(messages):
        yield f"messages[{place}]", turns  # type: ignore[misc]


def text_fields(options: Mapping[str, Any], *others: type[Body]) -> TextFields:
    """Return the options of answers and their text.

    Args:
        options: the keywords that the caller gives.
        others: forms that have the keywords which `TextFields` lacks.

    Raises:
        ValueError: one of them cannot be.
        TypeError: there is no such keyword.
    """
    forms: tuple[type[Body], ...] = (TextFields, FormatFields, AdapterChoice, *others)
    known = {name for form in forms for name in form.model_fields}
    if unknown := options.keys() - known:
        raise TypeError(f"there is no argument {min(unknown)!r}")
    return chosen(TextFields, options)


def unpacked(logprobs: PackedLogprobs | None) -> list[TokenLogprobs] | None:
    """Return log-probabilities as objects."""
    return None if logprobs is None else list(logprobs)


def chosen(form: type[B], options: Mapping[str, Any]) -> B:
    """Return the options that are fields of a model.

    Raises:
        ValueError: one of them cannot be.
    """
    return read(form, {name: options[name] for name in form.model_fields.keys() & options.keys()})


def check_params(params: SamplingParams) -> None:
    """Refuse sampling parameters of a wrong type, and those whose effect would be invisible.

    Raises:
        ValueError: one of them is such.
    """
    check_type(params, SamplingParams, "sampling parameters")
    if params.embeds:
        raise FieldError("embeds", "is for /v1/embeddings alone: no answer has hidden states")


def check_type(value: object, form: type, name: str) -> None:
    """Check nested types, which constructors do not, before they are sent to the engine.

    The engine would end at what it cannot read, and with it all that runs.

    Raises:
        ValueError: one of them is wrong.
    """
    try:
        msgspec.convert(msgspec.to_builtins(value), form)
    except (TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"{name}: {error}") from error
