"""The settings of a simulation."""

from typing import Annotated

import msgspec

from twolane.common.errors import FieldError
from twolane.common.options import Option
from twolane.devices import DEVICE
from twolane.engine.config import EngineConfig
from twolane.engine.settings import check_settings, simulated_option
from twolane.results.result import BenchConfig
from twolane.sim.gpus import GPUS, Gpu

LINK = Option(
    DEVICE,
    "GB/S",
    name="link_gb_s",
    factor=1e-9,
    least=1e6,
    help="GB/s that collectives reach between GPUs in each direction; by default those of NVLink "
    "on this GPU.",
)


class Unevenness(msgspec.Struct, frozen=True, kw_only=True):
    """Deviation of an emulated GPU from its profile; defaults are those of H200s
    (docs/notes/device-model.md)."""

    noise: float = 0.045
    """Standard deviation of the logarithm of a step's or slice's time; a hybrid pass has half."""
    outliers: float = 0.015
    """Fraction of the decode steps that are outliers."""
    configurations: float = 0.03
    """Standard deviation of the logarithm of each configuration's factor."""
    slower: float = 1.03
    """Factor from the profile's times to those of all launches."""
    moments: float = 0.25
    """Fraction added to the times of launches in slow periods."""


class SimulateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `twolane simulate`."""

    engine: EngineConfig
    """Settings of the engine, of which device, dtype and load format do not apply; `disaggregated`
    gives prefill and decode as many GPUs each as share a layer."""
    gpu: Annotated[str, Option(DEVICE)] = "h200"
    """GPU to simulate: a100-80gb, a100-80gb-split, h20, h100 or h200."""
    tp: Annotated[int, Option(DEVICE, name="tensor_parallel_size", alias="tp", least=1)] = 1
    """Number of GPUs that share each layer (tensor parallelism)."""
    link_bandwidth: Annotated[float | None, LINK] = None
    """Bytes per second that collectives reach between GPUs in each direction; by default those of
    NVLink on this GPU."""
    bench: BenchConfig
    """Workload, SLOs and percentiles; what concerns HTTP does not apply."""
    host_factor: Annotated[float, Option(DEVICE, least=0)] = 0.0
    """How many times slower than a fast host the simulated API process and client are; 0: tokens
    reach the client when they are due."""
    uneven: Unevenness | None = None
    """Deviation of an emulated GPU from the engine's profile; None simulates a smooth GPU."""

    def device(self) -> Gpu:
        """Return the GPU with the configured link."""
        gpu = GPUS[self.gpu]
        if self.link_bandwidth is None:
            return gpu
        return msgspec.structs.replace(gpu, link_bandwidth=self.link_bandwidth)

    def check(self) -> None:
        """Check the settings.

        Raises:
            FieldError: it names the first wrong setting.
        """
        check_settings(self.engine)
        if self.gpu not in GPUS:
            raise FieldError("gpu", f"{self.gpu!r} is unknown; there are: {', '.join(GPUS)}")
        if self.uneven is not None and self.tp != 1:
            raise FieldError("tp", f"is 1 for an emulated card, not {self.tp}")
        if self.engine.dtype not in ("auto", "bfloat16"):
            raise FieldError("dtype", f"is bfloat16 in a simulation, not {self.engine.dtype}")
        if self.engine.quantization not in (None, "fp8", "int4", "mxfp4"):
            raise FieldError("quantization", "is fp8, int4 or mxfp4 in a simulation, or none")
        narrow = self.engine.quantization == "fp8" or self.engine.kv_cache_dtype != "auto"
        if narrow and self.gpu == "a100-80gb":
            raise FieldError("gpu", "a100-80gb does not multiply in FP8; h100 and h200 do")
        if self.engine.cores is not None or self.engine.device != "auto":
            name = "device" if self.engine.cores is None else "cores"
            raise FieldError(name, "has no meaning in a simulation")
        if self.engine.disaggregated and self.uneven is not None:
            raise FieldError("disaggregated", "has no meaning for an emulated card")
        if (option := simulated_option(self.engine)) is not None and self.uneven is not None:
            raise FieldError("options", f"{option} is not simulated on an emulated card")
        self._check_buffers()
        self.bench.check()

    def _check_buffers(self) -> None:
        """Refuse that server and client both hold tokens back."""
        engine = self.engine
        in_server = engine.slo.tbt is not None and engine.tbt_buffer_at == "server"
        if self.bench.playout and in_server and engine.tbt_buffer:
            problem = "adds a buffer to the server's: add --tbt-buffer-at client, or"
            raise FieldError("playout", f"{problem} --tbt-buffer-ms 0")
