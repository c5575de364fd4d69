"""Passes in two nano-batches: seconds computed by hand, and what must hold on any device."""

import math

import msgspec
import pytest

from twolane.common.errors import FieldError
from twolane.engine.build import build
from twolane.engine.config import EngineConfig
from twolane.engine.settings import check_served, check_settings
from twolane.lanes.work import DecodeRow, DecodeWork, HybridWork, PrefillWork, PromptRow, Work
from twolane.model.shapes import SHAPES
from twolane.results.result import BenchConfig
from twolane.sim.config import SimulateConfig, Unevenness
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import GPUS, Gpu
from twolane.sim.machine import SimulatedMachine
from twolane.sim.nano_batches import NanoBatchDevice
from twolane.sim.operators import Cost
from twolane.workload.spec import WorkloadSpec

A100 = GPUS["a100-80gb"]
H200 = GPUS["h200"]

LLAMA, LARGE = "llama-3.1-8b", "llama-3.1-70b"
TWO = {"token_budget": "1024", "nano_batches": "2"}
PLAIN = Gpu(
    name="plain",
    units=128,
    memory=1e12,
    unit_flops=1e12,
    product_share=1.0,
    bandwidth=1e12,
    unit_bandwidth=1e12 / 8,
    product_units=1e-9,
    decode_attention_share=1.0,
    step_corner=64.0,
    power_units=1e9,
    traffic_units=0.0,
    spill=0.0,
    in_flight=0.0,
    kernel_seconds=0.0,
    sampling_seconds=0.0,
    link_bandwidth=4e10,
    bulk_seconds=0.0,
    bulk_bytes=0.0,
    link_units=8,
    behind_seconds=0.0,
    noise=0.0,
)
"""A GPU with a sharp roofline: arithmetic is 1 TFLOP/s an SM, and 8 SMs read as fast as all, or sum
over GPUs."""
LAYERS, HEAD = 32, 4096 * 128_256
WEIGHTS = 4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14_336
"""Parameters of a layer of Llama-3.1-8B."""
KV = 2 * 8 * 128 * 2
"""Bytes of a token's keys and values in a layer."""
SMALL = 2 * (8 * 4096 + 4 * 1024 + 2 * 4096 + 3 * 14_336)
"""Bytes that small kernels move in a layer for a token."""


def decode(rows: int, context: int, k: int = 1) -> DecodeWork:
    return DecodeWork(tuple(DecodeRow(i, context, k) for i in range(rows)), k)


def hybrid(rows: int, context: int, *prompts: tuple[int, int]) -> HybridWork:
    chunks = tuple(PromptRow(5000 + i, start, n, True) for i, (start, n) in enumerate(prompts))
    return HybridWork(decode(rows, context).rows, chunks)


def seconds(work: Work, *, nano: bool, model: str = LLAMA, gpu: Gpu = PLAIN, tp: int = 1) -> float:
    gpu = msgspec.structs.replace(gpu, noise=0.0)
    device = (NanoBatchDevice if nano else DeviceModel)(gpu, SHAPES[model], tp)
    return sum(device.seconds([step])[0] for step in device.steps(work, gpu.units))


def test_reads_hide_behind_products_of_a_large_batch() -> None:
    """By hand: 2,048 rows at 511 tokens, whose products take longer than the reads of their keys.

    The gain is at most the share of what is not products. Meanwhile these lack the sixteenth of the
    SMs that the reads have, and both wait longer for memory. A layer in all has nothing beside it.
    """
    c = 2 * 2048 * WEIGHTS / 128e12
    small, read = 2048 * SMALL / 1e12, 2048 * 512 * KV / 1e12
    head = 2 * 2048 * HEAD / 128e12
    whole = LAYERS * (c + small + read) + head
    assert seconds(decode(2048, 511), nano=False) == pytest.approx(whole, rel=1e-3)
    products = (c * 128 / 120 + small) / 2  # of one half on 120 SMs
    flying = 15 * small / 2 / products  # 120 SMs keep 15 times what saturates the memory in flight
    latency = math.hypot(1, 1 + flying)
    reads = read / 2 * latency / math.hypot(1, 1)
    products += small / 2 * (latency / math.hypot(1, flying) - 1)
    assert reads < products
    beside = reads + (1 - reads / products) * (c + small) / 2
    halves = 2 * (31 * beside + (c + small + read) / 2) + head
    assert seconds(decode(2048, 511), nano=True) == pytest.approx(halves, rel=1e-3)
    assert 1.0 < whole / halves < whole / (whole - LAYERS * read)


def test_a_small_batch_reads_the_weights_twice() -> None:
    """By hand: 16 rows are bound by the memory, which no overlap widens."""
    weights, read = 2 * WEIGHTS / 1e12, 16 * 1000 * KV / 1e12
    more = seconds(decode(16, 999), nano=True) - seconds(decode(16, 999), nano=False)
    assert more == pytest.approx(LAYERS * weights, rel=0.02)
    moved = LAYERS * (2 * weights + read)
    assert seconds(decode(16, 999), nano=True) > moved


def test_sums_over_gpus_hide_behind_products() -> None:
    """By hand: prompts of 4,096 tokens on two GPUs, in halves; each layer sums twice."""
    sums = 2 * 4096 * 4096 * 2 / 4e10
    gpu = msgspec.structs.replace(PLAIN, pass_layer_seconds=0.0, pass_behind_seconds=0.0)
    instant = msgspec.structs.replace(gpu, link_bandwidth=1e30)
    work = hybrid(0, 0, *[(0, 512)] * 8)
    unsummed = seconds(work, nano=False, gpu=instant, tp=2)
    assert seconds(work, nano=False, gpu=gpu, tp=2) == pytest.approx(unsummed + LAYERS * sums)
    assert 2 * sums * LAYERS < unsummed
    took = seconds(work, nano=True, gpu=gpu, tp=2)
    apart = seconds(work, nano=True, gpu=instant, tp=2)
    # One layer's sums have no partner, and products have 120 of 128 SMs beside the others.
    assert sums < took - apart < sums + LAYERS * sums / 16


def test_overlap_gains_what_the_paper_reports() -> None:
    """70B on eight A100s (§6.4): 1.07 times with prefill alone, 1.17 with decode, and splitting
    alone costs 13 %, of which the device model has a part."""
    prompts, mixed = hybrid(0, 0, *[(0, 512)] * 4), hybrid(1024, 768, (0, 512), (0, 512))

    def gain(work: Work, nano: bool = True) -> float:
        whole = seconds(work, nano=False, model=LARGE, gpu=A100, tp=8)
        return whole / seconds(work, nano=nano, model=LARGE, gpu=A100, tp=8)

    assert (gain(prompts), gain(mixed)) == pytest.approx((1.08, 1.13), abs=0.01)


def test_halves_are_whole_tiles_and_attention_is_not_divided() -> None:
    """300 tokens are 192 and 108. A chunk's few tiles keep an A100 as busy as those of half of it
    would. One row stays whole."""
    device = NanoBatchDevice(PLAIN, SHAPES[LLAMA], pass_sizes=())
    asked: set[int] = set()
    multiply = device._multiply

    def noted(tokens: int, units: int) -> Cost:
        asked.add(tokens)
        return multiply(tokens, units)

    device._multiply = noted  # type: ignore[method-assign]
    for tokens, halves in ((300, {192, 108}), (256, {128}), (101, {51, 50})):
        asked.clear()
        device.steps(hybrid(0, 0, (9000, tokens)), 128)
        assert asked == {tokens, *halves}
    work = hybrid(16, 20_000, (100_000, 240))
    whole, halved = (seconds(work, nano=n, gpu=A100, tp=8) for n in (False, True))
    assert halved == pytest.approx(whole, rel=0.05)
    for one in (decode(1, 500), hybrid(0, 0, (0, 1))):
        whole = seconds(one, nano=False, gpu=H200)
        assert seconds(one, nano=True, gpu=H200) == pytest.approx(whole, rel=1e-9)


def test_steps_of_a_launch_are_divided_one_by_one() -> None:
    rows = tuple(DecodeRow(i, 1000, 3 if i else 1) for i in range(5))
    device = NanoBatchDevice(msgspec.structs.replace(H200, noise=0.0), SHAPES[LLAMA])
    first, second, third = device.steps(DecodeWork(rows, 3), 132)
    left = DecodeWork(tuple(DecodeRow(i, 1001, 1) for i in range(1, 5)), 1)
    assert device.steps(left, 132) == [second]
    assert first.fixed > second.fixed < third.fixed
    work = PrefillWork(0, (PromptRow(0, 0, 512, True),), 0, 32, finishes=True)
    plain = DeviceModel(msgspec.structs.replace(H200, noise=0.0), SHAPES[LLAMA])
    assert device.steps(work, 132) == plain.steps(work, 132)


@pytest.mark.parametrize("name", GPUS)
def test_the_memory_carries_no_more_than_it_can(name: str) -> None:
    for rows, context in ((2, 16_000), (64, 1000), (512, 100), (1024, 4000)):
        took = seconds(decode(rows, context), nano=True, gpu=GPUS[name])
        moved = 2 * LAYERS * min(2 * WEIGHTS, rows * 1e12) + LAYERS * rows * context * KV
        assert took > moved / GPUS[name].bandwidth


def asked(**changes: object) -> SimulateConfig:
    engine = EngineConfig(model=LLAMA, system="chunked", options=TWO)
    return SimulateConfig(engine=engine, bench=BenchConfig(workload=WorkloadSpec()), **changes)  # type: ignore[arg-type]


def test_nano_batches_are_simulated_and_refused_elsewhere() -> None:
    config = asked().engine
    asked().check()
    machine = SimulatedMachine(H200, SHAPES[LLAMA], config)
    assert type(machine.device) is NanoBatchDevice
    one = msgspec.structs.replace(config, options={"nano_batches": "1"})
    assert type(SimulatedMachine(H200, SHAPES[LLAMA], one).device) is DeviceModel
    check_settings(config)
    check_served(one)
    with pytest.raises(FieldError, match="nano_batches of system chunked is only for simulation"):
        check_served(config)
    with pytest.raises(FieldError, match="nano_batches of system chunked"):
        build(config, lambda: None, lambda stage, share: None)
    with pytest.raises(FieldError, match="nano_batches is not simulated on an emulated card"):
        asked(uneven=Unevenness()).check()
    three = msgspec.structs.replace(config, options={"nano_batches": "3"})
    with pytest.raises(FieldError, match="nano_batches"):
        check_settings(three)
