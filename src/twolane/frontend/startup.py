"""From settings to a running engine with its tokenizer."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from twolane.engine.config import EngineConfig
from twolane.engine.messages import Progress
from twolane.engine.settings import check_settings
from twolane.frontend.engine_client import EngineClient, ignore_progress
from twolane.frontend.liveness import HANG_SECONDS
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.tokenizer import load_if_any
from twolane.model.load.hub import ModelSource, resolve

FETCHING = "twolane-fetch"
"""Name of the thread that fetches a model."""
GIVING_UP_SECONDS, GIVING_UP_LOOKS = 2.0, 20
"""How long who no longer wants a model waits for its fetching to end, and in how many looks: so
long as this program runs, which may be stopped meanwhile."""


class Started(NamedTuple):
    """A running engine, and what its front knows of the model."""

    engine: EngineClient
    codec: TextCodec
    sampling: Mapping[str, Any]
    """`SamplingParams` where a request says nothing, as the model's authors would have it."""


async def start_engine(
    config: EngineConfig,
    on_progress: Callable[[Progress], None] = ignore_progress,
    log_level: str = "warning",
    *,
    hang_seconds: float = HANG_SECONDS,
    watchdog: bool | None = None,
) -> Started:
    """Fetch the model if need be, start an engine and load the tokenizer beside it.

    See `EngineClient.start` for the arguments.

    Raises:
        ValueError: a setting is wrong, or the model is not there, or one of its files is broken.
        PullError: the model could not be fetched.
        EngineError: the engine could not start, for instance with an unsupported model.
    """
    check_settings(config)
    source = await fetch(config)
    defaults = source.sampling_defaults()
    codec = asyncio.create_task(asyncio.to_thread(load_codec, source))
    try:
        engine = await EngineClient.start(
            config, on_progress, log_level, hang_seconds=hang_seconds, watchdog=watchdog
        )
    except BaseException:
        codec.cancel()
        raise
    try:
        return Started(engine, await codec, defaults)
    except BaseException:
        await engine.close(patience=0.0)
        raise


async def fetch(config: EngineConfig) -> ModelSource:
    """`resolve` in a thread that keeps no program from ending; cancelled, it gives the model up."""
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


def load_codec(source: ModelSource) -> TextCodec:
    """Load a model's tokenizer; a model may have none."""
    return TextCodec(load_if_any(source))
