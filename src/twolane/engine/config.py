"""The engine's settings, as the API process hands them to the engine process."""

from typing import Annotated, Literal

import msgspec

from twolane.common.options import Nested, Option, milliseconds
from twolane.devices import DEVICE, MEMORY, MODEL, DeviceSettings
from twolane.estimate.names import EstimatorName
from twolane.slo import Slo

SCHEDULING, EVENTS = "Scheduling", "KV events"
"""Panels of options in the help."""

TbtBufferAt = Literal["server", "client"]
SnapshotBorders = Literal[
    "prompt", "turn", "branch", "prompt+turn", "prompt+branch", "turn+branch", "prompt+turn+branch"
]

LORA = ("lora", "lora_endpoints", "max_loras", "max_lora_rank")
"""Names of the options of adapters."""
KV_EVENTS = (
    *("kv_events_endpoint", "kv_events_replay_endpoint"),
    *("kv_events_topic", "kv_events_buffer_steps"),
)
"""Names of the options of `KVEventsConfig`."""
UNPROFILED = (
    "system", "option", "slo_ttft_ms", "slo_ttft_per_1k_ms", "slo_tbt_ms", "slo_tpot_ms",
    "tbt_buffer_ms", "tbt_buffer_at", "prefix_cache", "disaggregated", "profile", "estimator",
    "trace", "capture_when_idle", "chat_template", "snapshots", "snapshot_borders", *LORA,
    *KV_EVENTS,
)  # fmt: skip
"""Names of the options that do not change how long launches take; `twolane profile` has the
others."""
LEAST_RUNNING, MOST_RUNNING, RUNNING_TOKENS = 256, 1024, 1024
"""Least and most requests that run together where the settings do not say, and tokens of a GPU's KV
pool for each of them. Each has a row in all buffers of the decode lane; with more of them than the
most, what the engine computes on its core delays steps."""
TRANSPORT_SECONDS = 0.002
"""Seconds that a token may take from the device to an HTTP client on a busy host."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses and limits of the publisher of prefix cache events."""

    endpoint: Annotated[str | None, Option(EVENTS, "ADDRESS")] = None
    """ZeroMQ address at which changes of the prefix cache are published in vLLM's format: bound if
    it has a wildcard (tcp://*:5557) or is a path (ipc:///run/kv), else connected to. By default
    nothing is published."""
    replay_endpoint: Annotated[str | None, Option(EVENTS, "ADDRESS")] = None
    """ZeroMQ address, bound by the engine, at which a subscriber asks for batches that it has
    missed; by default there is none."""
    topic: Annotated[str, Option(EVENTS)] = ""
    """Topic at the start of each message, such as kv@HOST:PORT@MODEL for llm-d."""
    buffer_steps: Annotated[int, Option(EVENTS, least=1)] = 10_000
    """Number of batches of changes that are kept for replays, at most 64 MiB of them."""


