"""Words that several rooms share."""

from typing import Literal

LaneName = Literal["prefill", "decode", "device"]
"""The prefill lane, the decode lane, or the whole device (both phases as one batch)."""

LANES: tuple[LaneName, ...] = ("prefill", "decode", "device")
