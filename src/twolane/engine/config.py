"""The engine's settings, as the API process hands them to the engine process."""

from typing import Annotated, Literal

import msgspec

from twolane.common.options import MAX_SEED, Nested, Option, milliseconds
from twolane.estimate.names import EstimatorName
from twolane.slo import Slo

MODEL, SCHEDULING, MEMORY, DEVICE = "Model", "Scheduling", "Memory", "Device"
EVENTS = "KV events"
"""Panels of options in the help."""

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["fp8", "fp8_block128", "int4"]
AllReduce = Literal["auto", "nccl", "two-shot", "joined"]
KVCacheDType = Literal["auto", "fp8"]
TbtBufferAt = Literal["server", "client"]

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
    "trace", "chat_template", *LORA, *KV_EVENTS,
)  # fmt: skip
"""Names of the options that do not change how long launches take; `twolane profile` has the
others."""
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


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine: its model, device, system and limits."""

    model: str
    """Alias, local directory, GGUF file, built-in shape or Hugging Face id of the model."""
    load_format: Annotated[LoadFormat, Option(MODEL)] = "auto"
    """Where weights come from: `dummy` makes random ones, for which no files are needed."""
    dtype: Annotated[DType, Option(MODEL)] = "auto"
    """Number format of weights, activations and KV cache; `auto` is float32 on a CPU and bfloat16
    on a GPU."""
    quantization: Annotated[Quantization | None, Option(MODEL)] = None
    """Scheme to which weights in 16 bits are rounded while they are loaded: fp8 has a scale for
    each row, fp8_block128 one for each 128 x 128, int4 (dummy weights alone) one for 128 columns;
    by default a checkpoint is served as it is stored."""
    max_positions: Annotated[int | None, Option(MODEL, "TOKENS", least=1)] = None
    """Number of positions, instead of the number in the model's config."""
    max_model_len: Annotated[int | None, Option(MODEL, "TOKENS", least=2)] = None
    """Largest number of tokens of one request, prompt and answer together; by default the model's
    positions, if the KV pool holds them."""
    chat_template: Annotated[str | None, Option(MODEL, "FILE")] = None
    """File with a chat template (Jinja) in place of the model's own, with tools and without."""
    seed: Annotated[int, Option(MODEL, most=MAX_SEED)] = 0
    """Seed of dummy weights, and of sampling where a request has no seed of its own."""
    router_skew: Annotated[float, Option(MODEL, least=0.0)] = 0.0
    """Exponent of Zipf's law by which routers of dummy weights prefer some experts; 0 makes all
    experts equally likely."""
    lora: Annotated[dict[str, str], Option(MODEL, "NAME=PATH", named=True)] = {}
    """LoRA adapter to load from PATH, the directory of a PEFT checkpoint; requests select it by the
    model name NAME. May be repeated."""
    lora_endpoints: Annotated[bool, Option(MODEL)] = False
    """Whether POST /v1/load_lora_adapter and /v1/unload_lora_adapter are served; they let clients
    load any directory that the server can read."""
    max_loras: Annotated[int, Option(MODEL, least=1)] = 8
    """Largest number of adapters that are loaded at a time."""
    max_lora_rank: Annotated[int, Option(MODEL, least=1, most=64)] = 16
    """Largest rank of an adapter's module."""
    system: Annotated[str | None, Option(SCHEDULING)] = None
    """Policy that shares the device between prefill and decode; `twolane doctor` lists them, and
    package.module.Class names one of your own; by default `auto` on a GPU and in simulation,
    `static-split` on a CPU."""
    options: Annotated[dict[str, str], Option(SCHEDULING, "KEY=VALUE", name="option")] = {}
    """Setting of the system; may be repeated. `twolane doctor --system NAME` lists them."""
    slo: Annotated[Slo, Nested("slo_")] = Slo()
    """Latency bounds of requests that have none of their own."""
    tbt_buffer: Annotated[float, milliseconds(SCHEDULING, "tbt_buffer", least=0)] = 0.020
    """Longest time in seconds for which a token of a request with a TBT bound is held back, so that
    gaps are even and a late token is in time; at most the bound itself. 0 sends tokens at once."""
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
    max_running: Annotated[int, Option(SCHEDULING, least=1, most=1 << 16)] = 256
    """Largest number of requests in prefill and decode together."""
    kv_cache_dtype: Annotated[KVCacheDType, Option(MEMORY)] = "auto"
    """Number format of the KV cache: fp8 is e4m3 with a scale for each token and head, and holds
    about twice as many tokens; `auto` is that of --dtype."""
    prefix_cache: Annotated[bool, Option(MEMORY)] = True
    """Whether prompts with the same prefix share its keys and values, which are computed once."""
    kv_events: Annotated[KVEventsConfig, Nested("kv_events_")] = KVEventsConfig()
    """Where changes of the prefix cache are published."""
    device: Annotated[Device, Option(DEVICE)] = "auto"
    """Device to serve on; `auto` is an NVIDIA GPU if there is one, unless --cores asks for the
    CPU."""
    tensor_parallel_size: Annotated[int, Option(DEVICE, "RANKS", alias="tp", least=1)] = 1
    """Number of ranks that share each layer of the model: a GPU for each, or processes on the same
    cores."""
    all_reduce: Annotated[AllReduce, Option(DEVICE)] = "auto"
    """All-reduce of decode steps on several GPUs: `nccl`; `two-shot`, over memory that all GPUs
    map; `joined`, the same in one launch with the norm that follows; `auto` times these at the
    start and takes the fastest for each number of rows."""
    disaggregated: Annotated[bool, Option(DEVICE)] = False
    """Whether prefill and decode have a device each (1P1D): a GPU, or a process with half of the
    CPU cores. Keys and values are pushed layer by layer; the system is two-stream."""
    cores: Annotated[int | None, Option(DEVICE)] = None
    """Number of CPU cores for both lanes; by default all that this process may use."""
    levels: Annotated[tuple[int, ...] | None, Option(DEVICE, "SMS,…")] = None
    """Numbers of SMs that decode may have beside prefill on a GPU, such as 32,48,64; by default all
    multiples of 16."""
    gpu_memory_utilization: Annotated[float, Option(MEMORY, "SHARE")] = 0.9
    """Share of a GPU's memory for weights, workspaces and the KV pool, above 0 and at most 1."""
    profile: Annotated[str | None, Option(SCHEDULING, "FILE")] = None
    """Measurements of `twolane profile` to predict with; by default the profile of this
    device and model in the cache, if there is one."""
    estimator: Annotated[EstimatorName | None, Option(SCHEDULING)] = None
    """Estimator of the times that systems plan with, fitted on the profile; by default the one that
    the system was published with. `twolane bench estimators` compares them."""
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
