"""What the kernel benchmarks share: partitions of the GPU, timing, checks, tables and JSON."""

import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twolane.results.provenance import provenance, save

LEVELS = (16, 24, 32, 48, 64, 84, 100, 116, 132)


def _checked(result: tuple) -> Any:
    error, *values = result
    if error.value:
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class Partition:
    """A stream bound to some SMs; `units` is what the driver granted."""

    units: int
    stream: torch.cuda.Stream


def partition(units: int) -> Partition:
    """A stream on `units` SMs, through a green context that lives as long as the process.

    The driver splits off multiples of 8 SMs; another count is the remainder of such a split, and
    the device's own count is a plain stream.

    Raises:
        ValueError: neither `units` nor what it leaves over is a multiple of 8.
        RuntimeError: the driver refuses, or grants another number.
    """
    from cuda.bindings import driver

    torch.cuda.init()
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).multi_processor_count
    if units == total:
        return Partition(units, torch.cuda.Stream())
    if units % 8 and (total - units) % 8:
        raise ValueError(f"units={units}: neither it nor {total} - {units} is a multiple of 8")
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    handle = _checked(driver.cuDeviceGet(device))
    resource = _checked(driver.cuDeviceGetDevResource(handle, kind))
    split = units if units % 8 == 0 else total - units
    groups, _, rest = _checked(driver.cuDevSmResourceSplitByCount(1, resource, 0, split))
    chosen = groups[0] if units % 8 == 0 else rest
    if chosen.sm.smCount != units:
        raise RuntimeError(f"asked for {units} SMs, granted {chosen.sm.smCount}")
    descriptor = _checked(driver.cuDevResourceGenerateDesc([chosen], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _checked(driver.cuGreenCtxCreate(descriptor, handle, flags))
    nonblocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = _checked(driver.cuGreenCtxStreamCreate(context, nonblocking, 0))
    return Partition(units, torch.cuda.ExternalStream(int(stream)))


def capture(calls: Sequence[Callable[[], Any]], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """One graph of all calls in order, captured on `stream` and so bound to its SMs."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compile, load and allocate outside the capture
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def seconds(
    calls: Sequence[Callable[[], Any]], stream: torch.cuda.Stream, repeats: int = 10
) -> float:
    """Median seconds a call, over `repeats` replays of one graph of all calls.

    Give calls whose data together exceed the L2 cache several times, so that each finds it cold.
    """
    graph = capture(calls, stream)
    times = []
    with torch.cuda.stream(stream):
        graph.replay()
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(calls)


def copy_bandwidth(stream: torch.cuda.Stream, size: int = 1 << 30) -> float:
    """Bytes per second read plus written by PyTorch's copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / seconds([lambda: target.copy_(source)], stream)


def worst_difference(out: torch.Tensor, reference: torch.Tensor) -> tuple[float, str]:
    """||out - reference|| / ||reference|| over the worst row, and where it is (NaN counts most)."""
    rows = out.flatten(1).double(), reference.flatten(1).double()
    error = (rows[0] - rows[1]).norm(dim=1) / rows[1].norm(dim=1).clamp_min(1e-30)
    row = int(error.nan_to_num(torch.inf).argmax())
    column = int((rows[0] - rows[1]).abs().nan_to_num(torch.inf)[row].argmax())
    place = f"row {row}, element {column}: {rows[0][row, column]:.6g}"
    return float(error[row]), f"{place} instead of {rows[1][row, column]:.6g}"


class Report:
    """Rows of a benchmark: printed as they come, written as JSON at the end.

    Raises:
        SystemExit: on construction, there is no GPU to measure.
    """

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            raise SystemExit(f"{name} needs an NVIDIA GPU, and PyTorch finds none")
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self.failures = 0
        self._start = time.perf_counter()

    def add(self, **row: Any) -> None:
        """Print and keep one row."""
        self.rows.append(row)
        print("  ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Print what went wrong and go on with the rest."""
        try:
            yield
            torch.cuda.synchronize()
        except Exception as error:
            self.failures += 1
            text = "".join(traceback.format_exception(error)[-4:])[-1500:]
            self.add(failed=what, error=f"{type(error).__name__}: {error}"[:300])
            print(text, flush=True)

    def write(self) -> None:
        """Write $OUT/NAME.json (the current folder without OUT), with its provenance."""
        took = time.perf_counter() - self._start
        path = Path(os.environ.get("OUT", ".")) / f"{self.name}.json"
        save(path, provenance(self.name), {"seconds": took, "rows": self.rows})
        print(f"{path}: {len(self.rows)} rows, {took:.0f} s, {self.failures} failures")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
