"""Metrics of a run, by formula.

For a request that was answered in full, with s when it was sent, c_1 … c_m when its chunks with
output came, e the last event of its stream and k its output tokens:

    TTFT = c_1 − s      TBT_i = c_(i+1) − c_i      E2E = e − s      TPOT = (E2E − TTFT) / (k − 1)

TBT is what vLLM calls ITL. A server that sends several tokens in a chunk has fewer and longer
gaps; `tokens_per_chunk` shows it, and TPOT is not affected.

Latency statistics are over the requests that were answered, attainment and goodput over those
that were *sent*: a request that was refused, broke off or was cut short by the user attains
nothing. A gap is owed for each token asked after the first; a failed request owes those gaps (or
as many as it had, if more) and met none of them, an answered one owes the gaps that it had.

An empty set has no statistics: they are None, not 0.

With a playout buffer, first tokens and gaps are also computed as its client shows them
(`twolane.playout`), token by token. A rate can last if requests end as fast as they arrive, from
the end of the warm-up (the longest E2E) to the last arrival.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from twolane.playout import shown
from twolane.results.record import Record

SLO_NAMES = ("ttft", "tbt", "tpot", "e2el")
"""Names of SLOs: vLLM's, and `tbt` for every gap of a request."""
TTFT_PER_1K = "ttft_per_1k"
"""Name of the seconds added to the bound `ttft` for each 1,024 prompt tokens that are not in the
server's prefix cache (Drift §5.1: 1 s)."""
DEFAULT_PERCENTILES = (90.0, 95.0, 99.0)
ROUNDING = 1e-9
"""Seconds by which a latency may exceed its bound, since sums of times are rounded."""
LAG_PERCENTILES = (99.0,)
"""Percentiles of the client's own lags."""


class Distribution(msgspec.Struct, frozen=True):
    """Statistics of a set of values, in the unit of the values (seconds, in this package)."""

    count: int
    mean: float | None
    median: float | None
    std: float | None
    max: float | None
    percentiles: dict[float, float | None]

    @classmethod
    def of(cls, values: Iterable[float], percentiles: Sequence[float]) -> "Distribution":
        """Return the statistics; percentiles are interpolated linearly, `std` is the
        population's."""
        data = np.fromiter(values, dtype=float)
        if not data.size:
            return cls(0, None, None, None, None, dict.fromkeys(percentiles))
        return cls(
            count=data.size,
            mean=float(data.mean()),
            median=float(np.median(data)),
            std=float(data.std()),
            max=float(data.max()),
            percentiles={p: float(np.percentile(data, p)) for p in percentiles},
        )


class Attainment(msgspec.Struct, frozen=True):
    """SLO attainment of the requests sent; None: none was sent or had a bound."""

    requests: dict[str, float | None]
    """Share of requests sent that were answered and met the SLO, by SLO."""
    together: float | None
    """Share of requests sent that met all SLOs."""
    gaps: float | None
    """Share of the gaps owed to all requests sent that met the TBT bound."""
    good: int
    """Number of requests that met all SLOs."""


class Playout(msgspec.Struct, frozen=True):
    """Latencies as a client with a playout buffer shows them."""

    ttft: Distribution
    tbt: Distribution
    attainment: Attainment
    uncounted: int
    """Number of answers in which a chunk of several tokens may count as one, since the server does
    not tell how many it has."""


class Steady(msgspec.Struct, frozen=True):
    """What arrived and ended between the end of the warm-up and the last arrival of a run."""

    seconds: float
    """Time between the two."""
    arrived: float
    """Requests sent per second."""
    finished: float
    """Requests answered per second."""


