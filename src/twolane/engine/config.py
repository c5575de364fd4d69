"""The engine's settings, as the front hands them to the engine process."""

from typing import Literal

import msgspec

from twolane.common.vocabulary import EstimatorName
from twolane.slo import Slo

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["fp8", "fp8_block128", "int4"]

DEFAULT_SYSTEM = "static-split"
TRANSPORT_SECONDS = 0.002
"""Seconds that a token may take from the device to an HTTP client on a busy host."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: a model, a device, a system and their limits."""

    model: str
    """An alias, a local directory, a GGUF file, a built-in shape or a Hugging Face id."""
    load_format: LoadFormat = "auto"
    """"dummy": random weights, no files needed."""
    dtype: DType = "auto"
    """Type of weights and KV cache; "auto" is float32 on a CPU and bfloat16 on a GPU."""
    quantization: Quantization | None = None
    """Weights in 16 bits are rounded to this while they are loaded: "fp8" has a scale for each row,
    "fp8_block128" one for each 128 x 128, "int4" (dummy weights alone) one for 128 columns. None
    serves a checkpoint as it is stored."""
    max_positions: int | None = None
    """Raises (or lowers) the positions the model is built for."""
    max_model_len: int | None = None
    """The most tokens of one request; None: the model's positions, if the KV pool holds them."""
    seed: int = 0
    """Seed of dummy weights and of requests that bring none."""
    system: str = DEFAULT_SYSTEM
    options: dict[str, str] = {}
    """The system's own settings by name, as text (`twolane.systems.registry`)."""
    slo: Slo = Slo()
    """Bounds of requests that bring none."""
    tbt_buffer: float = 0.020
    """The most seconds for which a token of a request with a TBT bound is held back, so that gaps
    are even and a late token is in time; at most the bound itself. 0 delivers tokens at once."""
    transport: float = 0.0
    """Seconds that the way from the engine to a client may take: a part of each TBT bound is left
    for it. A server sets it to `TRANSPORT_SECONDS`; it is no option."""
    page_size: int | None = None
    """Tokens in a KV page; None: 16 on a CPU, 32 on a GPU, which serves 16, 32 and 64."""
    kv_tokens: int | None = None
    """Tokens in the KV pool; None: a share of the free memory."""
    max_running: int = 256
    """The most requests in prefill and decode together."""
    prefix_cache: bool = True
    device: Device = "auto"
    """"auto": a GPU if there is one, unless `cores` asks for the CPU."""
    cores: int | None = None
    """CPU cores for both lanes; None: all that this process may use."""
    levels: tuple[int, ...] | None = None
    """On a GPU, SMs for the decode lane, one level each; None: every 16, (): none."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that this process may take, above 0 and at most 1."""
    profile: str | None = None
    """File of `twolane profile`; None: the cache's for this device and model, if there is one."""
    estimator: EstimatorName | None = None
    """Fitted on the profile; None: the system's own. Without a profile there is only what launches
    are seen to take."""
    trace: str | None = None
    """File for a Chrome / Perfetto trace of the run."""


class EngineStart(msgspec.Struct, frozen=True):
    """The first line on the engine process's standard input, as JSON.

    The front keeps that pipe open; its end means that the front is gone, and the engine exits.
    """

    config: EngineConfig
    to_engine: str
    """ZeroMQ address to pull `messages.ToEngine` from; the front binds it."""
    from_engine: str
    """ZeroMQ address to push `messages.FromEngine` to; the front binds it."""
    log_level: str = "warning"
    """The least that the engine writes to standard error."""
