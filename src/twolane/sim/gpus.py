"""The data sheets of the simulated GPUs."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from twolane.common.checked_json import read_tables


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


GPUS: Mapping[str, Gpu] = read_tables(Path(__file__).with_name("gpus.toml"), Gpu)
"""The simulated GPUs by name."""
FORMULAS = 17
"""Version of the formulas that times are computed with; it is raised when they change."""


def revision(gpu: Gpu) -> str:
    """Return a digest of parameters and formulas; it is part of the key of a simulated profile."""
    return hashlib.sha256(msgspec.json.encode((FORMULAS, gpu))).hexdigest()[:10]
