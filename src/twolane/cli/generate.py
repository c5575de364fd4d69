"""`twolane generate`: one prompt, answered in the terminal."""

import asyncio
import signal
import sys

from twolane.engine.config import EngineConfig
from twolane.frontend.engine_client import EngineClient
from twolane.frontend.generation import Generation
from twolane.frontend.progress import progress_bars
from twolane.frontend.startup import start_engine
from twolane.frontend.text.codec import TextCodec
from twolane.sampling import SamplingParams

TERMINATED = 128 + signal.SIGTERM
"""The exit code after SIGTERM, as shells have it."""


def generate(
    config: EngineConfig, prompt: str, params: SamplingParams, *, chat: bool | None
) -> None:
    """Print the model's answer as it comes.

    Args:
        config: of the engine.
        prompt: text.
        params: of the answer.
        chat: whether to go through the chat template; None: if the model has one.

    Raises:
        ValueError: see `start_engine`, as for PullError and EngineError; or the prompt is empty,
            too long, or not to be had as tokens.
        GenerationFailed: the engine died.
        SystemExit: SIGTERM came; the engine has ended.
    """
    try:
        asyncio.run(run(config, prompt, params, chat=chat))
    except asyncio.CancelledError:  # Ctrl-C is a KeyboardInterrupt
        raise SystemExit(TERMINATED) from None


async def run(
    config: EngineConfig, prompt: str, params: SamplingParams, *, chat: bool | None
) -> None:
    """See `generate`."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with progress_bars() as show:
        engine, codec, _ = await start_engine(config, show)
    try:
        await answer(engine, codec, prompt, params, chat=chat)
    finally:
        await engine.close()


async def answer(
    engine: EngineClient,
    codec: TextCodec,
    prompt: str,
    params: SamplingParams,
    *,
    chat: bool | None,
) -> None:
    """Write one answer to standard output."""
    if codec.has_chat_template if chat is None else chat:
        tokens = codec.chat([{"role": "user", "content": prompt}])
    else:
        tokens = codec.encode(prompt)
    if not 0 < len(tokens) < engine.ready.max_model_len:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; it must have at least 1 and at most "
            f"{engine.ready.max_model_len - 1}"
        )
    with Generation(engine, codec, [tokens], [params]) as generation:
        async for delta in generation:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
