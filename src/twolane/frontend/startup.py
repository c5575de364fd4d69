"""Start of an engine with its tokenizer."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from twolane.engine.config import EngineConfig
from twolane.engine.messages import Progress
from twolane.engine.settings import check_served, context_length
from twolane.frontend.engine_client import EngineClient, ignore_progress
from twolane.frontend.liveness import HANG_SECONDS
from twolane.frontend.pooling import Embedding, read_embedding
from twolane.frontend.text.texts import Texts
from twolane.model.load.hub import ModelSource, resolve

FETCHING = "twolane-fetch"
"""Name of the thread that downloads a model."""
GIVING_UP_SECONDS, GIVING_UP_LOOKS = 2.0, 20
"""Seconds that a cancelled start waits for the download to end, and the number of checks."""


class Started(NamedTuple):
    """A running engine, and the API process's knowledge of the model."""

    engine: EngineClient
    texts: Texts
    sampling: Mapping[str, Any]
    """Defaults of `SamplingParams` that the model's authors recommend."""
    embedding: Embedding


async def start_engine(
    config: EngineConfig,
    on_progress: Callable[[Progress], None] = ignore_progress,
    log_level: str = "warning",
    *,
    hang_seconds: float = HANG_SECONDS,
    watchdog: bool | None = None,
) -> Started:
    """Download the model if necessary, start an engine and load the tokenizer.

    See `EngineClient.start` for the arguments.

    Raises:
        ValueError: a setting is wrong, or the model is not there, or one of its files is broken.
        PullError: the model could not be fetched.
        EngineError: the engine could not start, for instance with an unsupported model.
    """
    check_served(config)
    source = (await fetch(config)).with_chat_template(config.chat_template)
    if source.kind == "dir":  # the engine has no token to ask the Hugging Face hub again
        config = msgspec.structs.replace(config, model=str(source.path))
    if config.max_model_len is not None:
        context_length(config, await asyncio.to_thread(source.spec))
    defaults = source.sampling_defaults()
    embedding = read_embedding(source.path if source.kind == "dir" else None)
    texts = asyncio.create_task(Texts.load(source))
    try:
        engine = await EngineClient.start(
            config, on_progress, log_level, hang_seconds=hang_seconds, watchdog=watchdog
        )
    except BaseException:
        await ended(texts)
        raise
    try:
        return Started(engine, await texts, defaults, embedding)
    except BaseException:
        await ended(texts)
        await engine.close(patience=0.0)
        raise


async def ended(texts: asyncio.Task[Texts]) -> None:
    """Stop sandboxes that are not needed any more, started or starting."""
    texts.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await (await texts).close()


async def fetch(config: EngineConfig) -> ModelSource:
    """Run `resolve` in a daemon thread; cancelled, it stops the download."""
    given_up, found = threading.Event(), Future[ModelSource]()

    def work() -> None:
        found.set_running_or_notify_cancel()
        try:
            found.set_result(resolve(config.model, config.load_format, given_up.is_set))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, name=FETCHING, daemon=True).start()
    fetching = asyncio.wrap_future(found)
    try:
        await asyncio.wait({fetching})
    except asyncio.CancelledError:
        given_up.set()
        for _ in range(GIVING_UP_LOOKS):
            await asyncio.wait({fetching}, timeout=GIVING_UP_SECONDS / GIVING_UP_LOOKS)
            if fetching.done():
                break
        if not fetching.cancel():
            fetching.exception()  # nobody asks for it
        raise
    return fetching.result()
