"""Rates of a GPU on each share of its SMs, by kernels that serve nothing (DuetServe §4.2).

Two kernels run alone on the streams that serve: a product of two matrices in bfloat16, and a copy.
The copy negates what it copies, so that it is a kernel: the driver may give a plain copy to a copy
engine, which no share of the SMs bounds. At each level the copy also runs on the decode lane beside
the model's up and gate projection on the prefill lane (Bullet §3.2.3).
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from statistics import median

import torch
from torch import Tensor

from twolane.devices import OnProgress
from twolane.estimate.profile import ContendedProbe, Probe
from twolane.lanes.cuda.device_clock import new_event
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.model.spec import ModelSpec
from twolane.profile.grid import CONTENDED_ROWS

log = logging.getLogger("twolane.profile")

PRODUCT_SIZE = 8192
"""Rows and columns of the matrices: a product has 31 tiles of 128 by 128 for each of 132 SMs."""
COPIED_NUMBERS = 2**27
"""Numbers of four bytes that a copy reads and writes: each buffer is ten times the L2 cache of an
H200, so every copy finds it cold."""
SECONDS = 8.0
"""Seconds that all probes take together, about."""
MAX_SECONDS = 0.3
"""Most seconds of one kernel on one share, about; clocks settle in the first half of them."""
BATCH = 4
"""Number of kernels that are queued at a time."""
BESIDE_BATCHES = 24
"""Batches of copies that are timed beside products; the first half are not counted."""
QUEUED = 4.0
"""Seconds of the products that are queued beside a batch of copies, over the copies' alone."""


def probed(
    partitions: GreenContexts, device: torch.device, shares: Sequence[int], progress: OnProgress
) -> list[Probe]:
    """Time both kernels on each share of a GPU that does nothing else.

    Args:
        partitions: the levels and their streams.
        device: the GPU that they share.
        shares: numbers of SMs that a lane may have.
        progress: called with ("probes", fraction).
    """
    seconds = min(MAX_SECONDS, SECONDS / (2 * len(shares)))
    a, b = (_random((PRODUCT_SIZE, PRODUCT_SIZE), device, torch.bfloat16) for _ in range(2))
    source = _random((COPIED_NUMBERS,), device, torch.float32)
    result, copy = torch.empty_like(a), torch.empty_like(source)
    multiply = partial(torch.mm, a, b, out=result)
    negate = partial(torch.neg, source, out=copy)
    torch.cuda.synchronize()  # the numbers are there, and the lanes have started
    probes = []
    for number, units in enumerate(shares):
        progress("probes", number / len(shares))
        stream = partitions.stream("prefill", units)
        flop_rate = 2.0 * PRODUCT_SIZE**3 / _median_seconds(multiply, stream, seconds)
        byte_rate = 2.0 * source.nbytes / _median_seconds(negate, stream, seconds)
        probes.append(Probe(units, flop_rate, byte_rate))
        reached = f"{flop_rate / 1e12:.1f} TFLOP/s, a copy {byte_rate / 1e12:.3f} TB/s"
        log.info("a product on %d SMs reaches %s", units, reached)
    progress("probes", 1.0)
    return probes


def contended(
    partitions: GreenContexts, device: torch.device, spec: ModelSpec, progress: OnProgress
) -> list[ContendedProbe]:
    """Time a copy on the decode lane beside products that keep the prefill lane busy.

    Args:
        partitions: The levels and their streams.
        device: The GPU that they share.
        spec: The model whose up and gate projection is multiplied.
        progress: Called with ("contention", fraction).
    """
    points = list(product(CONTENDED_ROWS, partitions.levels))
    width, inner = spec.hidden_size, 2 * spec.intermediate_size
    weights = _random((width, inner), device, torch.bfloat16)
    source = _random((COPIED_NUMBERS,), device, torch.float32)
    copy = partial(torch.neg, source, out=torch.empty_like(source))
    probes = []
    for number, (rows, (prefill_units, decode_units)) in enumerate(points):
        progress("contention", number / len(points))
        inputs = _random((rows, width), device, torch.bfloat16)
        results = torch.empty((rows, inner), device=device, dtype=torch.bfloat16)
        multiply = partial(torch.mm, inputs, weights, out=results)
        copying = partitions.stream("decode", decode_units)
        multiplying = partitions.stream("prefill", prefill_units)
        seconds = _seconds_beside(copy, multiply, copying, multiplying)
        probes.append(ContendedProbe(decode_units, rows, 2.0 * source.nbytes / seconds))
    progress("contention", 1.0)
    return probes


def _seconds_beside(
    run: Callable[[], object],
    other: Callable[[], object],
    stream: torch.cuda.Stream,
    other_stream: torch.cuda.Stream,
) -> float:
    """Return the median seconds of a kernel while another one is repeated on another stream."""
    alone = _median_seconds(run, stream, 0.0)
    beside = _median_seconds(other, other_stream, 0.0)
    repeats = 1 + int(QUEUED * BATCH * alone / beside)
    times: list[float] = []
    for _ in range(BESIDE_BATCHES):
        with torch.cuda.stream(other_stream), torch.inference_mode():
            for _ in range(repeats):
                other()
        with torch.cuda.stream(stream), torch.inference_mode():
            times += _batch_seconds(run, stream)
        other_stream.synchronize()
    return median(times[len(times) // 2 :])


def _batch_seconds(run: Callable[[], object], stream: torch.cuda.Stream) -> list[float]:
    """Return the seconds of each of `BATCH` kernels that are queued together on a stream."""
    marks = [new_event(timing=True) for _ in range(BATCH + 1)]
    marks[0].record(stream)
    for mark in marks[1:]:
        run()
        mark.record(stream)
    stream.synchronize()
    return [before.elapsed_time(mark) * 1e-3 for before, mark in pairwise(marks)]


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random numbers: zeros take less power, so that clocks would stay high."""
    return torch.randn(shape, device=device, dtype=dtype)


def _median_seconds(run: Callable[[], object], stream: torch.cuda.Stream, seconds: float) -> float:
    """Median seconds of a kernel that is repeated on a stream for that long or a little longer,
    over the second half."""
    times: list[float] = []
    with torch.cuda.stream(stream), torch.inference_mode():
        run()  # loads the kernel
        stream.synchronize()
        begun = time.monotonic()
        while (spent := time.monotonic() - begun) < seconds or not times:
            found = _batch_seconds(run, stream)
            if spent >= seconds / 2:
                times += found
    return median(times)
