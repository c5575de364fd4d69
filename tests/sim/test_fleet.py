"""Several replicas and a router on one virtual clock."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tests.sim.test_run import config
from twolane.common.errors import FieldError
from twolane.router.choose import Chosen
from twolane.router.policies import POLICIES
from twolane.router.state import RoutedRequest
from twolane.router.table import ReplicaView
from twolane.sim.fleet import simulate_fleet
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.workload.traces import TraceRequest

SHARED = [
    TraceRequest(0.4 * i, 2000, 4, hash_ids=(i % 3, *range(100 + 3 * i, 103 + 3 * i)))
    for i in range(18)
]
"""Three instructions of 512 tokens, each with many questions, far enough apart."""


@pytest.mark.parametrize("router", POLICIES)
def test_every_request_is_served_once_by_some_replica(router) -> None:
    run = simulate_fleet(config(), 3, router, SHARED)
    assert [record.outcome for record in run.result.records] == ["ok"] * len(SHARED)
    assert sum(run.sent.values()) == len(SHARED)
    assert not run.refused


def test_one_replica_behind_a_router_serves_as_one_alone() -> None:
    alone = simulate(config(), SHARED).result
    routed = simulate_fleet(config(), 1, "round-robin", SHARED).result
    assert routed.records == alone.records


def test_the_same_arguments_give_the_same_answer() -> None:
    def records():
        return simulate_fleet(config(), 2, "predicted", SHARED).result.records

    assert records() == records()


def test_the_router_finds_prefixes_that_round_robin_misses() -> None:
    ours, turns = (
        simulate_fleet(config(), 2, name, SHARED) for name in ("predicted", "round-robin")
    )
    assert ours.hit_rate > turns.hit_rate


BURST = [TraceRequest(1.0 + 0.02 * i, 4000, 4, hash_ids=range(8 * i, 8 * i + 8)) for i in range(40)]
"""Prompts of 512-token blocks that take about 0.1 s each, and come five times as fast."""


@pytest.mark.parametrize("system", ["auto", "chunked"])
def test_a_router_is_told_which_prompts_a_system_may_give_up(system) -> None:
    seen: list[ReplicaView] = []

    def watch(request: RoutedRequest, views: Sequence[ReplicaView]) -> Chosen:
        seen.extend(views)
        return Chosen(views[0].name, 0.0, 0)

    warm = [TraceRequest(0.0, 4000, 4, hash_ids=range(900, 908)), *BURST]
    simulate_fleet(config(system, slo=Slo(ttft=1.0)), 1, "predicted", warm, policy=watch)
    longest, wait = max(view.longest for view in seen), max(view.wait or 0.0 for view in seen)
    if system == "auto":
        assert 0.0 < longest < wait < 1.0
    else:
        assert longest == 0.0
        assert wait > 1.0


def test_an_unknown_router_is_refused_by_name() -> None:
    with pytest.raises(FieldError, match="router 'nosuch' is unknown; there are: predicted"):
        simulate_fleet(config(), 2, "nosuch", SHARED)


@pytest.mark.parametrize("model", ["qwen3.5-35b-a3b", "llama-3.1-8b"])
def test_the_router_knows_how_much_of_a_prompt_can_be_reused(model) -> None:
    """Four conversations in turns. Pages of a model with states are no use but before a snapshot;
    of others, the router knows a part of the pages."""
    told: list[int] = []

    def watch(request: RoutedRequest, views: Sequence[ReplicaView]) -> Chosen:
        told.append(views[0].reused)
        return Chosen(views[0].name, 0.0, 0)

    asked = config()
    asked = replace(asked, engine=replace(asked.engine, model=model))
    turns = [
        TraceRequest(1.0 * i, 900 + 300 * (i // 4), 4, hash_ids=(i % 4 + 1,), block_tokens=4096)
        for i in range(20)
    ]
    records = simulate_fleet(asked, 1, "predicted", turns, policy=watch).result.records
    found = [record.usage_cached or 0 for record in records]
    assert max(found) > 1000
    if model == "qwen3.5-35b-a3b":
        assert told == found
    else:
        assert all(known <= there < known + 512 for known, there in zip(told, found, strict=True))
