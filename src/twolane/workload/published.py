"""Published statistics of the papers' workloads, and the same statistics of drawn requests."""

from collections.abc import Sequence

import msgspec
import numpy as np

from twolane.workload.papers import K
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


PUBLISHED: dict[str, dict[str, Statistics]] = {
    "sharegpt-1k": {
        "input": Statistics(4, 226, 1024),
        "output": Statistics(4, 195, 1838),
    },
    "loogle": {
        "input": Statistics(3380, 30 * K, 81 * K),
        "output": Statistics(2, 15, 326),
    },
    "openthoughts": {
        "input": Statistics(311, 709, 4633),
        "output": Statistics(684, 8374, 32 * K),
        "reused": Statistics(mean=243, maximum=243),
    },
    "conversation": {
        "input": Statistics(891, 7538 + 4496, 123 * K + K - 1),
        "output": Statistics(1, 342, 2000),
        "reused": Statistics(0, 4496, 120 * K),
    },
    "toolagent": {
        "input": Statistics(891, 8596, 123 * K + K - 1),
        "output": Statistics(1, 182, 2000),
        "reused": Statistics(0, 4905, 120 * K),
    },
    "arxiv-sum": {
        "input": Statistics(maximum=16 * K, median=7059, p90=12_985),
        "output": Statistics(median=208, p90=371),
    },
    "azure-code": {"input": Statistics(mean=2047), "output": Statistics(mean=28)},
    "azure-conv": {"input": Statistics(mean=1155), "output": Statistics(mean=211)},
}
"""Published statistics of each workload's lengths, in tokens. Their sources are those of
`papers.py`; Azure's are DuetServe, Table 1, and the traces."""


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
