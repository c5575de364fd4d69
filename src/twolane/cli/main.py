"""`twolane serve | generate | pull | profile | simulate | doctor | bench`.

What a command needs is imported when it runs, so that help is there at once.
"""

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

import twolane
from twolane.cli import bench_options as bench_options
from twolane.cli.bench import app as bench_app
from twolane.cli.configfile import config_option
from twolane.common.errors import FieldError
from twolane.common.vocabulary import EstimatorName
from twolane.engine.config import Device, DType, EngineConfig, LoadFormat, Quantization
from twolane.sampling import SamplingParams
from twolane.slo import Slo

DEFAULT_MODEL = "smollm2-135m-instruct"
USAGE_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="twolane",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Serve language models with prefill and decode side by side on one device.\n\n"
    "Start here: `twolane generate smollm2-135m-instruct 'What is the capital of France?'`, "
    "then `twolane serve smollm2-135m-instruct`.",
)


def systems(incomplete: str) -> list[tuple[str, str]]:
    """Return the systems for shell completion."""
    from twolane.systems.registry import SYSTEMS, describe

    return [(name, describe(name)) for name in SYSTEMS if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Return the models that have names of their own, for shell completion."""
    from twolane.model.shapes import SHAPES

    return aliases(incomplete) + [name for name in SHAPES if name.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """Return the simulated GPUs, for shell completion."""
    from twolane.sim.gpus import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


def aliases(incomplete: str) -> list[str]:
    """Return the models that can be pulled, for shell completion."""
    from twolane.model.load.hub import ALIASES

    return [name for name in ALIASES if name.startswith(incomplete)]


MODEL_HELP = (
    "An alias (smollm2-135m-instruct), a local directory, a .gguf file, a built-in shape "
    "(with --load-format dummy) or a Hugging Face id."
)
ModelArgument = Annotated[
    str, typer.Argument(autocompletion=models, help=MODEL_HELP, show_default=False)
]
ServedModelArgument = Annotated[
    str,
    typer.Argument(
        autocompletion=models, envvar="TWOLANE_MODEL", help=MODEL_HELP, show_default=False
    ),
]

MODEL, SCHEDULING, MEMORY, DEVICE, SERVER = "Model", "Scheduling", "Memory", "Device", "Server"
"""Panels of options in the help."""

ENGINE_OPTIONS: dict[str, Any] = {
    "load_format": Annotated[
        LoadFormat,
        typer.Option(rich_help_panel=MODEL, help='"dummy": random weights, no files needed.'),
    ],
    "quantization": Annotated[
        Quantization | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Round weights in 16 bits to this while loading; int4: dummy weights alone.",
        ),
    ],
    "dtype": Annotated[
        DType,
        typer.Option(
            rich_help_panel=MODEL, help="Of weights and KV cache; auto is float32 on a CPU."
        ),
    ],
    "max_positions": Annotated[
        int | None,
        typer.Option(
            rich_help_panel=MODEL,
            metavar="TOKENS",
            help="Raise (or lower) the positions the model is built for.",
        ),
    ],
    "max_model_len": Annotated[
        int | None,
        typer.Option(
            rich_help_panel=MODEL,
            metavar="TOKENS",
            help="Most tokens of one request, prompt and answer. Default: the model's positions.",
        ),
    ],
    "seed": Annotated[
        int,
        typer.Option(
            rich_help_panel=MODEL,
            help="Of dummy weights, and of sampling where a request has no seed.",
        ),
    ],
    "system": Annotated[
        str,
        typer.Option(
            rich_help_panel=SCHEDULING,
            autocompletion=systems,
            help="How prefill and decode share the device; `twolane doctor` lists them.",
        ),
    ],
    "options": Annotated[
        list[str],
        typer.Option(
            "--option",
            rich_help_panel=SCHEDULING,
            metavar="KEY=VALUE",
            help="A setting of the system (`twolane doctor` lists them); may be repeated.",
        ),
    ],
    "max_running": Annotated[
        int,
        typer.Option(
            rich_help_panel=SCHEDULING, help="Most requests in prefill and decode together."
        ),
    ],
    "slo_ttft_ms": Annotated[
        float | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            metavar="MS",
            help="Bound on the time to the first token of requests without an x-slo-ttft-ms "
            "header, in milliseconds. 0: no bound, the default.",
        ),
    ],
    "slo_ttft_per_1k_ms": Annotated[
        float | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            metavar="MS",
            help="Allowed on top of --slo-ttft-ms for each 1,024 prompt tokens that the prefix "
            "cache does not have. Default: 0.",
        ),
    ],
    "slo_tbt_ms": Annotated[
        float | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            metavar="MS",
            help="The same for each time between two tokens (x-slo-tbt-ms).",
        ),
    ],
    "slo_tpot_ms": Annotated[
        float | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            metavar="MS",
            help="The same for the mean time between tokens (x-slo-tpot-ms).",
        ),
    ],
    "tbt_buffer_ms": Annotated[
        float | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            metavar="MS",
            min=0.0,
            callback=bench_options.finite,
            help="The longest time for which a token is held back where there is a bound between "
            "two: gaps are even then, and a late token is in time. At most the bound; 0 sends "
            "tokens at once. Default: 20.",
        ),
    ],
    "page_size": Annotated[
        int | None,
        typer.Option(
            rich_help_panel=MEMORY,
            metavar="TOKENS",
            help="Tokens in a KV page. Default: 16 on a CPU, 32 on a GPU (16, 32 or 64).",
        ),
    ],
    "kv_tokens": Annotated[
        int | None,
        typer.Option(
            rich_help_panel=MEMORY,
            metavar="TOKENS",
            help="Tokens in the KV pool. Default: as many as a share of the free memory holds.",
        ),
    ],
    "prefix_cache": Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            rich_help_panel=MEMORY,
            help="Reuse the KV of prompts that begin alike.",
        ),
    ],
    "device": Annotated[
        Device,
        typer.Option(
            rich_help_panel=DEVICE,
            help="auto: an NVIDIA GPU if there is one, unless --cores asks for the CPU.",
        ),
    ],
    "levels": Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DEVICE,
            metavar="SMS,…",
            help="On a GPU: how many SMs decode may have beside prefill, such as 32,48,64. "
            "Default: every 16.",
        ),
    ],
    "gpu_memory_utilization": Annotated[
        float,
        typer.Option(
            rich_help_panel=MEMORY,
            metavar="SHARE",
            help="Share of a GPU's memory for weights, workspaces and the KV pool.",
        ),
    ],
    "cores": Annotated[
        int | None,
        typer.Option(
            rich_help_panel=DEVICE, help="CPU cores for both lanes. Default: all there are."
        ),
    ],
    "profile": Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            metavar="FILE",
            help="What `twolane profile` measured, to predict with. Default: the cache's profile "
            "of this device and model, if there is one.",
        ),
    ],
    "estimator": Annotated[
        EstimatorName | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            help="How to predict from a profile; `twolane bench estimators` compares them. "
            "Default: what the system was published with.",
        ),
    ],
    "trace": Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DEVICE,
            metavar="FILE",
            help="Write a Chrome / Perfetto trace of the run (open it in ui.perfetto.dev).",
        ),
    ],
}
"""How each field of `EngineConfig` beside the model is given on the command line."""

EPILOG_SERVE = """**Examples**

- `twolane serve smollm2-135m-instruct` — the small model that comes with Twolane

- `twolane serve ./my-model --system chunked --option token_budget=512 --port 9000`

- `twolane serve --config serve.yaml` — options from a file: `model: ./my-model`, `max-queue: 64`, …

- `twolane serve qwen3-8b --load-format dummy --max-model-len 4096` — random weights, no files

- `curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json'
  -d '{"messages": [{"role": "user", "content": "Hello"}]}'` — ask it
"""
EPILOG_SIMULATE = """**Examples**

- `twolane simulate llama-3.1-8b --gpu h200 --dataset azure-conv --request-rate 10` — a built-in
  shape on an H200, 1,000 requests with lengths like those of Azure's chat service

- `twolane simulate llama-3.1-70b --gpu a100-80gb --tp 8 --dataset mooncake_trace.jsonl.gz
  --system chunked --option token_budget=256 --goodput ttft:2000 tbt:100` — a recorded trace at its
  own times, prefixes shared as recorded, on eight GPUs
"""
EPILOG_GENERATE = """**Examples**

- `twolane generate smollm2-135m-instruct "What is the capital of France?"`

- `twolane generate smollm2-135m-instruct --raw "The capital of France is" --max-tokens 8`

- `cat question.txt | twolane generate smollm2-135m-instruct -`
"""


def fail(message: str, code: int = 1) -> typer.Exit:
    """Print one line on standard error; raise the result."""
    typer.echo(f"twolane: {message}", err=True)
    return typer.Exit(code)


def flag(name: str) -> str:
    """Return the flag of an engine option."""
    return "--option" if name == "options" else "--" + name.replace("_", "-")


def with_flags(text: str) -> str:
    """Return an error of the engine with its settings named as their flags are."""
    names = "|".join(name for name in ENGINE_OPTIONS if "_" in name)
    alone = rf"(?<![\w./'\"-])({names})(?![\w./'\"-])"
    return re.sub(alone, lambda found: flag(found[0]), text)


def wrong_setting(field: str, problem: str) -> typer.Exit:
    """Print what is wrong with an engine option; raise the result."""
    return fail(with_flags(f"{flag(field)} {problem}"), USAGE_ERROR)


def variable(flag: str) -> str:
    """Return the environment variable that stands in for a flag."""
    return "TWOLANE_" + flag.removeprefix("--").replace("-", "_").upper()


def default_slo(settings: dict[str, Any]) -> Slo:
    """Take the bounds out of the options: milliseconds there, seconds in the engine."""
    bounds: dict[str, Any] = {
        name: settings.pop(f"slo_{name}_ms", None) for name in ("ttft", "tbt", "tpot")
    }
    per_1k = settings.pop("slo_ttft_per_1k_ms", None) or 0.0
    if per_1k and not bounds["ttft"]:
        raise fail("--slo-ttft-per-1k-ms is added to --slo-ttft-ms: give that, too", USAGE_ERROR)
    try:
        ttft, tbt, tpot = (ms / 1e3 if ms else None for ms in bounds.values())
        return Slo(ttft=ttft, ttft_per_token=per_1k / 1e3 / 1024, tbt=tbt, tpot=tpot)
    except FieldError as error:
        name = error.field
        if name == "ttft_per_token":
            problem = f"must be 0 or above, not {per_1k}"
            raise fail(f"--slo-ttft-per-1k-ms {problem}", USAGE_ERROR) from error
        problem = f"must be 0 (no bound) or above, not {bounds[name]}"
        raise fail(f"{flag(f'slo_{name}_ms')} {problem}", USAGE_ERROR) from error


def asked_levels(text: str | None) -> tuple[int, ...] | None:
    """Take the levels apart: numbers with commas between them."""
    if text is None:
        return None
    try:
        return tuple(int(units) for units in text.split(",") if units.strip())
    except ValueError as error:
        raise fail(f"--levels {text}: write numbers, such as 32,48,64", USAGE_ERROR) from error


def engine_config(model: str, settings: dict[str, Any]) -> EngineConfig:
    """Make the engine's settings of what the command line says, checked."""
    from twolane.engine.settings import check_settings

    options = {}
    for option in settings.pop("options", ()):
        key, equals, value = option.partition("=")
        if not equals:
            raise fail(f"--option {option}: write KEY=VALUE", USAGE_ERROR)
        key = key.replace("-", "_")
        if key in options:
            raise fail(f"--option {key} is given twice", USAGE_ERROR)
        options[key] = value
    slo, levels = default_slo(settings), asked_levels(settings.pop("levels"))
    if (buffer := settings.pop("tbt_buffer_ms", None)) is not None:
        settings["tbt_buffer"] = buffer / 1e3
    config = EngineConfig(model=model, options=options, slo=slo, levels=levels, **settings)
    try:
        check_settings(config)
    except FieldError as error:
        raise wrong_setting(error.field, error.problem) from error
    return config


def takes_engine_settings(
    *without: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `config` parameter by an option for every engine setting but those named.

    The command must also have a `model`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        offered = {name: one for name, one in ENGINE_OPTIONS.items() if name not in without}
        defaults = EngineConfig(model="")
        signature = inspect.signature(command)
        parameters = [p for p in signature.parameters.values() if p.name != "config"]
        for name, annotation in offered.items():
            get_args(annotation)[1].envvar = variable(flag(name))
            default = [] if name == "options" else getattr(defaults, name, None)
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
            )

        @functools.wraps(command)
        def run(**given: Any) -> None:
            settings = {name: given.pop(name) for name in offered}
            command(**given, config=engine_config(given["model"], settings))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a user can do wrong into a line: 2 for wrong options, 1 for what cannot be had."""
    from twolane.frontend.engine_client import EngineError
    from twolane.frontend.generation import GenerationFailed
    from twolane.model.load.hub import PullError

    try:
        yield
    except FieldError as error:
        raise wrong_setting(error.field, error.problem) from error
    except (PullError, EngineError, GenerationFailed, ValueError, OSError, MemoryError) as error:
        raise fail(with_flags(str(error)) or type(error).__name__) from error


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        typer.echo(f"twolane {twolane.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Take what belongs to no command."""


def real_keys(ctx: typer.Context, keys: list[str] | None) -> list[str] | None:
    """Refuse an --api-key that is given and holds no key: everybody might ask."""
    source = ctx.get_parameter_source("api_key")
    given = source is not None and source.name != "DEFAULT"
    if (given and not keys) or any(not key.strip() for key in keys or ()):
        raise typer.BadParameter("must not be empty")
    return keys


@app.command(epilog=EPILOG_SERVE)
@takes_engine_settings()
def serve(
    model: ServedModelArgument,
    config: EngineConfig,
    config_file: Annotated[Path | None, config_option(envvar="TWOLANE_CONFIG")] = None,
    host: Annotated[
        str,
        typer.Option(
            envvar="TWOLANE_HOST",
            rich_help_panel=SERVER,
            help="Address to listen on; 0.0.0.0 is all.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            envvar="TWOLANE_PORT",
            rich_help_panel=SERVER,
            min=0,
            max=65535,
            help="0 takes any free port.",
        ),
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            envvar="TWOLANE_SERVED_MODEL_NAME",
            rich_help_panel=SERVER,
            metavar="NAME",
            help="What clients call the model. Default: as given here.",
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            envvar="TWOLANE_MAX_QUEUE",
            rich_help_panel=SERVER,
            min=1,
            help="Requests that may wait for their first token; more get a 429.",
        ),
    ] = 1024,
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        typer.Option(
            envvar="TWOLANE_SAMPLING_DEFAULTS",
            rich_help_panel=SERVER,
            help="Where a request says nothing of temperature, top_p, top_k, min_p or "
            "repetition_penalty: what the model's generation_config.json has, or OpenAI's.",
        ),
    ] = "model",
    drain_seconds: Annotated[
        float,
        typer.Option(
            envvar="TWOLANE_DRAIN_SECONDS",
            rich_help_panel=SERVER,
            metavar="SECONDS",
            min=0.0,
            callback=bench_options.finite,
            help="How long requests may go on after Ctrl-C or SIGTERM; a second one stops at once.",
        ),
    ] = 10.0,
    arrival_seconds: Annotated[
        float,
        typer.Option(
            envvar="TWOLANE_ARRIVAL_SECONDS",
            rich_help_panel=SERVER,
            metavar="SECONDS",
            min=0.1,
            callback=bench_options.finite,
            help="How long a request may take to arrive; slower ones get a 408.",
        ),
    ] = 60.0,
    stall_seconds: Annotated[
        float,
        typer.Option(
            envvar="TWOLANE_STALL_SECONDS",
            rich_help_panel=SERVER,
            metavar="SECONDS",
            min=0.1,
            callback=bench_options.finite,
            help="How long a client may take nothing of its answer before it is disconnected.",
        ),
    ] = 60.0,
    max_connections: Annotated[
        int | None,
        typer.Option(
            envvar="TWOLANE_MAX_CONNECTIONS",
            rich_help_panel=SERVER,
            min=1,
            help="Connections that may be open; beyond, idle ones are closed and requests get a "
            "503. Default: as many as the limit on open files allows, up to 8,192.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TWOLANE_API_KEY",
            rich_help_panel=SERVER,
            metavar="KEY",
            callback=real_keys,
            help="A key that requests must bring; may be repeated. The environment variable "
            "(keys apart by spaces) or the file keeps them out of the process list.",
            show_default=False,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int,
        typer.Option(
            envvar="TWOLANE_MAX_BODY_BYTES",
            rich_help_panel=SERVER,
            metavar="BYTES",
            min=1,
            help="Larger request bodies get a 413.",
        ),
    ] = 32 << 20,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="TWOLANE_OTLP_ENDPOINT",
            rich_help_panel=SERVER,
            metavar="URL",
            help="Send a trace of every request to this OpenTelemetry collector, over HTTP "
            "(http://localhost:4318). Needs twolane[otel].",
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(
            envvar="TWOLANE_LOG_LEVEL",
            rich_help_panel=SERVER,
            help="debug: a line for every request.",
        ),
    ] = "info",
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    from twolane.server import run

    if not host.strip():
        raise fail("--host must not be empty", USAGE_ERROR)
    if not (otlp_endpoint or "http://").startswith(("http://", "https://")):
        problem = f"must be an http:// or https:// URL, not {otlp_endpoint!r}"
        raise fail(f"--otlp-endpoint {problem}", USAGE_ERROR)
    options = run.ServerOptions(
        host=host,
        port=port,
        served_model_name=served_model_name,
        max_queue=max_queue,
        sampling_defaults=sampling_defaults,
        drain_seconds=drain_seconds,
        arrival_seconds=arrival_seconds,
        stall_seconds=stall_seconds,
        max_connections=max_connections,
        api_keys=tuple(api_key or ()),
        max_body_bytes=max_body_bytes,
        otlp_endpoint=otlp_endpoint,
        log_level=log_level,
    )
    warn_of_unknown_variables()
    with one_line_errors():
        code = run.serve(config, options)
    # Everything is closed. Taking the interpreter down in order would take seconds: supervisors
    # wait for the exit code to start the next server.
    with contextlib.suppress(OSError):  # a full disk, which the start has told of
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@app.command(epilog=EPILOG_GENERATE)
@takes_engine_settings()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.')],
    config: EngineConfig,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask through the model's chat template, or continue the text as it is. "
            "Default: --chat if the model has a template.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Default: up to the context.")] = None,
    min_tokens: Annotated[int, typer.Option(help="No end before this many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token always.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens up to this.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, of the likeliest's.")] = 0.0,
) -> None:
    """Answer one prompt here in the terminal, without a server."""
    from twolane.cli import generate as console

    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
        )
    except FieldError as error:
        raise fail(f"{flag(error.field)} {error.problem}", USAGE_ERROR) from error
    with one_line_errors():
        console.generate(config, text, params, chat=chat)


