"""The data sheets of the simulated GPUs."""

import hashlib

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, by its data sheet and measurements."""

    name: str
    units: int
    """Number of SMs."""
    memory: float
    """Bytes of memory that a process can have."""
    unit_flops: float
    """Dense bfloat16 FLOP/s of one SM at the top clock."""
    bandwidth: float
    """Highest rate in bytes/s that reading reaches."""
    unit_bandwidth: float
    """Bytes/s that one SM reads in attention before the memory saturates."""
    product_units: float
    """Number of SMs over which products of few rows saturate the memory: their bandwidth is
    B (1 - exp(-SMs / this))."""
    power_units: float
    """Number of SMs that the power cap lets compute matrix products at the top clock."""
    traffic_units: float
    """Power that traffic at full bandwidth draws, in SMs that compute matrix products."""
    power_exponent: float = 4.1
    """Exponent of the clock in the power that arithmetic draws."""
    lowest_clock: float = 0.5
    """Fraction of the top clock below which the power cap does not push the clock."""
    product_share: float = 0.878
    """Fraction of `unit_flops` that large matrix products reach."""
    prompt_attention_share: float = 0.70
    """Fraction of `unit_flops` that attention over prompts reaches."""
    copy_units: float = 28.0
    """Number of SMs over which a copy saturates the memory, as `product_units`: a fifth of an
    H100's SMs reaches 60 % (DuetServe Fig. 3a)."""
    decode_attention_share: float = 0.87
    """Fraction of `bandwidth` that attention of decode steps reaches."""
    spill: float = 0.0036
    """Bytes that a large product moves for each FLOP, beyond operands that are read once."""
    corner: float = 1.2
    """Exponent p that says how round the roofline's corner is on a share of the device."""
    whole_corner: float = 1.2
    """The exponent p on the whole device, for which kernels are chosen."""
    step_corner: float = 1.2
    """The exponent p for the products of decode steps."""
    one_grid: float = 0.0
    """Elements of a result at which half of the work is done by kernels with a block for each SM of
    the device: a share of the SMs runs its blocks one after the other (`_product`)."""
    attention_rows: float = 48.0
    """Rows that attention computes beyond those of a prompt, since its tiles are whole."""
    in_flight: float = 1.9
    """Bytes that a prefill slice or hybrid pass keeps in flight, as a multiple of what its mean
    traffic needs."""
    product_waits: float = 0.75
    """Fraction of a prefill slice's waits for memory that grows with the memory's latency."""
    arithmetic_waits: float = 0.125
    """Fraction of a prefill slice's arithmetic time that grows with the memory's latency."""
    kernel_seconds: float = 2.1e-6
    """Seconds of one small kernel in a CUDA graph, beside those of its bytes."""
    pass_layer_seconds: float = 1.9e-5
    """Seconds added to each layer of a prefill slice or hybrid pass, whose graphs and attention are
    launched apart."""
    large_tiles: bool = False
    """Whether a hybrid pass made of graphs has FlashInfer's attention for Hopper (`_tiles`)."""
    whole_layer_seconds: float = 0.0
    """Seconds added to each layer of such a pass."""
    split_seconds: float = 0.0
    """Seconds of the further kernels of its attention where tiles are split."""
    sampling_seconds: float = 1.5e-4
    """Seconds of sampling at the end of a step."""
    attention_tile: int = 0
    """Number of rows in a tile of prompt attention whose kernel gives each SM whole tiles in turn
    and never splits one; 0 means that idle SMs in the last turn are not counted."""
    link_bandwidth: float = 0.0
    """Bytes/s in each direction that an all-reduce reaches between GPUs."""
    link_units: int = 32
    """Number of SMs that an all-reduce needs for this rate; on fewer it takes longer in proportion
    (the knee N_w of Bullet §3.2.2)."""
    link_seconds: float = 2.8e-6
    """Seconds of an all-reduce of few bytes, beside those of its hops and bytes."""
    hop_seconds: float = 1.2e-6
    """Seconds of each of the 2 (tp - 1) hops of such an all-reduce's ring."""
    bulk_seconds: float = 1.8e-5
    """Seconds of an all-reduce of many bytes, beside those of its bytes."""
    bulk_bytes: float = 1.5e6
    """Number of bytes beyond which an all-reduce is one of many bytes, even if one of few would be
    faster."""
    behind_seconds: float = 2.0e-6
    """Seconds by which kernels of a decode step wait longer after an all-reduce than after each
    other."""
    pass_behind_seconds: float = 7.6e-6
    """The same in a prefill slice or hybrid pass."""
    half_tile_share: float = 0.0
    """Rate of products of some hundred rows that 128 does not divide, where several ranks share the
    layers, as a fraction of that of other products of passes: their kernels have tiles of 64 rows.
    0 means that tiles are not told apart."""
    noise: float = 0.01
    """Standard deviation of the logarithm of a step's time."""
    cap_watts: float = 0.0
    """Power cap of the board in watts; 0: its power was not measured."""
    idle_watts: float = 0.0
    """Power in watts that does not depend on what runs."""
    joules_per_byte: float = 0.0
    """Energy of moving a byte to or from memory."""
    joules_per_flop: float = 0.0
    """Energy of a FLOP of a matrix product."""
    fitted: bool = False
    """Whether the parameters are fitted to measurements of such a card; else they follow its data
    sheet."""


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
    link_bandwidth=310e9,
    half_tile_share=0.74,
    cap_watts=700.0,
    idle_watts=173.0,
    joules_per_byte=0.117e-9,
    joules_per_flop=0.6e-12,
    fitted=True,
)
"""Fitted by `benchmarks/fit_device.py`, and what concerns passes of several ranks by
`benchmarks/fit_ranks.py`; docs/design/simulation.md compares it with measurements."""
H100 = msgspec.structs.replace(
    H200,
    name="h100",
    memory=85.0e9,
    bandwidth=2.97e12,
    unit_bandwidth=0.139e12,
    product_units=13.2,
    power_units=54.4,
    traffic_units=13.4,
    power_exponent=3.37,
    prompt_attention_share=0.603,
    decode_attention_share=0.971,
    spill=0.0023,
    corner=1.54,
    whole_corner=2.16,
    step_corner=2.32,
    one_grid=17.5e6,
    attention_rows=48.7,
    in_flight=2.12,
    product_waits=0.921,
    arithmetic_waits=0.249,
    kernel_seconds=1.91e-6,
    pass_layer_seconds=1.65e-5,
    whole_layer_seconds=5.57e-6,
    split_seconds=2.07e-5,
    sampling_seconds=5.75e-5,
    cap_watts=0.0,
)
"""The same chip with HBM3, fitted by `benchmarks/fit_device.py`; what concerns several ranks or FP8
is the H200's."""
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
    attention_tile=128,
    link_bandwidth=230e9,
)
"""Figures of the data sheet; products reach 77 to 80 % of the peak (Bullet §2.3), and prefill slows
decode by up to 20 % (MuxWise §3.3.2). Attention runs by FlashAttention-2's tiles, which are never
split: chunks of few rows leave most SMs idle."""
A100_SPLIT = msgspec.structs.replace(A100, name="a100-80gb-split", attention_tile=0)
"""The same GPU with attention kernels that split the keys of a tile over idle SMs, as FlashInfer's
do. No A100 was measured: what differs between these two is not known of the real one."""
H20 = msgspec.structs.replace(
    H200,
    name="h20",
    units=78,
    memory=102.6e9,
    unit_flops=148e12 / 78,
    bandwidth=H200.bandwidth * 4.0 / 4.8,
    power_units=200.0,
    one_grid=H200.one_grid * 78 / 132,
    cap_watts=0.0,
    fitted=False,
)
"""The data sheet's 78 SMs, 148 TFLOP/s in bfloat16 and 4.0 TB/s, of which it reaches the H200's
fractions. So little arithmetic does not reach the power cap."""
FORMULAS = 13
"""Version of the formulas that times are computed with; it is raised when they change."""


def revision(gpu: Gpu) -> str:
    """Return a digest of parameters and formulas; it is part of the key of a simulated profile."""
    return hashlib.sha256(msgspec.json.encode((FORMULAS, gpu))).hexdigest()[:10]


GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (A100, A100_SPLIT, H20, H100, H200)}
