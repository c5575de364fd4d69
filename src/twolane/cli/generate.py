"""`twolane generate`: one prompt, answered in the terminal.

**Examples**

- `twolane generate smollm2-135m-instruct "What is the capital of France?"`

- `twolane generate smollm2-135m-instruct --raw "The capital of France is" --max-tokens 8`

- `cat question.txt | twolane generate smollm2-135m-instruct -`
"""

import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twolane.cli.errors import one_line_errors
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import ModelArgument, takes, takes_engine_settings
from twolane.cli.signals import run_until_terminated
from twolane.common.printable import shown_on
from twolane.engine.config import LORA, EngineConfig
from twolane.sampling import SamplingParams

if TYPE_CHECKING:
    from twolane.frontend.engine_client import EngineClient
    from twolane.frontend.text.texts import Texts


app = command_app()


@app.command(cls=Command)
@takes_engine_settings(*LORA)
@takes(SamplingParams, "sampling", defaults={"max_tokens": None, "temperature": 0.0})
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help='The prompt; "-" reads it from standard input.')
    ],
    config: EngineConfig,
    sampling: dict[str, Any],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or continue the text as it is; by "
            "default --chat if the model has a template.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer one prompt in the terminal, without a server."""
    with one_line_errors():
        text = standard_input() if prompt == "-" else prompt
        params = SamplingParams(**sampling)
        run_until_terminated(run(config, text, params, chat=chat))


def standard_input() -> str:
    """Return the text of standard input.

    Raises:
        ValueError: it is no text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not {error.encoding.upper()}") from error


async def run(
    config: EngineConfig, prompt: str, params: SamplingParams, *, chat: bool | None
) -> None:
    """Print the model's answer as it comes.

    Args:
        config: Settings of the engine.
        prompt: text.
        params: Sampling parameters of the answer.
        chat: Whether to ask through the chat template; None does so if the model has one.

    Raises:
        ValueError: see `start_engine`, as for PullError and EngineError; or the prompt is empty,
            too long, or not to be had as tokens.
        GenerationFailed: the engine died.
    """
    from twolane.frontend.progress import progress_bars
    from twolane.frontend.startup import start_engine

    with progress_bars() as show:
        engine, texts, *_ = await start_engine(config, show)
    try:
        await answer(engine, texts, prompt, params, chat=chat)
    finally:
        await texts.close()
        await engine.close()


async def answer(
    engine: "EngineClient",
    texts: "Texts",
    prompt: str,
    params: SamplingParams,
    *,
    chat: bool | None,
) -> None:
    """Write one answer to standard output; a terminal gets its control characters as escapes."""
    from twolane.frontend.answer_formats import ModelFormats
    from twolane.frontend.generate_request import Conversation, GenerateRequest
    from twolane.frontend.generation import Generation
    from twolane.frontend.prepare import Preparer

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # in place of what its encoding lacks
    asked: dict[str, Any] = {"prompts": [prompt]}
    if texts.has_chat_template if chat is None else chat:
        asked = {"conversation": Conversation(turns=[{"role": "user", "content": prompt}])}
    preparer = Preparer(
        engine, texts, ModelFormats(texts.template_source, shows_tools=texts.shows_tools)
    )
    prepared = await preparer.prepare(GenerateRequest(sampling=params, **asked))
    with Generation(engine, texts.codec, prepared) as generation:
        async for delta in generation:
            write(delta.text)
    write("\n")


def write(text: str) -> None:
    """Write text to standard output at once.

    Raises:
        OSError: it takes no more; the message names it.
    """
    try:
        sys.stdout.write(shown_on(sys.stdout, text))
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error
