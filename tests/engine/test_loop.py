"""The loop's order."""

from typing import Any

import pytest

from tests.systems.simulation import simulate, submit
from twolane.engine.engine import Engine
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.query import LaunchShape
from twolane.systems.plan import Plan
from twolane.systems.registry import make_system


def test_tokens_are_sent_before_what_comes_next_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, kept = Engine.plan, []

    def watched(engine: Engine) -> Plan:
        kept.append(len(engine.state.outputs))
        return plan(engine)

    monkeypatch.setattr(Engine, "plan", watched)
    arrivals = [(0.0, submit("a", 20, 8)), (0.02, submit("b", 20, 8))]
    served = simulate(make_system("static-split", {}), arrivals)
    assert [len(times) for times in served.times.values()] == [8, 8]
    assert kept
    assert not any(kept)


def test_tokens_are_sent_before_the_estimator_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    reap, kept = Engine.reap, []
    engines = list[Engine]()

    def watched(engine: Engine) -> bool:
        engines[:] = [engine]
        return reap(engine)

    class Learner(OnlineEstimator):
        def observe(self, launch: LaunchShape, *took: Any) -> None:
            if launch.kind == "decode":
                kept.append(len(engines[0].state.outputs))
            super().observe(launch, *took)

    monkeypatch.setattr(Engine, "reap", watched)
    simulate(make_system("static-split", {}), [(0.0, submit("a", 20, 8))], estimator=Learner())
    assert kept == [0] * 7