@app.command(epilog="**Example:** `twolane pull smollm2-135m-instruct`")
def pull(
    model: Annotated[str, typer.Argument(help="An alias.", autocompletion=aliases)] = (
        DEFAULT_MODEL
    ),
) -> None:
    """Fetch a model into the cache, so that it can be served without a network."""
    from twolane.model.load import hub

    with one_line_errors():
        typer.echo(hub.pull(model))


@app.command(epilog=EPILOG_SIMULATE)
@takes_engine_settings("load_format", "dtype", "device", "cores", "profile")
@bench_options.takes_workload("seed")
def simulate(
    model: ModelArgument,
    config: EngineConfig,
    workload: dict[str, Any],
    more_slos: bench_options.MoreSlos = None,
    config_file: Annotated[Path | None, config_option()] = None,
    gpu: Annotated[
        str,
        typer.Option(rich_help_panel=DEVICE, autocompletion=gpus, help="a100-80gb, h100 or h200."),
    ] = "h200",
    tp: Annotated[
        int,
        typer.Option(
            rich_help_panel=DEVICE, min=1, help="GPUs that share each layer (tensor parallelism)."
        ),
    ] = 1,
    vocab_range: bench_options.VocabRange = "1000:30000",
    goodput: bench_options.Goodput = None,
    metric_percentiles: bench_options.Percentiles = "90,95,99",
    result_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=bench_options.MEASURE, help="Write the result as JSON to this file."
        ),
    ] = None,
    requests_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=bench_options.MEASURE, help="Write a line of CSV for each request."
        ),
    ] = None,
) -> None:
    """Serve a workload with the real engine on simulated GPUs, on a virtual clock."""
    from twolane.results.result import BenchConfig
    from twolane.sim import run as simulation
    from twolane.workload.spec import WorkloadSpec

    with one_line_errors(), bench_options.workload_errors():
        for option, path in (("--result-file", result_file), ("--requests-file", requests_file)):
            bench_options.need_folder(option, path)
        asked = simulation.SimulateConfig(
            engine=config,
            gpu=gpu,
            tp=tp,
            bench=BenchConfig(
                workload=WorkloadSpec(**workload, seed=config.seed),
                vocab_range=bench_options.token_range(vocab_range),
                goodput=bench_options.slos(goodput, more_slos),
                percentiles=bench_options.percentiles(metric_percentiles),
            ),
        )
        simulation.show(asked, result_file, requests_file)


