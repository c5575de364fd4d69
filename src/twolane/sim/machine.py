"""The machine of a simulated engine."""

from collections.abc import Callable, Sequence

from twolane.common.errors import FieldError
from twolane.devices import MachineKind, OnProgress
from twolane.engine.config import EngineConfig
from twolane.engine.settings import level_shares, simulated_option
from twolane.kernels.sizes import GRAPH_BYTES, KEY_TILE, WORKSPACE_TOKENS
from twolane.lanes.settings import LaneSizes
from twolane.model.page_layout import PageLayout
from twolane.model.spec import ModelSpec
from twolane.results.result import Energy
from twolane.sim.device import DeviceModel
from twolane.sim.disaggregated import DisaggregatedDevice
from twolane.sim.fused_attention import FusedAttentionDevice
from twolane.sim.gpus import Gpu, revision
from twolane.sim.lanes import SimLanes
from twolane.sim.nano_batches import NanoBatchDevice
from twolane.sim.operators import ITEM, Storage, kv_parts, shapes_of

LEVEL_STEP = 16
"""Units between two default levels, as on a GPU."""
SHARE_STEP = 2
"""Units of which every share is a multiple: two SMs are one TPC (DuetServe §4.2)."""


def storage_of(config: EngineConfig, spec: ModelSpec) -> Storage:
    """Return the widths of weights and KV cache, scales included: a float32 for each row of a
    matrix or each block of 128 x 128, 32 bits for each group of 128 4-bit numbers, or a byte for
    each 32 numbers of experts in MXFP4."""
    rows, blocks = 1 + 4 / spec.hidden_size, 1 + 4 / 128**2
    widths = {None: float(ITEM), "fp8": rows, "fp8_block128": blocks, "int4": 0.5 + 4 / 128}
    weights, mxfp4 = widths.get(config.quantization, float(ITEM)), config.quantization == "mxfp4"
    kv = spec.kv_itemsize(config.kv_cache_dtype, ITEM)
    return Storage(weights, kv, 0.5 + 1 / 32 if mxfp4 else None)


def expert_parameters(spec: ModelSpec) -> int:
    """Return the weights of all layers' experts."""
    if spec.moe is None:
        return 0
    each = 3 * spec.hidden_size * spec.moe.intermediate_size
    return spec.expert_layers * spec.moe.rule.stored * each


class SimulatedMachine:
    """A model on simulated GPUs, as a machine for `engine.build`.

    Args:
        gpu: kind of the GPUs.
        spec: the model's shape.
        config: the engine's settings.
        tp: Number of GPUs that share each layer, in each of the two groups if the engine is
            disaggregated (`sim/disaggregated.py`).
        seed: Seed of the device's noise.

    Raises:
        FieldError: a level leaves a lane without units.
        ValueError: the model's heads cannot be shared by this many GPUs.
    """

    kind: MachineKind = "simulated"
    settles = False
    page_sizes: Sequence[int] = (32, 16, 64)

    def __init__(
        self, gpu: Gpu, spec: ModelSpec, config: EngineConfig, *, tp: int = 1, seed: int = 0
    ) -> None:
        if spec.convolution is not None:
            raise FieldError("model", "layers of short convolutions are not simulated yet")
        self.spec = spec
        self._storage = storage = storage_of(config, spec)
        self.device = _device_model(config)(gpu, spec, tp, seed, storage)
        self.pass_sizes: Sequence[int] = self.device.pass_sizes
        self.name = f"simulated {gpu.name}" + (f" x{tp}" if tp > 1 else "")
        self.itemsize = ITEM
        self.kv_itemsize = float(storage.kv)
        dense, experts = spec.layers * shapes_of(spec, 1).weights, expert_parameters(spec)
        stored = storage.weights * dense + storage.experts * experts
        self.weight_itemsize = float(stored / (dense + experts))
        own = sum(spec.each[i].kv_size // kv_parts(spec.each[i], tp) for i in spec.kv_layers)
        self.page_token_bytes = round(2 * own * storage.kv)
        self.page_layout = PageLayout.of(spec, KEY_TILE)
        self.state_bytes = spec.state_bytes(ITEM) // tp
        self.tp = tp
        self.revision = revision(gpu)
        self._utilization = config.gpu_memory_utilization
        self._levels = _levels(gpu, level_shares(config, gpu.units, SHARE_STEP))

    def kv_bytes(self, max_model_len: int) -> int:
        """See `Machine.kv_bytes`: of one GPU, what weights, both lanes and graphs leave."""
        device, spec = self.device, self.spec
        tokens = min(max_model_len, WORKSPACE_TOKENS)
        attention = spec.hidden_size + 3 * spec.q_size / device.tp
        attention += 2 * spec.kv_size / kv_parts(spec, device.tp)
        if (delta := spec.delta) is not None:  # as lanes have room for both kinds of attention
            solved = 2 * (64 + 1) * delta.value_heads
            room = delta.projected + delta.mixed_size + 2 * delta.value_size + solved
            attention += room / device.tp
        width = 3 * spec.intermediate_size / device.tp
        if spec.moe is not None:
            inner = 3 * spec.moe.intermediate_size / device.tp
            width = spec.moe.entries * (2 * spec.hidden_size + inner)
        # Most tokens whose MLP activations a lane holds at once.
        mlp = min(tokens, 8192) * width
        lane = ITEM * (tokens * (attention + 2 * spec.hidden_size) + mlp)
        matrices = spec.layers * shapes_of(spec, device.tp).weights
        weights = ITEM * spec.parameters / device.tp - (ITEM - self._storage.weights) * matrices
        weights -= (ITEM - self._storage.experts) * expert_parameters(spec) / device.tp
        # Bytes that driver, libraries and loading take; from pool sizes on an H200.
        taken = weights + 2 * lane + GRAPH_BYTES + 2.6e9
        return max(0, int(self._utilization * device.gpu.memory - taken))

    def start(self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress) -> SimLanes:
        """See `Machine.start`."""
        device = self.device
        known = device.power_known and device.gpu.cap_watts
        return SimLanes(device.gpu.units, self._levels, device, device.watts if known else None)

    def energy(self, lanes: SimLanes) -> Energy | None:
        """Return the energy of these lanes until now; None: it is not known."""
        seconds = lanes.clock()
        if not lanes.joules or not seconds:
            return None
        cap = self.tp * self.device.gpu.cap_watts
        return Energy(f"{self.name}, by a law of power", lanes.joules, lanes.joules / seconds, cap)


def _device_model(config: EngineConfig) -> type[DeviceModel]:
    """Return the device model that the settings ask for."""
    if config.disaggregated:
        return DisaggregatedDevice
    models = {"nano_batches": NanoBatchDevice, "fused_attention": FusedAttentionDevice}
    option = simulated_option(config)
    return DeviceModel if option is None else models[option]


def _levels(gpu: Gpu, listed: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return (prefill units, decode units) of each level, fewest for decode first."""
    if listed is None:
        listed = range(LEVEL_STEP, gpu.units - LEVEL_STEP + 1, LEVEL_STEP)
    for units in listed:
        if not units < gpu.units:
            raise FieldError(
                "levels", f"{units} leave none of the {gpu.units} units of {gpu.name} to prefill"
            )
    return [(gpu.units - units, units) for units in sorted(set(listed))]
