"""What the simulator's estimators are fitted on: a profile taken in the simulator itself."""

import numpy as np
import pytest

from twolane.engine.config import EngineConfig
from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.errors import held_out, predicted
from twolane.estimate.profile import Profile
from twolane.model.shapes import SHAPES
from twolane.profile import run
from twolane.results.result import BenchConfig
from twolane.sim import profile as profiles
from twolane.sim.config import SimulateConfig
from twolane.sim.gpus import GPUS
from twolane.sim.profile import simulated_profile
from twolane.sim.run import simulate
from twolane.workload.spec import WorkloadSpec

SPEC = SHAPES["qwen3-8b"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path))
    return tmp_path


def test_it_is_measured_once_for_each_device_and_degree(cache):
    first = simulated_profile(GPUS["h200"], SPEC, 1, rounds=1)
    content = first.read_bytes()
    assert simulated_profile(GPUS["h200"], SPEC, 1).read_bytes() == content  # from the cache
    others = [
        simulated_profile(GPUS["h100"], SPEC, 1, rounds=1),
        simulated_profile(GPUS["h200"], SPEC, 2, rounds=1),
    ]
    assert len({first, *others}) == 3
    assert Profile.read(others[1]).key.tensor_parallel == 2
    assert [probe.units for probe in Profile.read(first).probes][-1] == GPUS["h200"].units
    assert {Profile.read(path).key.itemsize for path in (first, *others)} == {2}


def test_another_device_model_has_a_profile_of_its_own(cache, monkeypatch):
    """One that an older version has left is none of this one's."""
    asked = GPUS["h200"], SPEC, 1
    first = simulated_profile(*asked, rounds=1)
    monkeypatch.setattr(profiles, "device_digest", lambda: "another")
    assert simulated_profile(*asked, rounds=1) != first


def test_one_that_is_not_whole_is_never_there(cache, monkeypatch):
    """Neither for others while it is measured nor afterwards if that is cut off."""
    there: list[list] = []

    def cut(*asked):
        there.append(list(cache.glob("profiles/*.json")))
        if len(there) > 20:
            raise KeyboardInterrupt
        return measure(*asked)

    measure = run.measure
    monkeypatch.setattr(run, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(run, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        simulated_profile(GPUS["h200"], SPEC, 1, rounds=1)
    assert not any(there)
    assert not list(cache.glob("profiles/*"))
    monkeypatch.setattr(run, "measure", measure)
    profile = Profile.read(simulated_profile(GPUS["h200"], SPEC, 1, rounds=1))
    assert len(profile.done()) == profile.planned > 20


def test_predictions_err_a_little(cache):
    """Fitted on some points of the device and asked about others: not the device model itself.

    A case has 4 to 18 samples, each of a batch of its own.
    """
    profile = Profile.read(simulated_profile(GPUS["h200"], SPEC, 1, rounds=8))
    estimator = Calibrated(profile)
    cases = held_out(profile)
    assert cases.keys() > {"solo prefill", "solo decode", "co-run decode", "co-run prefill"}
    for case, samples in cases.items():
        errors = [abs(predicted(estimator, each) / each.median - 1) for each in samples]
        assert 0.001 < np.mean(errors) < 0.1, case


def test_a_simulation_predicts_with_the_estimator_that_is_asked_for(cache):
    figures = {}
    for name in (None, "solo-run", "sm-roofline"):
        asked = SimulateConfig(
            engine=EngineConfig(model="qwen3-8b", system="static-split", estimator=name),
            gpu="h200",
            bench=BenchConfig(
                workload=WorkloadSpec(dataset="azure-conv", num_prompts=12, request_rate=8)
            ),
        )
        result = simulate(asked).result
        figures[result.simulated["estimator"]] = [record.ttft for record in result.records]
    assert set(figures) == {"calibrated", "solo-run", "sm-roofline"}
    assert figures["solo-run"] != figures["sm-roofline"]
