"""Energy of a run, from a library that stands for NVML's."""

import sys
from types import ModuleType

import pytest

from twolane.bench.energy import INTERVAL_SECONDS, EnergyMeter, is_local

LOCAL = "http://127.0.0.1:8000"


class Nvml(ModuleType):
    """Two GPUs; each reading of a counter is 100 J further."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.read: dict[str, int] = {}

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, gpu: str) -> str:
        return f"card {gpu}"

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        self.read[gpu] = self.read.get(gpu, 0) + 100_000
        return self.read[gpu]

    def nvmlDeviceGetClockInfo(self, gpu: str, kind: int) -> int:
        return {1: 1600, 2: 3201}[kind] if gpu == "GPU-0" else {1: 1800, 2: 3201}[kind]


@pytest.fixture
def nvml(monkeypatch):
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def test_a_local_run_has_the_energy_and_clocks_of_all_gpus(nvml):
    with EnergyMeter(LOCAL) as meter:
        meter._over.wait(3 * INTERVAL_SECONDS)
        found = meter.energy()
    assert found.joules == 200.0
    assert found.watts == pytest.approx(200.0 / (3 * INTERVAL_SECONDS), rel=0.5)
    assert found.cap_watts == 1400.0
    assert (found.sm_hz, found.memory_hz) == (1.7e9, 3.201e9)
    assert found.gpus == "card GPU-0, card GPU-1, by NVML"


@pytest.mark.parametrize(("visible", "gpus"), [("1", 1), ("GPU-7", 1), ("0,1", 2), ("", 0)])
def test_only_visible_gpus_count(nvml, monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with EnergyMeter(LOCAL) as meter:
        found = meter.energy()
    assert (found.joules if found else 0.0) == 100.0 * gpus
    if found:
        assert found.sm_hz is None  # the run was shorter than an interval


def test_nothing_is_measured_elsewhere_or_without_the_library(nvml, monkeypatch):
    with EnergyMeter("http://10.1.2.3:8000") as meter:
        assert meter.energy() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with EnergyMeter(LOCAL) as meter:
        assert meter.energy() is None


def test_which_addresses_are_of_this_machine():
    local = ("http://localhost:1", LOCAL, "http://[::1]:8000", "http://127.9.9.9")
    assert all(map(is_local, local))
    assert not any(map(is_local, ("http://example.org", "http://8.8.8.8:80")))
