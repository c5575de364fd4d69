"""From settings to a running engine with its tokenizer."""

import asyncio
from collections.abc import Callable

from twolane.api.engine_client import EngineClient, ignore_progress
from twolane.api.text import TextCodec
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Progress
from twolane.engine.settings import check_settings
from twolane.model.hub import ModelSource, resolve
from twolane.model.tokenizer import load_tokenizer


async def start_engine(
    config: EngineConfig,
    on_progress: Callable[[Progress], None] = ignore_progress,
    log_level: str = "warning",
) -> tuple[EngineClient, TextCodec]:
    """Fetch the model if need be, start an engine and load the tokenizer beside it.

    Raises:
        ValueError: a setting is wrong, or the model is not there.
        PullError: the model could not be fetched.
        EngineError: the engine could not start, for instance with an unsupported model.
    """
    check_settings(config)
    source = await asyncio.to_thread(resolve, config.model, config.load_format)
    codec = asyncio.create_task(asyncio.to_thread(load_codec, source))
    try:
        engine = await EngineClient.start(config, on_progress, log_level)
    except BaseException:
        codec.cancel()
        raise
    try:
        return engine, await codec
    except BaseException:
        await engine.close(patience=0.0)
        raise


def load_codec(source: ModelSource) -> TextCodec:
    """Load a model's tokenizer; a model may have none."""
    return TextCodec(None if source.tokenizer is None else load_tokenizer(source))
