"""The random schedules of `tests/gpu/isolation.py`, over lanes that are stepped on a CPU."""

import random
from types import SimpleNamespace

import pytest

from tests.engine import world
from tests.engine.random_plans import RandomPlans
from tests.gpu import isolation

SEED = 0


class SteppedGpuWorld(isolation.GpuWorld):
    """What a GPU's lanes do by themselves is done in steps; answers are not compared."""

    def run_lanes(self) -> bool:
        return world.World.run_lanes(self)

    def _check_output(self, submit: world.Submit) -> None:
        assert submit.id in self.entries


def test_a_schedule_ends_with_all_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    submits = world.World(RandomPlans(SEED), random.Random(SEED), requests=10).submits
    entries = [SimpleNamespace(submit=submit) for submit in submits]
    bench = SimpleNamespace(
        lanes=world.SteppedLanes(world.make_runner(160, isolation.SLOTS), lambda: None),
        spec=world.tiny_decoder().spec,
        catalogue=SimpleNamespace(filling=entries[:3], short=entries[3:], long=entries[3:]),
    )
    for name, value in {"BENCH": bench, "PAGE": world.PAGE, "SHORT_POOL": (16, 20)}.items():
        monkeypatch.setattr(isolation, name, value, raising=False)
    served = SteppedGpuWorld(RandomPlans(SEED), random.Random(SEED))
    served.run()
    assert len(served.finished) == isolation.REQUESTS
    assert served.seen["launches"] >= isolation.LAUNCHES
    assert served.seen["merged"]
