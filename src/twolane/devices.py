"""Devices: their kinds, the names of their lanes, and the progress of a start on one."""

from collections.abc import Callable
from typing import Literal

LaneName = Literal["prefill", "decode", "device"]
"""A lane: prefill, decode, or the whole device (both phases in one batch)."""

LANES: tuple[LaneName, ...] = ("prefill", "decode", "device")
EXCLUSIVE: dict[LaneName, tuple[LaneName, ...]] = {
    "prefill": ("prefill", "device"),
    "decode": ("decode", "device"),
    "device": LANES,
}
"""For each lane, the lanes whose launches run before or after its own and never beside them."""

MachineKind = Literal["cpu", "cuda", "simulated"]
"""The kind of device that an engine runs on."""

OnProgress = Callable[[str, float], None]
"""Called with a stage of a start and the fraction of it that is done."""
