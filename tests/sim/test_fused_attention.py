"""Hybrid passes whose attention is one kernel: what overlap gains, and where it is refused."""

import math

import pytest

from tests.sim.test_nano_batches import PLAIN
from twolane.common.errors import FieldError
from twolane.engine.config import EngineConfig
from twolane.engine.settings import check_served
from twolane.lanes.work import DecodeRow, HybridWork, PromptRow
from twolane.model.shapes import SHAPES
from twolane.sim.device import DeviceModel
from twolane.sim.fused_attention import FusedAttentionDevice, overlapped
from twolane.sim.gpus import GPUS
from twolane.sim.machine import SimulatedMachine
from twolane.sim.operators import Cost
from twolane.systems.registry import make_system

LLAMA = SHAPES["llama-3.1-8b"]
FUSED = {"token_budget": "512", "fused_attention": "true"}


def seconds(device: DeviceModel, work: HybridWork, units: int) -> float:
    return sum(device.seconds([step])[0] for step in device.steps(work, units))


def hybrid(rows: int, context: int, chunk: int, reused: int) -> HybridWork:
    decode = tuple(DecodeRow(slot, context, 1) for slot in range(rows))
    prompts = (PromptRow(rows, reused, chunk, samples=True),) if chunk else ()
    return HybridWork(decode, prompts)


def test_two_operators_that_overlap_take_the_round_maximum() -> None:
    arithmetic = Cost(fixed=1.0, clocked=4.0, arithmetic=8.0)
    memory = Cost(streamed=3.0, memory=3.0, bytes=6.0)
    both = overlapped(arithmetic, memory, 2.0)
    assert both.alone == pytest.approx(1.0 + math.hypot(3.0, 4.0))
    assert (both.arithmetic, both.bytes, both.fixed) == (8.0, 6.0, 1.0)
    assert both.clocked / both.streamed == pytest.approx(4 / 3)
    assert overlapped(Cost(), Cost(), 2.0) == Cost()


def test_a_pass_saves_what_its_attentions_overlap() -> None:
    """Attention of 512 tokens over 16K is bound by arithmetic, that of 64 rows by memory."""
    work = hybrid(64, 4096, 448, 16_384)
    apart = seconds(DeviceModel(PLAIN, LLAMA), work, 128)
    fused = seconds(FusedAttentionDevice(PLAIN, LLAMA), work, 128)
    pairs = (448 + PLAIN.attention_rows) * (16_384 + 224 + 64)
    flops = 4 * 4096 * pairs / (128 * PLAIN.unit_flops * PLAIN.prompt_attention_share)
    own = 4096 * (16_384 + 448) / PLAIN.bandwidth
    corner = PLAIN.corner
    chunks = (flops**corner + own**corner) ** (1 / corner)
    read = 4096 * 64 * 4097 / PLAIN.bandwidth
    saved = chunks + read - (chunks**corner + read**corner) ** (1 / corner)
    assert apart - fused == pytest.approx(32 * saved, rel=1e-6)


@pytest.mark.parametrize("work", [hybrid(64, 4096, 0, 0), hybrid(0, 0, 512, 8192)])
def test_one_phase_alone_saves_nothing(work: HybridWork) -> None:
    apart, fused = (kind(PLAIN, LLAMA) for kind in (DeviceModel, FusedAttentionDevice))
    assert seconds(fused, work, 128) == pytest.approx(seconds(apart, work, 128))


def test_fused_attention_is_simulated_and_refused_elsewhere() -> None:
    config = EngineConfig(model="llama-3.1-8b", system="chunked", options=FUSED)
    machine = SimulatedMachine(GPUS["a100-80gb"], LLAMA, config)
    assert type(machine.device) is FusedAttentionDevice
    with pytest.raises(FieldError, match="fused_attention of system chunked is only for simulat"):
        check_served(config)
    with pytest.raises(ValueError, match="fused_attention does not go with nano_batches"):
        make_system("chunked", {**FUSED, "nano_batches": "2"})