@app.command()
def doctor() -> None:
    """Say what this machine offers, and whether serving is possible (exit code 0)."""
    from twolane.cli.doctor import report

    raise typer.Exit(0 if report() else 1)


UNPROFILED = (
    "system", "options", "slo_ttft_ms", "slo_ttft_per_1k_ms", "slo_tbt_ms", "slo_tpot_ms",
    "tbt_buffer_ms", "prefix_cache", "profile", "estimator", "trace",
)  # fmt: skip
"""Engine settings that do not change what launches take."""
EPILOG_PROFILE = """**Examples**

- `twolane profile qwen3-8b --load-format dummy` — 8 minutes, into the cache

- `twolane profile qwen3-8b --load-format dummy --seconds 720` — go on where the last run ended

- `twolane bench estimators PROFILE.json` — how well it predicts
"""


@app.command(epilog=EPILOG_PROFILE)
@takes_engine_settings(*UNPROFILED)
def profile(
    model: ModelArgument,
    config: EngineConfig,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: in the cache, where `serve` finds it."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            callback=bench_options.finite,
            help="How long to measure, beside the start; the next run goes on from there.",
        ),
    ] = 480.0,
) -> None:
    """Measure this machine with a model, so that systems can predict what launches take."""
    from twolane.cli import profile as command

    with one_line_errors():
        command.run(config, out=out, seconds=seconds)


app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; what a user got wrong is one line and exit code 2."""
    try:
        code = app(prog_name="twolane", standalone_mode=False)
    except typer.Abort:
        code = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # the parser's own errors have it
            raise
        code = explain(error)
    sys.exit(code)


def warn_of_unknown_variables() -> None:
    """Say which TWOLANE_* variables no option reads: mistyped ones should not go unseen."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = [param.envvar for param in command.params if param.envvar] + ["TWOLANE_CACHE"]
    for name in sorted(os.environ):
        if name.startswith("TWOLANE_") and name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            typer.echo(f"twolane: the variable {name} is not one of mine{hint}", err=True)


def explain(error: Any) -> int:
    """Print a parser's error in a line that says where the value came from; return its code."""
    message = " ".join(error.format_message().split())
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if message and context is not None:
        source = param and context.get_parameter_source(param.name)
        if source is not None and source.name == "DEFAULT_MAP":
            message = f"{context.params['config_file']}: {message}"
        message += f" (see {context.command_path} --help)"
    if message:
        fail(message)
    return int(error.exit_code)
