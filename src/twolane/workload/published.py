"""Published statistics of the papers' workloads, and the same statistics of drawn requests."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from twolane.workload.traces import TraceRequest

TOLERANCE = 0.03
"""Relative tolerance between drawn and published means, medians and P90s."""


class Statistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of a length over all requests in tokens; None: not published."""

    minimum: float | None = None
    mean: float | None = None
    maximum: float | None = None
    median: float | None = None
    p90: float | None = None

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Statistics":
        """Return the statistics of these lengths."""
        median, p90 = np.percentile(lengths, [50, 90])
        return cls(min(lengths), float(np.mean(lengths)), max(lengths), float(median), float(p90))

    def misses(self, drawn: "Statistics") -> list[str]:
        """Return the published numbers that the drawn ones miss.

        Minimum and maximum bound; the others are met within `TOLERANCE`.
        """
        missed = []
        for name in ("mean", "median", "p90"):
            wanted, got = getattr(self, name), getattr(drawn, name)
            if wanted is not None and abs(got / wanted - 1) > TOLERANCE:
                missed.append(name)
        if self.minimum is not None and (drawn.minimum or 0) < self.minimum:
            missed.append("minimum")
        if self.maximum is not None and (drawn.maximum or 0) > self.maximum:
            missed.append("maximum")
        return missed


PUBLISHED = msgspec.toml.decode(
    Path(__file__).with_name("published.toml").read_bytes(), type=dict[str, dict[str, Statistics]]
)
"""Published statistics by workload and length: input, output, and reused."""


def reused_tokens(requests: Sequence[TraceRequest]) -> list[int]:
    """Return for each request, in order, the tokens of its leading blocks that earlier requests
    had.

    What a cache without bounds would find, as Mooncake and MuxWise count it.
    """
    seen: set[int] = set()
    reused = []
    for request in requests:
        known = 0
        for block in request.hash_ids:
            if block not in seen:
                break
            known += 1
        seen.update(request.hash_ids)
        reused.append(min(known * request.block_tokens, request.prompt_tokens))
    return reused


def statistics(requests: Sequence[TraceRequest]) -> dict[str, Statistics]:
    """Return statistics of the input, output and reused lengths of requests in order of arrival."""
    return {
        "input": Statistics.of([request.prompt_tokens for request in requests]),
        "output": Statistics.of([request.output_tokens for request in requests]),
        "reused": Statistics.of(reused_tokens(requests)),
    }
