"""What a product and a copy reach on each share of a GPU, whose clock is emulated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.estimate import synthetic
from tests.kernels.emulated import LEVELS, UNITS, Partitions
from twolane.estimate.profile import ContendedProbe, Probe, Profile
from twolane.lanes.cuda.machine import CudaMachine
from twolane.model.shapes import SHAPES
from twolane.profile import probes
from twolane.profile.grid import CONTENDED_ROWS, LaneCapacity
from twolane.profile.run import probe

SIZE, NUMBERS = 8, 64
SHARES = LaneCapacity(UNITS, Partitions().offered, 64, 16, 4, 64, 64).shares


class Share:
    """A stream on some units, and the seconds of the kernels that have run there: a product takes
    12 s over the units, a copy 6 s on one and 3 s on more."""

    def __init__(self, units: int) -> None:
        self.seconds = {"mm": 12.0 / units, "neg": 6.0 / min(units, 2)}
        self.at = 0.0

    def synchronize(self) -> None: ...


class Event:
    """Happens when it is recorded, at the time of its stream."""

    def __init__(self, *, timing: bool) -> None:
        assert timing

    def record(self, stream: Share) -> None:
        self.at = stream.at

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


class Kernels(TorchDispatchMode):
    """Has every kernel take its time on the stream that it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Share | None = None
        self.ran: list[str] = []

    @contextmanager
    def on(self, stream: Share) -> Iterator[None]:
        self.current = stream
        yield
        self.current = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current is not None:
            name = func.overloadpacket.__name__
            self.current.at += self.current.seconds[name]
            self.ran.append(name)
        return func(*args, **(kwargs or {}))


class Streams(Partitions):
    """Levels whose streams have clocks."""

    def stream(self, lane: str, units: int) -> Any:
        assert units in SHARES
        return Share(units)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    settings = {
        "SECONDS": 0.0,
        "PRODUCT_SIZE": SIZE,
        "COPIED_NUMBERS": NUMBERS,
        "BESIDE_BATCHES": 2,
    }
    for name, value in settings.items():
        monkeypatch.setattr(probes, name, value)
    monkeypatch.setattr(probes, "new_event", Event)
    with Kernels() as kernels:
        monkeypatch.setattr(torch.cuda, "stream", kernels.on)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        yield kernels


@pytest.fixture
def machine() -> Any:
    machine: Any = object.__new__(CudaMachine)  # a model is not asked for
    machine.partitions, machine.device = Streams(), torch.device("cpu")
    machine.spec = replace(SHAPES["qwen3-8b"], hidden_size=SIZE, intermediate_size=SIZE)
    return machine


def asked(profile: Profile, machine: Any) -> list[float]:
    """Have a machine probed; what was told of the progress."""
    told: list[float] = []
    probe(profile, machine, SHARES, lambda stage, fraction: told.append(fraction))
    return told


def test_each_share_has_what_the_kernels_reach_there(
    kernels: Kernels, machine: Any, tmp_path: Path
) -> None:
    assert SHARES == [1, 2, 3] == sorted({*LEVELS[0], UNITS})
    profile = synthetic.profile(rounds=0)
    assert asked(profile, machine)[:4] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    flops, moved = 2 * SIZE**3, 2 * 4 * NUMBERS
    right = [Probe(1, flops / 12, moved / 6), Probe(2, flops / 6, moved / 3)]
    right.append(Probe(3, flops / 4, moved / 3))
    for found, expected in zip(profile.probes, right, strict=True):
        assert found.units == expected.units
        assert found.flop_rate == pytest.approx(expected.flop_rate)
        assert found.byte_rate == pytest.approx(expected.byte_rate)
    profile.save(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile


def test_a_profile_is_given_the_shares_that_it_lacks(kernels: Kernels, machine: Any) -> None:
    """Older profiles have none, and one may have been taken with other levels."""
    profile = synthetic.profile(rounds=0)
    profile.probes = [Probe(2, 1.0, 1.0)]
    profile.contended = [ContendedProbe(1, 256, 1.0)]
    asked(profile, machine)
    assert [probe.units for probe in profile.probes] == [2, 1, 3]
    assert profile.probes[0] == Probe(2, 1.0, 1.0)
    ran = list(kernels.ran)
    assert ran.count("mm") == ran.count("neg") > 0
    assert asked(profile, machine) == []
    assert kernels.ran == ran


def test_each_level_has_what_a_copy_reaches_beside_products(
    kernels: Kernels, machine: Any, tmp_path: Path
) -> None:
    profile = synthetic.profile(rounds=0)
    profile.probes = [Probe(units, 1.0, 1.0) for units in SHARES]
    assert asked(profile, machine)[-1] == 1.0
    points = [(probe.units, probe.rows) for probe in profile.contended]
    assert points == [(d, rows) for rows in CONTENDED_ROWS for _, d in machine.partitions.levels]
    for found in profile.contended:
        assert found.byte_rate == pytest.approx(2 * 4 * NUMBERS * min(found.units, 2) / 6)
    copies = kernels.ran.count("neg")
    longest = kernels.ran.count("mm") * min(12 / units for units in SHARES)
    assert longest > probes.QUEUED / 2 * copies  # products outlast the copies
    profile.save(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile
