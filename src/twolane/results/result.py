"""Settings and result of a run of `bench serve`."""

import math
from datetime import datetime
from functools import cached_property
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from twolane.common.errors import FieldError
from twolane.common.options import Nested, Option, check_ranges, milliseconds
from twolane.results import metrics
from twolane.results.record import Record
from twolane.workload.prompts import TokenRange
from twolane.workload.spec import WHAT, WHEN, WorkloadSpec
from twolane.workload.traces import TraceRequest

WHERE, MEASURE = "Server", "Measurement"
"""Panels of options in the help."""
PLAYOUT = milliseconds(MEASURE, "playout", least=0)
BASE_URL = "http://127.0.0.1:8000"
"""Address of `twolane serve` on this machine."""
CHAT = "/chat/completions"
COMPLETIONS = "/completions"
_OWN_FIELDS = frozenset(
    ("model", "prompt", "messages", "max_tokens", "stream", "stream_options", "ignore_eos")
)


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `twolane bench serve`. Fields have the names of its options."""

    base_url: Annotated[str, Option(WHERE)] = BASE_URL
    """Address at which the server listens."""
    endpoint: Annotated[str, Option(WHERE)] = "/v1/completions"
    """Path of the API: /v1/completions or /v1/chat/completions."""
    model: Annotated[str | None, Option(WHERE)] = None
    """Name of the model in requests; by default the first that the server lists."""
    workload: Annotated[WorkloadSpec, Nested()] = WorkloadSpec()
    """What is asked, and when."""
    prompt_format: Annotated[Literal["auto", "ids", "text"], Option(WHAT)] = "auto"
    """Form of prompts: token ids (exact length) or words (about one token each); auto takes ids for
    completions and text for chat."""
    vocab_range: Annotated[TokenRange, Option(WHAT, "LOW:HIGH")] = TokenRange()
    """Token ids to draw prompts from, HIGH excluded."""
    max_concurrency: Annotated[int | None, Option(WHEN, least=1)] = None
    """Largest number of requests in flight; later ones wait in the client."""
    num_warmups: Annotated[int, Option(MEASURE, least=0)] = 0
    """Number of unmeasured requests that are sent first; `bench goodput --serve` sends them only
    before a server's first run."""
    ignore_eos: Annotated[bool, Option(WHAT)] = True
    """Whether replies have exactly the workload's length instead of at most that."""
    extra_body: Annotated[dict[str, object], Option(WHAT, "JSON")] = {}
    """Fields to add to each request, such as '{"temperature": 0}'."""
    api_key: Annotated[str | None, Option(WHERE, variable="OPENAI_API_KEY")] = None
    """Key that is sent as a bearer token."""
    headers: Annotated[dict[str, str], Option(WHERE, "KEY=VALUE", name="header")] = {}
    """Header to add to each request; may be repeated."""
    prompt_seed: int | None = None
    """Seed of the prompts' content; None: the workload's. Another seed keeps lengths and arrivals
    and shares no cached prefix."""
    timeout: Annotated[float, Option(WHERE, "SECONDS", positive=True)] = 600.0
    """Seconds that one request may take."""
    engine_gaps: Annotated[bool, Option(MEASURE)] = False
    """Whether the server's own histogram of gaps between tokens is read at /metrics before and
    after the run, for comparison with those that the client sees."""
    playout: Annotated[float, PLAYOUT] = 0.0
    """Longest time in seconds for which a client with a playout buffer holds a token back, computed
    from the arrival times; the bound on TBT of --goodput sets the pace. 0 is no buffer."""
    goodput: dict[str, float] = {}
    """Bounds of SLOs in seconds by name (`metrics.SLO_NAMES`, `TTFT_PER_1K`)."""
    percentiles: Annotated[
        tuple[float, ...], Option(MEASURE, name="metric_percentiles", alias="percentiles")
    ] = metrics.DEFAULT_PERCENTILES
    """Percentiles to report, separated by commas."""

    @property
    def chat(self) -> bool:
        """Whether the endpoint is chat completions."""
        return self.endpoint.endswith(CHAT)

    @property
    def sends_ids(self) -> bool:
        """Whether prompts are sent as token ids."""
        return self.prompt_format == "ids" or (self.prompt_format == "auto" and not self.chat)

    @property
    def content_seed(self) -> int:
        """Seed of the prompts' content."""
        return self.workload.seed if self.prompt_seed is None else self.prompt_seed

    @property
    def url(self) -> str:
        """URL to which requests are sent."""
        return self.base_url.rstrip("/") + self.endpoint

    @property
    def request_headers(self) -> dict[str, str]:
        """Headers of each request; given ones override the API key."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, **self.headers}

    def check(self) -> None:
        """Check the settings.

        Raises:
            FieldError: naming the first wrong field.
        """
        check_ranges(self)
        if not _is_address(self.base_url):
            raise FieldError("base_url", f"{self.base_url!r} is not an http(s) address")
        for name, value in self.request_headers.items():
            if set(name + value) & set("\r\n\0"):
                raise FieldError("headers", f"{name!r} has more than one line")
        if not self.endpoint.startswith("/") or not self.endpoint.endswith(COMPLETIONS):
            raise FieldError(
                "endpoint", f"{self.endpoint!r} ends neither in {CHAT} nor in {COMPLETIONS}"
            )
        if self.chat and self.prompt_format == "ids":
            raise FieldError("prompt_format", "cannot be ids: chat completions take no token ids")
        if not 0 <= self.vocab_range.low < self.vocab_range.high:
            low, high = self.vocab_range.low, self.vocab_range.high
            raise FieldError("vocab_range", f"{low}:{high} holds no token ids")
        self._check_measures()

    def _check_measures(self) -> None:
        clash = sorted(_OWN_FIELDS & self.extra_body.keys())
        if clash:
            raise FieldError("extra_body", f"has what other options set: {', '.join(clash)}")
        if self.playout and "tbt" not in self.goodput:
            raise FieldError("playout", "needs a bound on TBT: --goodput tbt:MS")
        if metrics.TTFT_PER_1K in self.goodput and "ttft" not in self.goodput:
            raise FieldError("goodput", "has ttft-per-1k, which is added to ttft: give that, too")
        for name, bound in self.goodput.items():
            if name not in (*metrics.SLO_NAMES, metrics.TTFT_PER_1K):
                known = ", ".join((*metrics.SLO_NAMES, "ttft-per-1k"))
                raise FieldError("goodput", f"has {name!r}, which is not one of {known}")
            if not 0 < bound < math.inf:
                raise FieldError("goodput", f"needs a positive, finite bound of {name}")
        for percentile in self.percentiles:
            if not 0 < percentile <= 100:
                raise FieldError("percentiles", f"has {percentile:g}, which is not in (0, 100]")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        known = parts.port != 0 and bool((parts.hostname or "").encode("idna"))
    except ValueError:  # of a port, of brackets, or of a name
        return False
    return known and url.startswith(("http://", "https://"))


class EngineGaps(msgspec.Struct, frozen=True):
    """Gaps between tokens that a server's engine counted during a run."""

    metric: str
    """Name of the histogram."""
    count: int
    """Number of gaps."""
    mean: float
    """Mean gap in seconds."""
    above: float
    """Lower edge in seconds of the bucket that holds the P99."""
    within: float
    """Upper edge in seconds of that bucket; infinite in the last one."""
    due: "EngineGaps | None" = None
    """Gaps between the times at which the engine wanted tokens delivered, where it paces them."""


