"""`bench serve`: send a workload to a server and measure what comes back."""

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from typing import Literal

import aiohttp
import msgspec

from twolane.bench.client import Client, Clock, Job, LoadRun, LoopLag, Tally
from twolane.bench.metrics import (
    DEFAULT_PERCENTILES,
    LAG_PERCENTILES,
    SLO_NAMES,
    Distribution,
    Metrics,
    measure,
)
from twolane.bench.record import Record
from twolane.workload.prompts import PromptMaker, TokenRange, as_text
from twolane.workload.spec import OptionError, WorkloadSpec
from twolane.workload.traces import TraceRequest

CHAT = "/chat/completions"
COMPLETIONS = "/completions"
_OWN_FIELDS = frozenset(
    ("model", "prompt", "messages", "max_tokens", "stream", "stream_options", "ignore_eos")
)
_WARMUP_SEED = 1 << 32
"""Added to the seed, so that warm-up prompts are not found in the prefix cache later."""
_MODELS_TIMEOUT = 30.0


class BenchError(RuntimeError):
    """The run cannot start; the message says why."""


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `twolane bench serve`. Fields are named as its options."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    model: str | None = None
    """None: the first that the server lists."""
    workload: WorkloadSpec = WorkloadSpec()
    prompt_format: Literal["auto", "ids", "text"] = "auto"
    """`auto`: token ids for completions, text for chat."""
    vocab_range: TokenRange = TokenRange()
    max_concurrency: int | None = None
    num_warmups: int = 0
    ignore_eos: bool = True
    extra_body: dict[str, object] = {}
    """Merged into each request."""
    api_key: str | None = None
    headers: dict[str, str] = {}
    timeout: float = 600.0
    """Seconds for one request."""
    goodput: dict[str, float] = {}
    """SLOs: bounds in seconds by name (`metrics.SLO_NAMES`)."""
    percentiles: tuple[float, ...] = DEFAULT_PERCENTILES

    @property
    def chat(self) -> bool:
        """Whether the endpoint is that of chat completions."""
        return self.endpoint.endswith(CHAT)

    @property
    def sends_ids(self) -> bool:
        """Whether prompts go out as token ids."""
        return self.prompt_format == "ids" or (self.prompt_format == "auto" and not self.chat)

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url.rstrip("/") + self.endpoint

    @property
    def request_headers(self) -> dict[str, str]:
        """The headers of each request; those given win over the API key."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, **self.headers}

    def check(self) -> None:
        """Refuse what is wrong or contradictory.

        Raises:
            OptionError: naming the option.
        """
        if not self.base_url.startswith(("http://", "https://")):
            raise OptionError("--base-url", f"{self.base_url!r} is not an http(s) address")
        if not self.endpoint.startswith("/") or not self.endpoint.endswith(COMPLETIONS):
            raise OptionError(
                "--endpoint", f"{self.endpoint!r} ends neither in {CHAT} nor in {COMPLETIONS}"
            )
        if self.chat and self.prompt_format == "ids":
            raise OptionError("--prompt-format", "chat completions take no token ids")
        if not 0 <= self.vocab_range.low < self.vocab_range.high:
            low, high = self.vocab_range.low, self.vocab_range.high
            raise OptionError("--vocab-range", f"{low}:{high} holds no token ids")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise OptionError("--max-concurrency", f"must be positive, not {self.max_concurrency}")
        if self.num_warmups < 0:
            raise OptionError("--num-warmups", f"must not be negative: {self.num_warmups}")
        if not self.timeout > 0:
            raise OptionError("--timeout", f"must be positive, not {self.timeout}")
        self._check_measures()

    def _check_measures(self) -> None:
        clash = sorted(_OWN_FIELDS & self.extra_body.keys())
        if clash:
            raise OptionError("--extra-body", f"{', '.join(clash)}: set by other options")
        for name, bound in self.goodput.items():
            if name not in SLO_NAMES:
                known = ", ".join(SLO_NAMES)
                raise OptionError("--goodput", f"{name!r} is not one of {known}")
            if not bound > 0:
                raise OptionError("--goodput", f"the bound of {name} must be positive")
        for percentile in self.percentiles:
            if not 0 < percentile <= 100:
                raise OptionError("--metric-percentiles", f"{percentile:g} is not in (0, 100]")


class Result(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A finished (or interrupted) run: what was asked, and what the client saw."""

    config: BenchConfig
    model: str
    date: datetime
    workload: tuple[TraceRequest, ...]
    """Everything that was to be sent."""
    records: tuple[Record, ...]
    """Everything that was sent, by index."""
    duration: float
    """Seconds from the start to the last outcome."""
    interrupted: bool
    loop_lag: Distribution
    """How late the client's event loop ran, in seconds."""

    @cached_property
    def metrics(self) -> Metrics:
        """The run's metrics under its SLOs and percentiles."""
        return measure(self.records, self.duration, self.config.goodput, self.config.percentiles)


