"""The simulated H200's power, beside what real ones drew while they were profiled."""

import statistics

import pytest
from msgspec.structs import replace

from tests.sim.durations import FixedDurations
from twolane.engine.predict import read_profile
from twolane.estimate.profile import SHIPPED, Sample
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptRow,
    Work,
)
from twolane.model.shapes import SHAPES
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import GPUS
from twolane.sim.lanes import SimLanes

H100 = GPUS["h100"]
H200 = GPUS["h200"]


def device(model: str = "qwen3-8b") -> DeviceModel:
    return DeviceModel(replace(H200, noise=0.0), SHAPES[model])


def power(model: DeviceModel, work: Work, units: int) -> float:
    demands = [model.steps(work, units)[0]]
    return model.watts(demands, model.seconds(demands))


def work_of(sample: Sample) -> Work:
    rows = [(n, r) for n, r, count in sample.runs for _ in range(count)]
    steps = tuple(DecodeRow(0, r, 1) for n, r in rows if n == 1)
    prompts = tuple(PromptRow(0, r, n, samples=True) for n, r in rows if n > 1)
    if sample.kind == "decode":
        return DecodeWork(steps, 1)
    if sample.kind == "hybrid":
        return HybridWork(steps, prompts)
    return PrefillWork(0, prompts, 0, sample.layers, sample.finishes)


@pytest.mark.parametrize("model", ["qwen3-8b", "codellama-34b"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "hybrid"])
def test_the_law_of_power_is_close_to_that_of_cards(model, kind):
    profile = read_profile(SHIPPED / f"{model}-h200.json")
    alone = [one for one in profile.samples if one.kind == kind and one.beside is None]
    simulated = device(model)
    ratios = [
        power(simulated, work_of(one), one.units) / min(one.watts, H200.cap_watts)
        for one in alone[::4]
        if one.watts and min(one.seconds) > 5e-4
    ]
    assert len(ratios) > 12
    assert statistics.fmean(ratios) == pytest.approx(1.0, abs=0.12)
    assert statistics.fmean(abs(ratio - 1.0) for ratio in ratios) < 0.13


def test_prefill_at_the_cap_costs_twelve_millijoules_a_token():
    simulated = device()
    work = PrefillWork(0, (PromptRow(0, 0, 4096, samples=True),), 0, 36, True)
    demands = simulated.steps(work, 132)
    [seconds] = simulated.seconds(demands)
    assert simulated.watts(demands, [seconds]) == 700.0
    each = (700.0 - H200.idle_watts) * seconds / 4096
    assert each == pytest.approx(12.1e-3, rel=0.1)


def test_two_lanes_draw_more_than_one_and_not_more_than_the_cap():
    simulated = device()
    prefill = simulated.steps(PrefillWork(0, (PromptRow(0, 0, 2048),), 0, 4, False), 52)[0]
    decode = simulated.steps(DecodeWork((DecodeRow(0, 4000, 1),) * 16, 1), 32)[0]
    alone = [simulated.watts([one], simulated.seconds([one])) for one in (prefill, decode)]
    both = simulated.watts([prefill, decode], simulated.seconds([prefill, decode]))
    assert max(alone) < both <= 700.0
    assert simulated.watts([], []) == H200.idle_watts


def test_lanes_add_up_the_energy():
    """A second of nothing, 20 ms of a step at 300 W more, then nothing again."""
    lanes = SimLanes(
        108, [(84, 24)], FixedDurations(), lambda running, seconds: 100.0 + 300.0 * len(running)
    )
    lanes.advance(1.0)
    assert lanes.joules == pytest.approx(100.0)
    lanes.launch("decode", 24, DecodeWork((DecodeRow(0, 5, 1),), 1), ())
    lanes.advance(2.0)
    assert lanes.joules == pytest.approx(200.0 + 300.0 * 0.020)


def test_cards_whose_power_was_not_measured_have_no_energy():
    assert not H100.cap_watts
