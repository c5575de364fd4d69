"""Latency bounds."""

import math
from typing import Annotated

import msgspec

from twolane.common.errors import FieldError
from twolane.common.options import Option, milliseconds

PANEL = "Scheduling"
PER_1K = Option(
    PANEL,
    "MS",
    least=0,
    name="ttft_per_1k_ms",
    factor=1e3 * 1024,
    help="Milliseconds added to --slo-ttft-ms for each 1,024 prompt tokens that the prefix cache "
    "does not have.",
)


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Latency bounds in seconds; None is no bound.

    Raises:
        FieldError: a field is out of range.
    """

    ttft: Annotated[float | None, milliseconds(PANEL, "ttft", least=0, none=0)] = None
    """Bound in seconds on the time to the first token of requests without an x-slo-ttft-ms header;
    0 is no bound, the default."""
    ttft_per_token: Annotated[float, PER_1K] = 0.0
    """Seconds added to `ttft` for each new prompt token (Drift §5.1 gives 1 s per 1,024)."""
    tbt: Annotated[float | None, milliseconds(PANEL, "tbt", least=0, none=0)] = None
    """Bound in seconds on each time between two tokens of requests without an x-slo-tbt-ms header;
    0 is no bound, the default."""
    tpot: Annotated[float | None, milliseconds(PANEL, "tpot", least=0, none=0)] = None
    """Bound in seconds on the mean time between tokens of requests without an x-slo-tpot-ms header;
    0 is no bound, the default."""

    def __post_init__(self) -> None:
        for name in self.bounds:
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise FieldError(name, f"must be above 0, not {value!r}")
        if not 0.0 <= self.ttft_per_token < math.inf:
            raise FieldError("ttft_per_token", f"must be at least 0, not {self.ttft_per_token!r}")

    @property
    def bounds(self) -> list[str]:
        """Names of the bounds that are set."""
        return [name for name in ("ttft", "tbt", "tpot") if getattr(self, name) is not None]

    def first_token(self, new: int) -> float | None:
        """Return the TTFT bound in seconds of a prompt with `new` new tokens; None: no bound."""
        return None if self.ttft is None else self.ttft + self.ttft_per_token * new

    def sooner(self, seconds: float) -> "Slo":
        """Return a copy whose TBT bound is `seconds` shorter, but at most by 1/40 of it."""
        tbt = None if self.tbt is None else max(self.tbt - seconds, 0.975 * self.tbt)
        return msgspec.structs.replace(self, tbt=tbt)

    def over(self, default: "Slo") -> "Slo":
        """Return these bounds, with those of `default` for the ones not set."""
        ttft = default if self.ttft is None else self
        return Slo(
            ttft=ttft.ttft,
            ttft_per_token=ttft.ttft_per_token,
            tbt=default.tbt if self.tbt is None else self.tbt,
            tpot=default.tpot if self.tpot is None else self.tpot,
        )
