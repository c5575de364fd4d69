"""The data sheets of the simulated GPUs."""

import hashlib

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, as its data sheet and measurements give it."""

    name: str
    units: int
    """SMs."""
    memory: float
    """Bytes that a process can have."""
    unit_flops: float
    """Dense bfloat16 FLOP/s of one SM at the top clock."""
    bandwidth: float
    """Bytes/s that reading reaches at most."""
    unit_bandwidth: float
    """Bytes/s that one SM pulls in attention's read, before the memory saturates."""
    product_units: float
    """SMs over which the bandwidth of few-row products saturates: B (1 - exp(-SMs / this))."""
    power_units: float
    """SMs that can be busy with matrix products at the top clock under the power cap."""
    traffic_units: float
    """What traffic at full bandwidth draws, in those units."""
    power_exponent: float = 4.1
    """Of arithmetic's power over the clock."""
    lowest_clock: float = 0.5
    """Of the top clock; the power cap does not push it lower."""
    product_share: float = 0.878
    """Of `unit_flops` that large matrix products reach."""
    prompt_attention_share: float = 0.70
    """Of `unit_flops` that attention over prompts reaches."""
    decode_attention_share: float = 0.87
    """Of `bandwidth` that attention of decode steps reaches."""
    spill: float = 0.0036
    """Bytes to and from memory for a FLOP of a large product, beyond operands read once."""
    corner: float = 1.2
    """p: how round the roofline's corner is on a share of the device."""
    whole_corner: float = 1.2
    """p on all of it, which kernels are chosen for."""
    step_corner: float = 1.2
    """p for the products of decode steps."""
    one_grid: float = 0.0
    """Elements of a result of which half is computed by kernels with a block for each SM of the
    device: a share of the SMs runs all of its blocks before the others (`_product`)."""
    attention_rows: float = 48.0
    """Rows that attention over a prompt computes beyond those there are: its tiles are whole."""
    in_flight: float = 1.9
    """What a prefill slice or hybrid pass keeps in flight, of what its mean traffic needs."""
    product_waits: float = 0.75
    """Of the time that a prefill slice waits for memory, the part that grows with the latency."""
    arithmetic_waits: float = 0.125
    """Of the time that its arithmetic takes."""
    kernel_seconds: float = 2.1e-6
    """Of one small kernel in a CUDA graph, beside its bytes."""
    pass_layer_seconds: float = 1.9e-5
    """Of a prefill slice's or hybrid pass's layer, for its graphs and attention begin apart."""
    large_tiles: bool = False
    """Whether a hybrid pass that is graphs has FlashInfer's attention for Hopper (`_tiles`)."""
    whole_layer_seconds: float = 0.0
    """Of the layer of such a pass."""
    split_seconds: float = 0.0
    """Of the further kernels of its attention if tiles are split."""
    sampling_seconds: float = 1.5e-4
    """Of a step's end."""
    link_bandwidth: float = 0.0
    """Bytes/s and direction between GPUs that all-reduce reaches."""
    link_seconds: float = 1.0e-5
    """Of an all-reduce, beside its bytes."""
    noise: float = 0.01
    """Standard deviation of a step's time, of the time (log-normal)."""


H200 = Gpu(
    name="h200",
    units=132,
    memory=150.1e9,
    unit_flops=8.11e12,
    bandwidth=4.11e12,
    unit_bandwidth=0.147e12,
    product_units=19.0,
    power_units=59.4,
    traffic_units=19.3,
    power_exponent=3.35,
    product_share=0.881,
    prompt_attention_share=0.596,
    decode_attention_share=0.943,
    spill=0.00321,
    corner=1.5,
    whole_corner=1.97,
    step_corner=2.27,
    one_grid=18.3e6,
    attention_rows=51.7,
    in_flight=1.72,
    product_waits=0.806,
    arithmetic_waits=0.182,
    kernel_seconds=2.06e-6,
    pass_layer_seconds=1.70e-5,
    large_tiles=True,
    whole_layer_seconds=5.66e-6,
    split_seconds=2.04e-5,
    sampling_seconds=5.73e-5,
    link_bandwidth=360e9,
)
"""Fitted by `benchmarks/fit_device.py`; docs/design/simulation.md compares it with measurements."""
_HBM3 = 3.35 / 4.8  # of the H200's bytes a second, by the data sheets
H100 = msgspec.structs.replace(
    H200,
    name="h100",
    memory=85.0e9,
    bandwidth=H200.bandwidth * _HBM3,
    product_units=H200.product_units * _HBM3,
    traffic_units=H200.traffic_units * _HBM3,
)
"""The same chip with HBM3: data sheet, with the H200's shares of it."""
A100 = Gpu(
    name="a100-80gb",
    units=108,
    memory=85.0e9,
    unit_flops=2.889e12,
    bandwidth=1.83e12,
    unit_bandwidth=0.06e12,
    product_units=18.0,
    power_units=85.0,
    traffic_units=35.0,
    spill=0.006,
    product_share=0.80,
    prompt_attention_share=0.65,
    in_flight=0.55,
    arithmetic_waits=0.04,
    kernel_seconds=2.5e-6,
    link_bandwidth=230e9,
)
"""Data sheet; products at 77 to 80 % of the peak (Bullet §2.3); decode is slowed by prefill by up
to 20 % (MuxWise §3.3.2)."""
FORMULAS = 8
"""Raised when what is computed of a GPU's parameters changes."""


def revision(gpu: Gpu) -> str:
    """Of the parameters and the formulas: what was measured with others is of another device."""
    return hashlib.sha256(msgspec.json.encode((FORMULAS, gpu))).hexdigest()[:10]


GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (A100, H100, H200)}