async def run(
    config: BenchConfig,
    *,
    stop: asyncio.Event | None = None,
    on_change: Callable[[Tally], None] = lambda tally: None,
    clock: Clock = time.perf_counter,
) -> Result:
    """Send the workload to the server and measure.

    Args:
        config: what to send, where to, and what to measure.
        stop: set it to end the run early; what was measured until then is returned.
        on_change: called with the counts whenever a request is sent or ends.
        clock: where timestamps come from, in seconds.

    Raises:
        OptionError: an option is wrong or contradicts another.
        TraceError: the trace file is bad.
        BenchError: the server does not tell its model, or a warm-up request fails.
    """
    config.check()
    workload = config.workload.build()
    stop = stop or asyncio.Event()
    date = datetime.now().astimezone()
    async with Client(config.url, config.request_headers, config.timeout, clock) as client:
        model = config.model or await _first_model(config)
        await _warm_up(config, model, workload, client, stop)
        jobs = make_jobs(config, model, workload)
        load = LoadRun(client, jobs, max_concurrency=config.max_concurrency, on_change=on_change)
        lag = LoopLag()
        async with lag.watch():
            await load.run(stop)
    return Result(
        config=config,
        model=model,
        date=date,
        workload=tuple(workload),
        records=tuple(sorted(load.records, key=lambda record: record.index)),
        duration=load.duration,
        interrupted=stop.is_set(),
        loop_lag=Distribution.of(lag.seconds, LAG_PERCENTILES),
    )


def make_jobs(config: BenchConfig, model: str, workload: list[TraceRequest]) -> list[Job]:
    """The HTTP bodies of a workload, made ahead so that sending costs no time (≈ 6 B a token)."""
    prompts = PromptMaker(config.vocab_range, config.workload.seed)
    return [
        Job(
            index=index,
            arrival=request.arrival or 0.0,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            body=_body(config, model, prompts.token_ids(index, request), request.output_tokens),
        )
        for index, request in enumerate(workload)
    ]


def _body(config: BenchConfig, model: str, ids: list[int], output_tokens: int) -> bytes:
    body: dict[str, object] = {
        "model": model,
        "max_tokens": output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **config.extra_body,
    }
    if config.ignore_eos:
        body["ignore_eos"] = True
    if config.chat:
        body["messages"] = [{"role": "user", "content": as_text(ids)}]
    else:
        body["prompt"] = ids if config.sends_ids else as_text(ids)
    return msgspec.json.encode(body)


async def _first_model(config: BenchConfig) -> str:
    url = config.base_url.rstrip("/") + "/v1/models"
    timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT)
    try:
        async with (
            aiohttp.ClientSession(headers=config.request_headers, timeout=timeout) as session,
            session.get(url) as response,
        ):
            response.raise_for_status()
            return _model_id(await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        raise BenchError(f"{url} does not answer: {why}; is the server up?") from error
    except (msgspec.DecodeError, LookupError) as error:
        raise BenchError(f"{url} lists no model; name one with --model") from error


def _model_id(answer: bytes) -> str:
    listed = msgspec.json.decode(answer, type=dict[str, object]).get("data")
    models = msgspec.convert(listed, list[Mapping[str, object]])
    return str(models[0]["id"])


async def _warm_up(
    config: BenchConfig,
    model: str,
    workload: list[TraceRequest],
    client: Client,
    stop: asyncio.Event,
) -> None:
    """Send the first requests' shapes with other content, all at once, and drop the figures."""
    if not config.num_warmups:
        return
    shapes = [
        msgspec.structs.replace(workload[index % len(workload)], arrival=0.0, hash_ids=())
        for index in range(config.num_warmups)
    ]
    seed = config.workload.seed + _WARMUP_SEED
    spec = msgspec.structs.replace(config.workload, seed=seed)
    jobs = make_jobs(msgspec.structs.replace(config, workload=spec), model, shapes)
    load = LoadRun(client, jobs, max_concurrency=config.max_concurrency)
    await load.run(stop)
    for record in load.records:
        if not record.ok:
            raise BenchError(f"a warm-up request failed: {record.outcome}: {record.error}")
