"""Latency bounds."""

import math

import msgspec

from twolane.common.errors import FieldError


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Latency bounds in seconds; None is no bound.

    Raises:
        FieldError: a field is out of range.
    """

    ttft: float | None = None
    ttft_per_token: float = 0.0
    """Added to `ttft` for each new prompt token (Drift §5.1 gives 1 s per 1,024)."""
    tbt: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in self.bounds:
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise FieldError(name, f"must be above 0, not {value!r}")
        if not 0.0 <= self.ttft_per_token < math.inf:
            raise FieldError("ttft_per_token", f"must be at least 0, not {self.ttft_per_token!r}")

    @property
    def bounds(self) -> list[str]:
        """The names of the bounds that there are."""
        return [name for name in ("ttft", "tbt", "tpot") if getattr(self, name) is not None]

    def first_token(self, new: int) -> float | None:
        """Seconds from arrival within which the first token is wanted, of so many new tokens."""
        return None if self.ttft is None else self.ttft + self.ttft_per_token * new

    def sooner(self, seconds: float) -> "Slo":
        """The same with a TBT bound that is shorter by so much, by a fortieth of it at most."""
        tbt = None if self.tbt is None else max(self.tbt - seconds, 0.975 * self.tbt)
        return msgspec.structs.replace(self, tbt=tbt)

    def over(self, default: "Slo") -> "Slo":
        """These bounds, and those of `default` where there is none."""
        ttft = default if self.ttft is None else self
        return Slo(
            ttft=ttft.ttft,
            ttft_per_token=ttft.ttft_per_token,
            tbt=default.tbt if self.tbt is None else self.tbt,
            tpot=default.tpot if self.tpot is None else self.tpot,
        )
