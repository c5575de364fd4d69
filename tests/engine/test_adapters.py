"""Adapters in the engine: random schedules in which they come and go, and without each guard.

Adapters of three ranks answer beside the base model, sliced, in hybrid passes and after being
preempted. Each is unloaded and loaded again, as another version under its old name, while requests
use it; every output is compared with that of the request alone, by the version that it was sent to.
"""

import random
from collections import Counter
from collections.abc import Collection
from itertools import product
from pathlib import Path

import pytest

from tests.engine.test_work_in_flight import RANDOM, policy, some_systems
from tests.engine.world import ADAPTERS, World
from twolane.common.errors import FieldError
from twolane.engine.adapters.registry import AdapterRegistry, LoadedAdapter
from twolane.engine.kv.page_hash import salt_bytes
from twolane.engine.launches import launch
from twolane.engine.state import State
from twolane.model.load.adapter_files import CONFIG, TENSORS

SCHEDULES, FULL_SCHEDULES = 1, 200


def run_world(system: str, seed: int) -> World:
    world = World(policy(system, seed), random.Random(seed), adapted=True)
    world.run()
    return world


@some_systems
def test_adapters_answer_as_if_alone(system: str, request: pytest.FixtureRequest) -> None:
    total: Counter[str] = Counter()
    full = request.config.getoption("--full")
    for seed in range(FULL_SCHEDULES if full else SCHEDULES if system == RANDOM else 1):
        world = run_world(system, seed)
        total += world.seen
        assert world.seen["memory preemptions"]
        assert {submit.lora for submit in world.submits} == {None, *ADAPTERS}
    assert total["reloads beside others"]
    assert total["unloads in use"]


GUARDS = {
    "pages are shared by requests of one adapter alone": (
        LoadedAdapter,
        "salt",
        lambda _, cache_salt: salt_bytes(cache_salt),
    ),
    "an adapter's slot is kept until nobody names it": (State, "adapters_named", lambda _: ()),
    "lanes are told of a slot's adapter": (
        launch,
        "_update",
        lambda held, sampling=None: launch.SlotUpdate(
            held.slot, held.pages_sent, tuple(_told(held)), sampling
        ),
    ),
}


def _told(held):
    first, held.pages_sent = held.pages_sent, len(held.pages)
    return held.pages[first:]


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_outputs_are_wrong(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead = GUARDS[guard]
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, TypeError)):
        for seed in range(10):
            run_world(RANDOM, seed)


class Files:
    """Lanes that load whatever is neither bad nor huge."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        if "bad" in path:
            raise ValueError(f"{path} is damaged")
        if "huge" in path:
            raise MemoryError(path)
        self.slots[slot] = path

    def drop_adapter(self, slot: int) -> None:
        del self.slots[slot]


def loaded(
    registry: AdapterRegistry, name: str, path: str, named: Collection[int] = ()
) -> str | None:
    """Load an adapter, and return what was wrong with it."""
    registry.load(name, path)
    for _, done in registry._loading.values():
        done.exception()
    registry.settle(lambda: named)
    [result], registry.results = registry.results, []
    assert result.loaded == (result.problem is None)
    return result.problem


def unloaded(registry: AdapterRegistry, name: str, named: set[int]) -> list[str | None]:
    registry.unload(name)
    registry.settle(lambda: named)
    problems, registry.results = [result.problem for result in registry.results], []
    return problems


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Adapters of which the fakes know the names alone."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "three", "bad", "huge"):
        write(Path(name), name.encode())


@pytest.mark.usefixtures("folders")
def test_what_cannot_be_loaded_leaves_the_others_as_they_are():
    lanes = Files()
    registry = AdapterRegistry(lanes, 2)
    assert loaded(registry, "a", "one") is None
    assert "is damaged" in loaded(registry, "b", "bad")
    assert "MemoryError" in loaded(registry, "b", "huge")
    assert "loaded already" in loaded(registry, "a", "two")
    assert loaded(registry, "b", "two") is None
    assert "2 adapters are loaded" in loaded(registry, "c", "three")
    assert set(lanes.slots.values()) == {"one", "two"}
    assert registry.find("c") is None
    assert "not served" in loaded(AdapterRegistry(lanes, 0), "a", "one")


@pytest.mark.usefixtures("folders")
def test_an_adapter_in_use_is_unloaded_when_its_last_request_has_ended():
    lanes = Files()
    registry = AdapterRegistry(lanes, 1)
    loaded(registry, "a", "one")
    first = registry.find("a")
    assert unloaded(registry, "a", {first.slot}) == []
    assert registry.find("a") is None
    assert "still use it" in loaded(registry, "a", "two", {first.slot})
    assert registry.settle(set)
    assert not lanes.slots
    registry.results = []
    assert loaded(registry, "a", "two") is None
    assert registry.find("a").salt(None) != first.salt(None)
    assert unloaded(registry, "b", set()) == ["no adapter 'b' is loaded"]


def write(folder: Path, weights: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text("{}")
    (folder / TENSORS).write_bytes(weights)
    return str(folder)


def test_pages_are_those_of_the_same_files_whatever_they_are_called(tmp_path):
    paths = [write(tmp_path / name, name[:1].encode()) for name in ("a", "another", "b")]
    registries = AdapterRegistry(Files(), 3), AdapterRegistry(Files(), 3)
    for registry in registries:
        for name, path in zip("xyz", paths, strict=True):
            assert loaded(registry, name, path) is None
    for one, other in product(registries, registries):
        assert one.find("x").salt("tenant") == other.find("y").salt("tenant")
        assert one.find("x").salt("tenant") != other.find("x").salt(None)
        assert one.find("x").salt(None) != other.find("z").salt(None)


@pytest.mark.parametrize("change", ["written", "gone"])
def test_files_that_change_while_they_are_read_are_refused(tmp_path, change):
    """Other ranks may have read the one, and this one the other."""

    class Changed(Files):
        def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
            super().load_adapter(slot, path, digest)
            if change == "written":
                write(Path(path), b"new")
            else:
                (Path(path) / TENSORS).unlink()

    path = write(tmp_path / "a", b"old")
    registry = AdapterRegistry(Changed(), 1)
    assert "change while they are read" in loaded(registry, "a", path)
    assert registry.find("a") is None


def test_an_adapter_that_cannot_be_loaded_at_the_start_is_named():
    with pytest.raises(FieldError, match="lora b: bad is damaged"):
        AdapterRegistry(Files(), 2).load_at_start("b", "bad")


def test_a_request_for_an_adapter_that_is_not_there_is_refused():
    world = World(policy(RANDOM, 0), random.Random(0), adapted=True)
    submit = world.submits[3]
    world.engine.take([type(submit)("x", [5, 6, 7], submit.params, lora="nobody")])
    [refused] = world.engine.outputs().refused
    assert (refused.code, refused.field) == ("unknown_model", "model")