class Metrics(msgspec.Struct, frozen=True):
    """Metrics of a run of `duration` seconds."""

    duration: float
    sent: int
    completed: int
    outcomes: dict[str, int]
    """Number of requests sent by outcome."""
    input_tokens: int
    """Number of prompt tokens of completed requests."""
    cached_tokens: int
    """Number of input tokens from the prefix cache, as the server reports."""
    output_tokens: int
    uncounted: int
    """Number of completed requests without the server's count of output tokens, whose chunks count
    instead."""
    tokens_per_chunk: float | None
    ttft: Distribution
    tpot: Distribution
    tbt: Distribution
    e2e: Distribution
    waited: Distribution
    """Seconds that requests sent were held back by the bound on concurrency."""
    lag: Distribution
    """Seconds that requests were sent late by the client's own fault."""
    max_concurrent: int
    max_output_tokens_per_s: float
    """Largest number of output tokens in one second of the run."""
    attainment: Attainment
    steady: Steady | None
    """None: the last request was sent before the first ones could have ended."""
    shown: Playout | None
    """None: there is no playout buffer."""

    def per_second(self, amount: float) -> float | None:
        """Return `amount` per second of the run."""
        return amount / self.duration if self.duration > 0 else None


def measure(
    records: Sequence[Record],
    duration: float,
    slos: Mapping[str, float],
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    playout: float = 0.0,
) -> Metrics:
    """Return the metrics of a run.

    Args:
        records: A record for each request sent.
        duration: Seconds from the start of the run to its last outcome.
        slos: Bounds in seconds by name, of `SLO_NAMES`; `TTFT_PER_1K` beside `ttft`.
        percentiles: Percentiles of each distribution, in percent.
        playout: Longest time in seconds for which a client holds a token back; 0 is no buffer.
    """
    done = [record for record in records if record.ok]
    chunks = sum(len(record.token_times) for record in done)
    tokens = sum(record.output_tokens for record in done)

    def spread(values: Iterable[float | None]) -> Distribution:
        return Distribution.of((value for value in values if value is not None), percentiles)

    return Metrics(
        duration=duration,
        sent=len(records),
        completed=len(done),
        outcomes=Counter(record.outcome for record in records),
        input_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.usage_cached or 0 for record in done),
        output_tokens=tokens,
        uncounted=sum(record.usage_output is None for record in done),
        tokens_per_chunk=tokens / chunks if chunks else None,
        ttft=spread(record.ttft for record in done),
        tpot=spread(record.tpot for record in done),
        tbt=spread(gap for record in done for gap in record.gaps),
        e2e=spread(record.e2e for record in done),
        waited=spread(record.waited for record in records),
        lag=Distribution.of((record.lag for record in records), LAG_PERCENTILES),
        max_concurrent=max_concurrent(records),
        max_output_tokens_per_s=max_output_rate(done),
        attainment=attain(records, slos),
        steady=steady(records),
        shown=_shown(records, slos, percentiles, playout) if playout else None,
    )


def steady(records: Sequence[Record]) -> Steady | None:
    """Return what arrived and ended from the longest E2E of the run to its last arrival."""
    done = [record for record in records if record.ok]
    begin = max((record.e2e for record in done), default=0.0)
    end = max((record.sent for record in records), default=0.0)
    if end <= begin or not done:
        return None
    arrived = sum(begin < record.sent <= end for record in records)
    finished = sum(begin < record.ended <= end for record in done)
    return Steady(end - begin, arrived / (end - begin), finished / (end - begin))


def as_shown(record: Record, slos: Mapping[str, float], playout: float) -> Record:
    """Return the record of a client that shows tokens with a playout buffer.

    Args:
        record: The record of a client that shows tokens as they arrive.
        slos: Bounds in seconds by name, that of `tbt` among them.
        playout: Longest time in seconds for which a token is held back.
    """
    deadline = None
    if "ttft" in slos:
        deadline = record.sent + bound_for(record.new_tokens, "ttft", slos)
    times = shown(record.arrivals, slos["tbt"], playout, deadline)
    ended = max([record.ended, *times[-1:]])
    return msgspec.structs.replace(record, token_times=tuple(times), chunk_tokens=(), ended=ended)


