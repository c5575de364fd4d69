"""Devices: their kinds and settings, their lanes' names, and the progress of a start on one."""

import time
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from twolane.common.options import MAX_SEED, Option

LaneName = Literal["prefill", "decode", "device"]
"""A lane: prefill, decode, or the whole device (both phases in one batch)."""

LANES: tuple[LaneName, ...] = ("prefill", "decode", "device")
EXCLUSIVE: dict[LaneName, tuple[LaneName, ...]] = {
    "prefill": ("prefill", "device"),
    "decode": ("decode", "device"),
    "device": LANES,
}
"""For each lane, the lanes whose launches run before or after its own and never beside them."""

MachineKind = Literal["cpu", "cuda", "simulated"]
"""The kind of device that an engine runs on."""

OnProgress = Callable[[str, float], None]
"""Called with a stage of a start and the fraction of it that is done."""


class StartTimes:
    """Adds up the seconds of each stage of a start, from the progress that it reports.

    Args:
        begun: Time in seconds on the monotonic clock at which the process was asked for; the time
            until now is the stage `imports`.
        tell: Called with the progress, too.
    """

    def __init__(self, begun: float, tell: OnProgress) -> None:
        self._begun, self._tell = begun, tell
        self.seconds: dict[str, float] = {}
        """Seconds by stage, in the order in which the stages began."""
        self._stage, self._since = "imports", begun
        self._turn_to("settings")

    def __call__(self, stage: str, fraction: float) -> None:
        """Take a step of the start; what comes until the next one counts as this stage."""
        self._turn_to(stage)
        self._tell(stage, fraction)

    def end(self) -> str:
        """End the last stage; return the seconds of all of them as a line for a log."""
        self._turn_to("")
        parts = ", ".join(f"{stage} {took:.1f}" for stage, took in self.seconds.items())
        return f"started in {self._since - self._begun:.1f} s: {parts}"

    def _turn_to(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now


MODEL, MEMORY, DEVICE = "Model", "Memory", "Device"
"""Panels of options in the help."""

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["fp8", "fp8_block128", "int4", "mxfp4"]
AllReduce = Literal["auto", "nccl", "two-shot", "joined"]
KVCacheDType = Literal["auto", "fp8"]


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an engine that its lanes read, in every process that has some."""

    model: str
    """Alias, local directory, GGUF file, built-in shape or Hugging Face id of the model."""
    load_format: Annotated[LoadFormat, Option(MODEL)] = "auto"
    """Where weights come from: `dummy` makes random ones, for which no files are needed."""
    dtype: Annotated[DType, Option(MODEL)] = "auto"
    """Number format of weights, activations and KV cache; `auto` is bfloat16 on a GPU and float32
    on a CPU, where weights that are stored in few bits get eight."""
    quantization: Annotated[Quantization | None, Option(MODEL)] = None
    """Scheme to which weights in 16 bits are rounded while they are loaded: fp8 has a scale for
    each row, fp8_block128 one for each 128 x 128; for dummy weights alone, int4 has one for 128
    columns, and mxfp4 rounds experts as gpt-oss has them; by default a checkpoint is served as it
    is stored."""
    max_positions: Annotated[int | None, Option(MODEL, "TOKENS", least=1)] = None
    """Number of positions, instead of the number in the model's config."""
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
    kv_cache_dtype: Annotated[KVCacheDType, Option(MEMORY)] = "auto"
    """Number format of the KV cache: fp8 is e4m3 with a scale for each token and head, and holds
    about twice as many tokens; `auto` is that of --dtype."""
    gpu_memory_utilization: Annotated[float, Option(MEMORY, "SHARE", positive=True, most=1)] = 0.9
    """Share of a GPU's memory for weights, workspaces and the KV pool, above 0 and at most 1."""
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

    @property
    def adapter_slots(self) -> int:
        """Number of LoRA adapters that can be loaded at a time; 0: none is served."""
        return self.max_loras if self.lora or self.lora_endpoints else 0

    @property
    def ranks(self) -> int:
        """Number of processes that serve one engine."""
        return 2 if self.disaggregated else self.tensor_parallel_size