class Energy(msgspec.Struct, frozen=True):
    """Energy and clocks of the GPUs during a run."""

    gpus: str
    """The GPUs that count, and where the figures come from."""
    joules: float
    watts: float
    """Mean power of all of these GPUs together."""
    cap_watts: float
    """Power limit of all of these GPUs together."""
    sm_hz: float | None = None
    """Mean clock of the SMs; None in a simulation."""
    memory_hz: float | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A finished or interrupted run: settings and records."""

    config: BenchConfig
    model: str
    date: datetime
    workload: tuple[TraceRequest, ...]
    """All requests of the workload."""
    records: tuple[Record, ...]
    """Records of the requests sent, by index."""
    duration: float
    """Seconds from the start to the last outcome."""
    interrupted: bool
    loop_lag: metrics.Distribution
    """Lag of the client's event loop in seconds."""
    simulated: dict[str, object] | None = None
    """Description and counts of the simulated engine; empty for a real one."""
    server: str | None = None
    """Announcement of a server that was started for the run."""
    engine_gaps: EngineGaps | None = None
    """Gaps that the server counted itself, if requested."""
    energy: Energy | None = None
    """None: NVML is not there, or the server is on another machine."""

    @cached_property
    def metrics(self) -> metrics.Metrics:
        """Metrics of the run under its SLOs and percentiles."""
        config = self.config
        return metrics.measure(
            self.records, self.duration, config.goodput, config.percentiles, config.playout
        )
