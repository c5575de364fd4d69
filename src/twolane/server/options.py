"""Settings of the API process, besides those of the engine."""

import ipaddress
import re
import urllib.parse
from typing import Annotated, Literal

import msgspec

from twolane.common.errors import FieldError
from twolane.common.options import Option
from twolane.frontend.liveness import HANG_SECONDS

PANEL = "Server"
LIMITS, SECURITY, ANSWERS = "Queue and limits", "Security", "Answers"
WATCHING = "Metrics, logs and traces"
OPERATOR_VARIABLE = "TWOLANE_OPERATOR_KEY"
"""Environment variable with the operator's key."""
ToolForm = Literal[
    "harmony", "muse_glimmer", "hermes", "qwen3_coder", "seed_oss", "llama3_json", "mistral",
    "mistral_args", "granite", "phi4_mini_json", "llama_nemotron_json", "deepseek_v3",
    "deepseek_v31", "glm4_0414", "glm45", "minimax_m2", "minicpm5", "hunyuan_a13b", "gemma4",
    "lfm2", "olmo3", "pythonic",
]  # fmt: skip
"""The names of `frontend.structured.tools.FORMATS`."""
MetricsPrefix = Literal["twolane", "vllm", "both"]


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server, besides those of the engine."""

    host: Annotated[str, Option(PANEL)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of the machine, :: every address."""
    port: Annotated[int, Option(PANEL, least=0, most=65535)] = 8000
    """Port to listen on; 0 takes any free port."""
    served_model_names: Annotated[
        tuple[str, ...], Option(PANEL, "NAME", name="served_model_name")
    ] = ()
    """Name that clients call the model by; may be repeated, and answers have the first; by default
    the MODEL of the command line."""
    any_model_name: Annotated[bool, Option(PANEL)] = False
    """Whether requests with any other model name are answered by the model, too, as long as no
    adapter is loaded."""
    max_queue: Annotated[int, Option(LIMITS, least=1)] = 1024
    """Number of requests that may wait for their first token; further ones get a 429."""
    max_queued_per_key: Annotated[int | None, Option(LIMITS, least=1)] = None
    """Number of requests of one API key that may wait for their first token; further ones get a
    429. By default one key may fill the queue."""
    refuse_late: Annotated[bool, Option(LIMITS)] = True
    """Whether a request with a TTFT bound is refused at once (429) while others wait and, by what
    the server has measured, its first token would come later."""
    allow_priority: Annotated[bool, Option(LIMITS)] = False
    """Whether requests may have a priority. One admission in eight goes to the request that has
    waited longest, whatever its priority."""
    sampling_defaults: Annotated[Literal["model", "openai"], Option(ANSWERS)] = "model"
    """Defaults of temperature, top_p, top_k, min_p and repetition_penalty: model takes them from
    the model's generation_config.json (an alias: from its model card), openai from OpenAI's API."""
    drain_seconds: Annotated[float, Option(LIMITS, "SECONDS", least=0.0)] = 10.0
    """Seconds that open requests have to end after Ctrl-C or SIGTERM; a second signal stops at
    once."""
    arrival_seconds: Annotated[float, Option(LIMITS, "SECONDS", least=0.1)] = 60.0
    """Seconds that a request may take to arrive; slower ones get a 408."""
    stall_seconds: Annotated[float, Option(LIMITS, "SECONDS", least=0.1)] = 60.0
    """Seconds without reading any of its answer after which a client is disconnected."""
    max_connections: Annotated[int | None, Option(LIMITS, least=1)] = None
    """Number of connections that may be open; beyond it, idle ones are closed and requests get a
    503. By default as many as the limit on open files allows, up to 8,192."""
    hang_seconds: Annotated[float, Option(LIMITS, "SECONDS", least=1.0)] = HANG_SECONDS
    """Seconds without a turn of the engine's loop, or without a finished launch while there is work
    (5 times the launch's prediction if that is longer), after which the engine counts as hung:
    /health says 503."""
    watchdog: Annotated[bool | None, Option(LIMITS)] = None
    """Whether a hung engine is killed, which ends the server with exit status 1 and the reason in
    the log; by default only with several ranks."""
    api_keys: Annotated[tuple[str, ...], Option(SECURITY, "KEY", name="api_key")] = ()
    """A key, one of which every request must send; may be repeated. The environment variable (keys
    separated by spaces) or the file keeps keys out of the process list."""
    allowed_hosts: Annotated[tuple[str, ...], Option(SECURITY, "HOST")] = ()
    """Host name that requests may name, such as api.example.com or *.example.com; may be repeated,
    and * allows every name. Addresses and local names are always allowed; without this option, so
    is every name where API keys are set."""
    trusted_proxies: Annotated[tuple[str, ...], Option(SECURITY, "ADDRESS")] = ()
    """Address or network of a proxy whose X-Forwarded-For names the client; may be repeated. By
    default no proxy is believed, and its clients share one turn."""
    operator_key: Annotated[str | None, Option(SECURITY, "KEY")] = None
    """Key of the operator, for adapters, the prefix cache and what routers ask; without it, these
    answer only requests from this machine that came through no proxy. The environment variable or
    the file keeps the key out of the process list."""
    salt_per_key: Annotated[bool, Option(SECURITY)] = False
    """Whether requests of different API keys share no prefixes, so that the time to the first token
    tells nobody of others' prompts."""
    cors_origins: Annotated[tuple[str, ...], Option(SECURITY, "ORIGIN")] = ()
    """Origin whose web pages may send requests from a browser; may be repeated, and * allows every
    origin. By default no page of another origin may."""
    max_body_bytes: Annotated[int, Option(LIMITS, "BYTES", least=1)] = 32 << 20
    """Largest size of a request body in bytes; larger ones get a 413."""
    stored_response_bytes: Annotated[int, Option(LIMITS, "BYTES", least=0)] = 64 << 20
    """Bytes of memory for the latest responses of /v1/responses, which previous_response_id
    continues; 0 stores none."""
    unknown_fields: Annotated[Literal["refuse", "warn"], Option(ANSWERS)] = "refuse"
    """What happens to a request with an unknown field: refuse answers 400; warn ignores the field,
    and the log names it once."""
    admin_endpoints: Annotated[bool, Option(SECURITY)] = False
    """Whether POST /reset_prefix_cache is served, which slows other clients down."""
    metrics_prefix: Annotated[MetricsPrefix, Option(WATCHING)] = "twolane"
    """Prefix of metrics that vLLM has too: vllm serves dashboards and scaling rules written for
    vLLM; both shows each of these metrics under both names."""
    tool_call_parser: Annotated[ToolForm | None, Option(ANSWERS)] = None
    """Format in which the model writes tool calls; by default detected from the chat template."""
    disable_additional_properties: Annotated[bool, Option(ANSWERS)] = False
    """Whether objects whose schema does not say `additionalProperties` have declared names only, in
    answers and in the arguments of tools."""
    reasoning_parser: Annotated[Literal["auto", "none"], Option(ANSWERS)] = "auto"
    """Where the thinking goes: auto separates it from the answer if the chat template has marks for
    it, such as <think> or [THINK]; none leaves it in the answer."""
    reasoning_field: Annotated[Literal["reasoning_content", "reasoning"], Option(ANSWERS)] = (
        "reasoning_content"
    )
    """Field of chat answers for the thinking: reasoning_content as in SGLang and llama.cpp, or
    reasoning as in vLLM since 0.16."""
    otlp_endpoint: Annotated[str | None, Option(WATCHING, "URL")] = None
    """OpenTelemetry collector that gets a trace of every request over HTTP, such as
    http://localhost:4318. Needs twolane[otel]."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option(WATCHING)] = "info"
    """Lowest level of log messages; debug logs a line for every request."""

    def __post_init__(self) -> None:
        """Check the settings before a model is loaded.

        Raises:
            FieldError: a setting is, by itself or beside another.
        """
        if not self.host.strip():
            raise FieldError("host", "must not be empty")
        if self.max_queued_per_key is not None and not self.api_keys:
            raise FieldError("max_queued_per_key", "needs --api-key")
        for proxy in self.trusted_proxies:
            if not is_network(proxy):
                raise FieldError("trusted_proxies", f"must be addresses or networks, not {proxy!r}")
        for host in self.allowed_hosts:
            if re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+", host) is None:
                raise FieldError("allowed_hosts", f"must be names without a port, not {host!r}")
        if self.salt_per_key and not self.api_keys:
            raise FieldError("salt_per_key", "needs --api-key")
        if self.operator_key is not None and not self.operator_key.strip():
            raise FieldError("operator_key", "must not be empty")
        if self.operator_key in self.api_keys:
            raise FieldError("operator_key", "must not be an API key")
        endpoint = self.otlp_endpoint
        if endpoint is not None and not is_http_url(endpoint):
            problem = f"must be an http:// or https:// URL, not {endpoint!r}"
            raise FieldError("otlp_endpoint", problem)
        for name in self.served_model_names:
            if not (name and name.isprintable()):
                problem = f"must be one line of printable characters, not {name!r}"
                raise FieldError("served_model_name", problem)

    def names(self, model: str) -> tuple[str, ...]:
        """Return the names of a model for clients, of which answers have the first."""
        return self.served_model_names or (model,)

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Hosts that requests may name besides local ones; None: see `Gate`."""
        return (*self.allowed_hosts, self.host) if self.allowed_hosts else None


def is_network(text: str) -> bool:
    """Return whether a text is an IP address or network."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def is_http_url(text: str) -> bool:
    """Return whether a text is the URL of an HTTP server."""
    try:
        parts = urllib.parse.urlsplit(text)
        named = parts.hostname is not None and parts.port != 0
    except ValueError:
        return False
    return named and parts.scheme in ("http", "https") and text.isprintable() and " " not in text
