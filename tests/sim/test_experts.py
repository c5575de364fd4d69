"""Mixtures of experts in simulation: the active experts decide what a step takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.profile import Profile
from twolane.estimate.query import Load, decode_step, hybrid_pass
from twolane.model.shapes import SHAPES
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import GPUS
from twolane.sim.profile import simulated_profile

SPEC = replace(SHAPES["qwen3-30b-a3b"], layers=8)
GPU = GPUS["h200"]
ROWS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 128)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return Profile.read(Path(simulated_profile(GPU, SPEC, 1, rounds=3)))


def test_active_experts() -> None:
    """Eight rows wake 52 of 128 experts, 64 rows all but two (arithmetic by hand)."""
    moe = SPEC.moe
    assert moe is not None
    assert [round(moe.active(rows)) for rows in (1, 8, 16, 32, 64)] == [8, 52, 82, 112, 126]
    assert SPEC.expert_share == 1 and SHAPES["qwen3-8b"].expert_share == 0


def seconds(rows: int, units: int) -> float:
    """What the simulated device takes for a decode step at its top clock."""
    device = DeviceModel(GPU, SPEC, 1, 0)
    costs = device._operators
    step = costs.layer(rows, units, decode=True).times(SPEC.layers)
    return step.plus(costs.read(rows * 2048, units)).plus(costs.head(rows, units)).alone


def test_a_prompt_in_a_step_of_few_rows_wakes_every_expert() -> None:
    device = DeviceModel(GPU, SPEC, 1, 0)
    assert seconds(64, 132) > 2 * seconds(8, 132)
    few = device._operators.layer(8, 132, decode=False).alone
    joined = device._operators.layer(8 + 256, 132, decode=False).alone
    assert joined > 1.8 * few
    assert device._operators.layer(8 + 512, 132, decode=False).alone < 1.2 * joined


@pytest.mark.parametrize("units", [32, 132])
def test_steps_of_all_sizes_are_predicted(profile: Profile, units: int) -> None:
    """The profile has none of these sizes; without the active experts it is up to 28 % off."""
    estimator = Calibrated(profile)
    worst = 0.0
    for rows in ROWS:
        launch = decode_step(Load.decode([2048] * rows))
        predicted = estimator.predict(launch, units)
        assert predicted is not None
        worst = max(worst, abs(predicted / seconds(rows, units) - 1))
    assert worst < 0.1
    mixed = Load((*[1] * 8, 256), (*[2048] * 8, 0))
    alone = estimator.predict(decode_step(Load.decode([2048] * 8)), 132)
    together = estimator.predict(hybrid_pass(mixed), 132)
    assert alone is not None and together is not None and together > 1.5 * alone