class EngineConfig(DeviceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine: its model, device, system and limits."""

    max_model_len: Annotated[int | None, Option(MODEL, "TOKENS", least=2)] = None
    """Largest number of tokens of one request, prompt and answer together; by default the model's
    positions, if the KV pool holds them."""
    chat_template: Annotated[str | None, Option(MODEL, "FILE")] = None
    """File with a chat template (Jinja) in place of the model's own, with tools and without."""
    system: Annotated[str | None, Option(SCHEDULING)] = None
    """Policy that shares the device between prefill and decode; `twolane doctor` lists them, and
    package.module.Class names one of your own; by default `auto` on a GPU and in simulation,
    `static-split` on a CPU."""
    options: Annotated[dict[str, str], Option(SCHEDULING, "KEY=VALUE", name="option")] = (
        msgspec.field(default_factory=dict)
    )
    """Setting of the system; may be repeated. `twolane doctor --system NAME` lists them."""
    slo: Annotated[Slo, Nested("slo_")] = Slo()
    """Latency bounds of requests that have none of their own."""
    tbt_buffer: Annotated[float, milliseconds(SCHEDULING, "tbt_buffer", least=0)] = 0.020
    """Longest time in seconds for which a token of a request with a TBT bound is held back, so that
    gaps are even and a late token is in time; at most the bound itself. 0 sends tokens at once,
    except a first token whose second could not follow in time."""
    tbt_buffer_at: Annotated[TbtBufferAt, Option(SCHEDULING)] = "server"
    """Where tokens are held back for that time: `client` is for clients that do so themselves; the
    server plans as if it did and sends each token at once."""
    transport: float = 0.0
    """Seconds that the way from the engine to a client may take: a part of each TBT bound is left
    for it. A server sets it to `TRANSPORT_SECONDS`; it is no option."""
    page_size: Annotated[int | None, Option(MEMORY, "TOKENS", least=1)] = None
    """Number of tokens in a KV page; by default 16 on a CPU and 32 on a GPU (16, 32 or 64)."""
    kv_tokens: Annotated[int | None, Option(MEMORY, "TOKENS", least=1)] = None
    """Number of tokens in the KV pool; by default as many as fit into a share of the free
    memory."""
    max_running: Annotated[int | None, Option(SCHEDULING, least=1, most=1 << 16)] = None
    """Largest number of requests in prefill and decode together; by default 256, and on a GPU one
    for each 1,024 tokens of the KV pool if that is more, up to 1,024, unless the model has linear
    attention."""
    prefix_cache: Annotated[bool, Option(MEMORY)] = True
    """Whether prompts with the same prefix share its keys and values, which are computed once."""
    snapshots: Annotated[int | None, Option(MEMORY, least=1)] = None
    """Number of snapshots of states that are kept of a model with linear attention, whose prefixes
    are reused from snapshots on; by default a third of the memory for them and the KV pool, or with
    --kv-tokens as many as --max-running, which is also the least."""
    snapshot_borders: Annotated[SnapshotBorders, Option(MEMORY)] = "prompt+branch"
    """Page borders at which prompts save snapshots: the last one of the prompt, the one where what
    is cached of a conversation ends and a new turn begins, and the one where the prompt leaves what
    is cached although others go on (a branch)."""
    kv_events: Annotated[KVEventsConfig, Nested("kv_events_")] = KVEventsConfig()
    """Where changes of the prefix cache are published."""
    profile: Annotated[str | None, Option(SCHEDULING, "FILE")] = None
    """Measurements of `twolane profile` to predict with; by default the profile of this
    device and model in the cache, if there is one."""
    estimator: Annotated[EstimatorName | None, Option(SCHEDULING)] = None
    """Estimator of the times that systems plan with, fitted on the profile; by default the one that
    the system was published with. `twolane bench estimators` compares them."""
    capture_when_idle: Annotated[bool | None, Option(DEVICE)] = None
    """Whether a GPU serves before the CUDA graphs of all sizes are captured: the rest follow while
    nothing runs, and until then steps and passes are padded to larger sizes. By default servers on
    one GPU do; `LLM` and run-batch, whose work has no pause, capture all graphs first, and so do
    ranks and 1P1D always."""
    trace: Annotated[str | None, Option(DEVICE, "FILE")] = None
    """File for a Chrome / Perfetto trace of the run (open it in ui.perfetto.dev)."""


class EngineStart(msgspec.Struct, frozen=True):
    """The first line on the engine process's standard input, as JSON.

    The API process keeps that pipe open; when it ends, that process is gone, and the engine exits.
    """

    config: EngineConfig
    to_engine: str
    """ZeroMQ address to pull `messages.ToEngine` from; the API process binds it."""
    from_engine: str
    """ZeroMQ address to push `messages.FromEngine` to; the API process binds it."""
    log_level: str = "warning"
    """Lowest level of log messages that the engine writes to standard error."""
    begun: float | None = None
    """Time in seconds on the monotonic clock at which the API process asked for the engine; None:
    the start is timed from the first line of the engine's main function on."""