def _shown(
    records: Sequence[Record],
    slos: Mapping[str, float],
    percentiles: Sequence[float],
    playout: float,
) -> Playout:
    played = [as_shown(record, slos, playout) for record in records]
    done = [record for record in played if record.ok]
    firsts = [record.ttft for record in done if record.ttft is not None]
    return Playout(
        ttft=Distribution.of(firsts, percentiles),
        tbt=Distribution.of((gap for record in done for gap in record.gaps), percentiles),
        attainment=attain(played, slos),
        uncounted=sum(record.ok and not record.counted for record in records),
    )


def attain(records: Sequence[Record], slos: Mapping[str, float]) -> Attainment:
    """Return the attainment of each SLO, of all of them, and of TBT by gap."""
    names = bounded(slos)
    kept = [
        {name: keeps(record, name, bound_for(record.new_tokens, name, slos)) for name in names}
        for record in records
    ]
    good = sum(all(one.values()) for one in kept) if slos else 0
    sent = len(records)
    return Attainment(
        requests={name: sum(k[name] for k in kept) / sent if sent else None for name in names},
        together=good / sent if sent and slos else None,
        gaps=gap_attainment(records, slos["tbt"]) if "tbt" in slos else None,
        good=good,
    )


def bounded(slos: Mapping[str, float]) -> list[str]:
    """Return the names of the latencies that these SLOs bound."""
    return [name for name in slos if name != TTFT_PER_1K]


def bound_for(new_tokens: int, name: str, slos: Mapping[str, float]) -> float:
    """Return the bound in seconds on a latency of a request with this many new prompt tokens."""
    more = slos.get(TTFT_PER_1K, 0.0) * new_tokens / 1024 if name == "ttft" else 0.0
    return slos[name] + more


def bound_words(name: str, slos_ms: Mapping[str, float]) -> str:
    """Return a bound as text; `slos_ms` in milliseconds."""
    more = slos_ms.get(TTFT_PER_1K) if name == "ttft" else None
    return f"{slos_ms[name]:g} ms" + (f" + {more:g} per 1K new tokens" if more else "")


def bounds_words(slos: Mapping[str, float]) -> str:
    """Return all bounds as text; `slos` in seconds."""
    in_ms = {name: bound * 1e3 for name, bound in slos.items()}
    return ", ".join(f"{name} {bound_words(name, in_ms)}" for name in bounded(in_ms))


def keeps(record: Record, slo: str, bound: float) -> bool:
    """Return whether a request was answered and met one SLO; `bound` in seconds.

    `tbt` bounds each gap. A reply of one token has no gap and no TPOT to miss.
    """
    if not record.ok:
        return False
    values: dict[str, float | None] = {
        "ttft": record.ttft,
        "tbt": max(record.gaps, default=0.0),
        "tpot": record.tpot or 0.0,
        "e2el": record.e2e,
    }
    value = values[slo]
    return value is not None and value <= bound + ROUNDING


def gap_attainment(records: Sequence[Record], bound: float) -> float | None:
    """Return Σ gaps of answered requests ≤ bound / Σ gaps owed to all requests sent; bound in
    seconds."""
    met = owed = 0
    for record in records:
        gaps = record.gaps
        if record.ok:
            owed += len(gaps)
            met += sum(gap <= bound + ROUNDING for gap in gaps)
        else:
            owed += max(record.asked_output - 1, len(gaps))
    return met / owed if owed else None


def max_concurrent(records: Sequence[Record]) -> int:
    """Return the largest number of concurrent requests; one that ends when another is sent does not
    overlap it."""
    changes = sorted(
        [(record.sent, 1) for record in records] + [(record.ended, -1) for record in records]
    )
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def max_output_rate(records: Sequence[Record]) -> float:
    """Return the largest number of output tokens in one whole second of the run.

    The tokens of an answer are spread evenly over its chunks.
    """
    seconds: dict[int, float] = {}
    for record in records:
        for at in record.token_times:
            share = record.output_tokens / len(record.token_times)
            seconds[math.floor(at)] = seconds.get(math.floor(at), 0.0) + share
    return max(seconds.values(), default=0.0)
