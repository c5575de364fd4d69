"""Clocks and power of the GPU while it works, as `nvidia-smi` reports them."""

import shutil
import subprocess
import threading
import time
from typing import NamedTuple

QUERY = "clocks.sm,clocks.mem,power.draw.instant"


class ClockMeans(NamedTuple):
    """Means over an interval."""

    sm_hz: float
    memory_hz: float
    watts: float


class Clocks:
    """Reads clocks and power in the background; without `nvidia-smi` there are none.

    Args:
        device: The GPU's UUID, as `nvidia-smi` reports it, since `nvidia-smi` ignores
            CUDA_VISIBLE_DEVICES; None if there is no GPU.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._readings: list[tuple[float, ClockMeans]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Clocks":
        tool = shutil.which("nvidia-smi")
        if self._device is not None and tool is not None:
            command = [tool, f"--id={self._device}", f"--query-gpu={QUERY}"]
            # Milliseconds between two readings of the clocks.
            command += ["--format=csv,noheader,nounits", "--loop-ms=50"]
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, daemon=True, name="clocks").start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def between(self, start: float, end: float) -> ClockMeans | None:
        """Means between two times of `time.monotonic`; None: nothing was read in between."""
        inside = [reading for at, reading in self._readings if start <= at <= end]
        if not inside:
            return None
        return ClockMeans(*(sum(values) / len(inside) for values in zip(*inside, strict=True)))

    def forget(self, before: float) -> None:
        """Drop what was read before that time."""
        self._readings = [entry for entry in self._readings if entry[0] >= before]

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                sm, memory, watts = (float(field) for field in line.split(","))
            except ValueError:
                continue  # "[N/A]" where the driver has no reading
            reading = ClockMeans(sm * 1e6, memory * 1e6, watts)
            self._readings.append((time.monotonic(), reading))
