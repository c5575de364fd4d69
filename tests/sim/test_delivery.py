"""The simulated way of a token from the engine to the client."""

import pytest

from twolane.engine import pacing
from twolane.engine.config import EngineConfig
from twolane.engine.messages import DeliveryLateness, Output, Outputs, Stats
from twolane.results.result import BenchConfig
from twolane.sim.config import SimulateConfig
from twolane.sim.delivery import DeliveryModel, HostCosts
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec


def test_work_waits_for_what_was_due_before() -> None:
    heard: list[tuple[float, str]] = []

    def hear(at: float, news: Outputs) -> None:
        heard.extend((at, output.id) for output in news.outputs)

    model = DeliveryModel(2.0, hear, lambda report: None)
    model.arrive(0.9999)
    two = [Output("a", [1], due=1.0), Output("b", [1], due=None)]
    model.send(0.5, Outputs(two, [], Stats()))
    assert [name for _, name in heard] == ["b"]
    model.flush()
    begun = 0.9999 + 2 * HostCosts.intake + 2 * HostCosts.first + 2 * HostCosts.client_first
    assert heard[0][0] == pytest.approx(0.5 + 2 * (HostCosts.first + HostCosts.client_first))
    assert heard[1] == (pytest.approx(begun), "a")


def test_uneven_delivery_is_reported_to_the_engine() -> None:
    """Ten tokens are due at once, each 0.2 s: the last waits for the nine before it."""
    reports: list[DeliveryLateness] = []
    model = DeliveryModel(1.0, lambda at, news: None, reports.append)
    for turn in range(12):
        at = 0.2 * turn
        outputs = [Output(str(i), [1], due=at) for i in range(25)]
        model.send(at, Outputs(outputs, [], Stats()))
    assert len(reports) == 2
    assert reports[1].spread == pytest.approx(12 * HostCosts.token, rel=0.1)


def gaps_p99(host_factor: float) -> float:
    """P99 of the gaps of 60 conversations under a bound of 21 ms, in seconds."""
    workload = WorkloadSpec(dataset="azure-conv", num_prompts=60, request_rate=24.0)
    asked = SimulateConfig(
        engine=EngineConfig(model="qwen3-8b", system="auto", slo=Slo(ttft=1.0, tbt=0.021)),
        bench=BenchConfig(workload=workload, goodput={"ttft": 1.0, "tbt": 0.021}),
        host_factor=host_factor,
    )
    return float(simulate(asked).result.metrics.tbt.percentiles[99.0])


def test_a_slow_host_is_paced_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCosts, "client_token", 20e-6)  # it is the server that is slow
    learnt = gaps_p99(9.0)
    monkeypatch.setattr(pacing, "SHORT_BOUND", 1.0)  # all bounds are paced alike on all hosts
    assert learnt < 0.97 * gaps_p99(9.0)
