"""Energy and clocks of this machine's GPUs during a run, from NVML (`nvidia-ml-py`)."""

import contextlib
import importlib
import ipaddress
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from twolane.results.result import Energy

INTERVAL_SECONDS = 0.25
"""Seconds between two readings of the clocks."""


class EnergyMeter:
    """Measures the energy of the GPUs that this command could use, as a context manager.

    A server of this machine is assumed to run on them, and nothing else. Without NVML, or with a
    server on another machine, nothing is measured.

    Args:
        url: Address of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._nvml: Any = None
        self._gpus: list[Any] = []
        self._began = 0.0
        self._before = 0.0
        self._clocks: list[tuple[float, float]] = []
        """Means of the SMs' and the memories' clocks at each reading, in Hz."""
        self._over = threading.Event()

    def __enter__(self) -> "EnergyMeter":
        if not is_local(self._url):
            return self
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._gpus = [*self._visible()]
            self._began, self._before = time.monotonic(), self._joules()
        except Exception:  # NVML's own, of a library that may be missing, too
            self._gpus = []
        if self._gpus:
            threading.Thread(target=self._read, daemon=True, name="clocks").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def energy(self) -> Energy | None:
        """Return what was measured since the beginning; None: nothing."""
        if not self._gpus:
            return None
        joules, seconds = self._joules() - self._before, time.monotonic() - self._began
        names = [str(self._nvml.nvmlDeviceGetName(gpu)) for gpu in self._gpus]
        cap = sum(self._nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3 for gpu in self._gpus)
        means = [statistics.fmean(values) for values in zip(*self._clocks, strict=True)]
        named = f"{', '.join(names)}, by NVML"
        return Energy(named, joules, joules / seconds, cap, *means)

    def _visible(self) -> Iterator[Any]:
        """Yield the GPUs that CUDA_VISIBLE_DEVICES leaves, or all."""
        nvml, visible = self._nvml, os.environ.get("CUDA_VISIBLE_DEVICES")
        every = ",".join(str(index) for index in range(nvml.nvmlDeviceGetCount()))
        for name in filter(None, (every if visible is None else visible).split(",")):
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            yield by_index(int(name)) if name.strip().isdecimal() else by_uuid(name.strip())

    def _joules(self) -> float:
        """Return the energy of the GPUs since their driver was loaded."""
        each = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        return float(sum(each(gpu) for gpu in self._gpus)) / 1e3

    def _read(self) -> None:
        nvml = self._nvml
        kinds = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        while not self._over.wait(INTERVAL_SECONDS):
            sm, memory = (
                sum(nvml.nvmlDeviceGetClockInfo(gpu, kind) for gpu in self._gpus) * 1e6
                for kind in kinds
            )
            self._clocks.append((sm / len(self._gpus), memory / len(self._gpus)))


def is_local(url: str) -> bool:
    """Return whether a URL names this machine."""
    host = urlsplit(url).hostname or ""
    if host in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
