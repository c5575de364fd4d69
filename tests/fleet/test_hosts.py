"""A fleet whose machines do not have what its servers take, with what of Ray says so."""

import asyncio
import logging
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.server.serving import PATIENCE
from twolane.common.errors import FieldError
from twolane.fleet import hosts
from twolane.fleet.hosts import RayHosts
from twolane.fleet.options import FleetOptions
from twolane.fleet.run import hosts_of


class Actor:
    """An actor for which there is no room until a test says so."""

    def __init__(self) -> None:
        self.placed: Future[None] = Future()
        self.__ray_ready__ = SimpleNamespace(
            remote=lambda: SimpleNamespace(future=lambda: self.placed)
        )
        self.start = SimpleNamespace(remote=self._start)

    async def _start(self, *_: object) -> str:
        return "started"


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    """An actor of a machine without a GPU."""
    actor = Actor()
    ray = SimpleNamespace(
        init=lambda **_: None,
        shutdown=lambda: None,
        cluster_resources=lambda: {"CPU": 2.0},
        available_resources=lambda: {"CPU": 2.0},
        remote=lambda **_: lambda _: SimpleNamespace(remote=lambda: actor),
        exceptions=SimpleNamespace(RayError=RuntimeError),
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    return actor


@pytest.mark.usefixtures("actor")
@pytest.mark.parametrize("where", ["ray", "local"])
def test_gpus_that_nobody_can_give_are_refused_by_name(where: Any) -> None:
    with pytest.raises(FieldError, match="replica_gpus"):
        hosts_of([], FleetOptions(replica_gpus=1.0, hosts=where), "o")


def test_a_replica_without_a_machine_says_what_it_waits_for(
    actor: Actor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cluster may grow, so it waits."""
    monkeypatch.setattr(hosts, "PLACE_SECONDS", 0.01)
    caplog.set_level(logging.WARNING)

    async def start() -> object:
        cluster = RayHosts([], {}, "auto", 1.0, 1.0, 2, 2)
        starting = asyncio.create_task(cluster.start("replica-1"))
        async with asyncio.timeout(PATIENCE):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        actor.placed.set_result(None)
        return await starting

    assert asyncio.run(start()) == "started"
    assert "replica-1 waits" in caplog.text
    assert "1 CPUs and 1 GPUs; free are 2 CPUs and 0 GPUs" in caplog.text
