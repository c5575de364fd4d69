"""What the measurements on a GPU share: cases, partitions, timing, checks and the file of results.

A case is a module of this folder with a docstring, `options` for what its command takes, and
`main`, which reports rows (figures as they come) and bars (figures held to a bound).
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

sys.path.append(str(Path(__file__).parents[1]))
from measured import Figure, show

from twolane.results.provenance import provenance, save

LEVELS = (16, 24, 32, 48, 64, 84, 100, 116, 132)
"""Numbers of SMs that kernels are measured on."""


class Case(Protocol):
    """A module that measures something."""

    __doc__: str

    def options(self, add: Callable[..., Any]) -> None:
        """Add the options of its command."""

    def main(self, report: "Report", given: argparse.Namespace) -> None:
        """Measure, and report."""


@dataclass(frozen=True)
class Partition:
    """A stream bound to some SMs."""

    units: int
    """Number of SMs that the driver granted."""
    stream: torch.cuda.Stream


def _checked(result: tuple) -> Any:
    error, *values = result
    if error.value:
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def partition(units: int) -> Partition:
    """Return a stream on `units` SMs, through a green context that lives as long as the process.

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
    """Return one graph of all calls in order, captured on `stream` and so bound to its SMs."""
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
    """Return the median seconds of a call, over `repeats` replays of one graph of all calls.

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


def timed(run: Callable[[], object], times: int = 7) -> float:
    """Return the median seconds of `run` on the current stream; the first two do not count."""
    samples = []
    for _ in range(times + 2):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        run()
        b.record()
        b.synchronize()
        samples.append(a.elapsed_time(b) * 1e-3)
    return statistics.median(samples[2:])


def read_rate() -> float:
    """Return the bytes per second of a kernel that only reads, on all SMs."""
    data = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_().view(torch.float32)
    total = torch.empty((), device="cuda")
    return data.nbytes / timed(lambda: torch.sum(data, dim=0, out=total))


def copy_rate(stream: torch.cuda.Stream, size: int = 1 << 30) -> float:
    """Return the bytes per second, read plus written, of PyTorch's copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / seconds([lambda: target.copy_(source)], stream)


def worst_difference(out: torch.Tensor, reference: torch.Tensor) -> tuple[float, str]:
    """Return ||out - reference|| / ||reference|| of the worst row, and where it is; NaN counts
    most."""
    rows = out.flatten(1).double(), reference.flatten(1).double()
    error = (rows[0] - rows[1]).norm(dim=1) / rows[1].norm(dim=1).clamp_min(1e-30)
    row = int(error.nan_to_num(torch.inf).argmax())
    column = int((rows[0] - rows[1]).abs().nan_to_num(torch.inf)[row].argmax())
    place = f"row {row}, element {column}: {rows[0][row, column]:.6g}"
    return float(error[row]), f"{place} instead of {rows[1][row, column]:.6g}"


class Report:
    """Rows and bars of a case: printed as they come, and written to a file each time.

    Args:
        case: The name of the case.
        workload: What is measured, for the record.
        path: The file, or None.
    """

    def __init__(self, case: str, workload: Any, path: Path | None) -> None:
        self.case, self._workload, self._path = case, workload, path
        self.rows: list[dict[str, Any]] = []
        self.figures: list[Figure] = []
        self.failures = 0
        self._start = time.perf_counter()

    def add(self, **row: Any) -> None:
        """Print and keep one row."""
        self.rows.append(row)
        print("  ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)
        self._write()

    def hold(self, *figures: Figure) -> None:
        """Print and keep figures with their bars."""
        self.figures.extend(figures)
        show(figures)
        self._write()

    def check(self, what: str, out: torch.Tensor, reference: torch.Tensor, bound: float) -> None:
        """Compare a result with what float32 gives; a row that differs by more is a failure."""
        error, place = worst_difference(out, reference)
        good = error <= bound
        self.failures += not good
        self.add(check=what, error=error, good=good, **({} if good else {"worst": place}))

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

    @property
    def good(self) -> bool:
        """Whether nothing failed and every bar holds."""
        return not self.failures and all(figure.holds for figure in self.figures)

    def _write(self) -> None:
        if self._path is None:
            return
        rows = json.loads(json.dumps(self.rows, default=float))  # NumPy's numbers
        content = {"seconds": time.perf_counter() - self._start, "rows": rows}
        content["figures"] = self.figures
        save(self._path, provenance({"case": self.case, **self._workload}), content)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(one)}" for key, one in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run(case: Case, name: str, words: Sequence[str]) -> int:
    """Run one case with the words of its command; return the exit code.

    Raises:
        SystemExit: there is no GPU to measure.
    """
    parser = argparse.ArgumentParser(prog=f"gpu {name}", description=case.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    case.options(parser.add_argument)
    given = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit(f"{name} needs an NVIDIA GPU, and PyTorch finds none")
    torch.manual_seed(0)
    out = given.out or (Path(os.environ["OUT"]) / f"{name}.json" if "OUT" in os.environ else None)
    asked = {key: value for key, value in vars(given).items() if key != "out"}
    report = Report(name, asked, out)
    case.main(report, given)
    took = time.perf_counter() - report._start
    print(f"{name}: {len(report.rows)} rows, {took:.0f} s, {report.failures} failures", flush=True)
    return 0 if report.good else 1
