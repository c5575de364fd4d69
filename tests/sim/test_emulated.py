"""A card that takes as long as its own profile says."""

import json
import statistics

import msgspec
import pytest

from twolane.common.errors import FieldError
from twolane.engine.config import EngineConfig
from twolane.engine.predict import fitted
from twolane.estimate.profile import SHIPPED
from twolane.estimate.query import Load, decode_step
from twolane.lanes.work import DecodeRow, DecodeWork
from twolane.model.shapes import SHAPES
from twolane.results.result import BenchConfig
from twolane.sim.config import SimulateConfig, Unevenness
from twolane.sim.emulated import SLOW_EVERY_SECONDS, SLOW_SECONDS, EmulatedDevice
from twolane.sim.gpus import GPUS
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec

H200 = GPUS["h200"]

MODEL = "codellama-34b"
PROFILE = SHIPPED / f"{MODEL}-h200.json"
EVEN = Unevenness(noise=0.0, outliers=0.0, configurations=0.0, slower=1.0, moments=0.0)
STEPS = DecodeWork(tuple(DecodeRow(i, 1000, 1) for i in range(16)), 1)


def device(**uneven):
    from msgspec.structs import replace

    truth = fitted(PROFILE, "calibrated")
    return EmulatedDevice(H200, SHAPES[MODEL], truth, replace(EVEN, **uneven))


def seconds(of):
    """Of a decode step on 48 SMs."""
    return of.seconds(of.steps(STEPS, 48))[0]


def asked(profile=PROFILE, **more):
    engine = EngineConfig(
        model=MODEL, system="auto", profile=profile and str(profile), slo=Slo(ttft=2.0, tbt=0.08)
    )
    workload = WorkloadSpec(
        dataset="azure-conv", num_prompts=8, request_rate=4.0, max_input_len=2000, seed=3
    )
    bench = BenchConfig(workload=workload, goodput={"tbt": 0.08})
    return SimulateConfig(engine=engine, bench=bench, uneven=Unevenness(), **more)


def test_an_even_card_takes_as_long_as_predicted():
    predicted = fitted(PROFILE, "calibrated").predict(decode_step(Load.decode([1000] * 16)), 48)
    assert seconds(device()) == pytest.approx(predicted)


def test_noise_configurations_and_moments_are_as_large_as_asked():
    plain = seconds(device())
    noisy = device(noise=0.05)
    times = [seconds(noisy) / plain for _ in range(400)]
    assert statistics.stdev(times) == pytest.approx(0.05, rel=0.2)
    own = device(configurations=0.1)
    assert seconds(own) == seconds(own) != plain
    slow = device(moments=0.25, slower=1.1)
    slow.clock = lambda: SLOW_EVERY_SECONDS + SLOW_SECONDS / 2
    assert seconds(slow) == pytest.approx(1.1 * 1.25 * plain)
    slow.clock = lambda: SLOW_EVERY_SECONDS + 2 * SLOW_SECONDS
    assert seconds(slow) == pytest.approx(1.1 * plain)


def test_the_engine_serves_on_it_the_same_every_time():
    first, second = (simulate(asked()).result for _ in range(2))
    assert first.metrics.completed == 8
    assert first.records == second.records
    assert first.simulated["device"] == "cuda (NVIDIA H200)"


def test_it_needs_a_profile_of_one_such_card():
    with pytest.raises(FieldError, match="profile is needed"):
        simulate(asked(profile=None))
    with pytest.raises(FieldError, match="tp"):
        simulate(asked(tp=2))
    with pytest.raises(FieldError, match="is not of one a100-80gb"):
        simulate(asked(gpu="a100-80gb"))


def test_a_profile_of_rounded_weights_emulates_its_card(tmp_path):
    """Its matrices are a little wider than a simulation's: some rows are longer, routers float."""
    content = json.loads(PROFILE.read_bytes())
    content["key"]["weight_itemsize"] = 1.0008
    there = tmp_path / "fp8.json"
    there.write_text(json.dumps(content))
    floats = asked(there)
    rounded = msgspec.structs.replace(floats.engine, quantization="fp8")
    served = simulate(msgspec.structs.replace(floats, engine=rounded)).result
    assert served.metrics.completed == 8
    with pytest.raises(FieldError, match=r"weights of 1\.0008 bytes"):
        simulate(floats)
