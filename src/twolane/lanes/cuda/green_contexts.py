"""Green contexts: streams that run on a share of the SMs.

A level (p, d) is one split of the device: the driver hands out d SMs as a group, in its own
granularity, and the p others are the remainder. Both numbers are read back after creation. The
groups of different levels begin at the same SMs, so the decode shares of two levels are nested
and a smaller one never meets the prefill share of a larger one.
"""

from collections.abc import Sequence
from typing import Any

import torch

from twolane.devices import LaneName

STEP = 16
"""SMs between two levels, unless they are listed. The driver grants multiples of 8 on Hopper, but a
start with levels every 8 SMs, the last of which left 4 SMs to prefill, failed in cuBLAS (H200)."""


class NoGreenContexts(RuntimeError):
    """This driver or device cannot share its SMs; the message says why."""


class GreenContexts:
    """The levels of one device and the streams of each lane.

    Contexts and streams live as long as the process: CUDA graphs captured on a stream keep its
    share of the SMs.

    Args:
        device: index of the GPU.
        decode_units: SMs for the decode lane, one level each; the driver rounds them up. None:
            every 16 SMs from 16 up to all but 16. Empty: only the whole device.

    Raises:
        NoGreenContexts: the driver refuses; the whole device still works with `decode_units=()`.
        ValueError: a level leaves one of the lanes without SMs.
    """

    def __init__(self, device: int = 0, decode_units: Sequence[int] | None = None) -> None:
        self.device = device
        self.units = sm_count(device)
        if decode_units is None:
            decode_units = range(STEP, self.units - STEP + 1, STEP)
        self._contexts: dict[tuple[LaneName, int], Any] = {}
        self._streams: dict[tuple[LaneName, int], torch.cuda.Stream] = {}
        splits = {self._split(wanted) for wanted in decode_units}
        self.levels = tuple(sorted(splits, key=lambda level: level[1]))
        """(prefill units, decode units) as granted, fewest for decode first."""

    @property
    def offered(self) -> tuple[tuple[int, int], ...]:
        """The levels, and the two solo ones."""
        return (*self.levels, (self.units, 0), (0, self.units))

    @property
    def decode_units(self) -> tuple[int, ...]:
        """SMs that decode steps can run on, the whole device last."""
        return (*(decode for _, decode in self.levels), self.units)

    def stream(self, lane: LaneName, units: int) -> torch.cuda.Stream:
        """Return the stream of a lane on this many SMs.

        Raises:
            KeyError: no level has such a share.
        """
        stream = self._streams.get((lane, units))
        if stream is None:
            stream = self._streams[lane, units] = self._new_stream(lane, units)
        return stream

    @property
    def prefill_units(self) -> tuple[int, ...]:
        """SMs that prefill can run on, the whole device last."""
        return (*(prefill for prefill, _ in self.levels), self.units)

    def capture_stream(self, lane: LaneName, units: int) -> torch.cuda.Stream:
        """Return a stream on a share that is used for graphs alone.

        Graphs keep the product workspace of the stream they are captured on, wherever they are
        replayed: eager work of a lane must not have the same.
        """
        return self._new_stream(lane, units)

    def _new_stream(self, lane: LaneName, units: int) -> torch.cuda.Stream:
        priority = -1 if lane == "decode" else 0
        if units == self.units:
            return torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]
        cu = _driver()
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = cu.cuGreenCtxStreamCreate(self._context(lane, units), flags, priority)
        handle = _check(made, "cuGreenCtxStreamCreate")
        return torch.cuda.ExternalStream(int(handle), self.device)  # type: ignore[no-untyped-call]

    def _context(self, lane: LaneName, units: int) -> Any:
        """Return the lane's share of this size, or another lane's if it has none."""
        owners: tuple[LaneName, ...] = (lane, "decode", "prefill")
        return self._contexts[next((o, units) for o in owners if (o, units) in self._contexts)]

    def _split(self, decode_units: int) -> tuple[int, int]:
        """Make the two contexts of a level; (prefill units, decode units) as granted."""
        if not 0 < decode_units < self.units:
            raise ValueError(
                f"levels: {decode_units} SMs for decode; the device has {self.units} for both lanes"
            )
        cu = _driver()
        torch.zeros(1, device=f"cuda:{self.device}")  # makes the primary context
        sm = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        handle = _check(cu.cuDeviceGet(self.device), "cuDeviceGet")
        everything = _check(cu.cuDeviceGetDevResource(handle, sm), "cuDeviceGetDevResource")
        split = cu.cuDevSmResourceSplitByCount(1, everything, 0, decode_units)
        groups, _, rest = _check(split, "cuDevSmResourceSplitByCount")
        if not rest.sm.smCount:
            raise ValueError(f"levels: {decode_units} SMs for decode leave none to prefill")
        return self._add("prefill", handle, rest), self._add("decode", handle, groups[0])

    def _add(self, lane: LaneName, device: Any, resource: Any) -> int:
        """Make a green context on these SMs; how many it was granted."""
        cu = _driver()
        flags = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        described = _check(cu.cuDevResourceGenerateDesc([resource], 1), "cuDevResourceGenerateDesc")
        context = _check(cu.cuGreenCtxCreate(described, device, flags), "cuGreenCtxCreate")
        sm = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        granted = _check(cu.cuGreenCtxGetDevResource(context, sm), "cuGreenCtxGetDevResource")
        units = int(granted.sm.smCount)
        self._contexts.setdefault((lane, units), context)
        return units


def sm_count(device: int) -> int:
    """SMs of the device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoGreenContexts(
            "cuda-bindings is not installed: pip install twolane[cuda]"
        ) from error
    return driver


def _check(result: tuple[Any, ...], call: str) -> Any:
    """Return what a driver call returned beside its status.

    Raises:
        NoGreenContexts: it failed.
    """
    status, *values = result
    if int(status) != 0:
        raise NoGreenContexts(f"{call} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
