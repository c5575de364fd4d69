"""The time between two tokens that is planned for."""

from collections.abc import Sequence
from dataclasses import dataclass

from twolane.estimate.query import Load, decode_step
from twolane.playout import SHORT_BOUND
from twolane.systems.rows import RowTable
from twolane.systems.view import RequestView, View

DEFAULT_TBT_SECONDS = 0.05
"""The TBT in seconds that is planned for where no SLO bounds it."""
DEFAULT_TBT_STEPS = 4
"""The TBT that is planned for without an SLO is at least this many decode steps on the whole
device."""
USABLE_SLACK_FRACTION = 0.33
"""This fraction of the time for which tokens are held back is added to the TBT SLO. The rest is for
launches that take longer than predicted; once it is used up, every request is late."""

MAX_RESERVE_SECONDS, RESERVE_FRACTION = 0.006, 0.3
"""Slack that is never planned with: this many seconds, but at most this fraction of the bound."""


@dataclass(frozen=True, slots=True)
class TbtTarget:
    """Seconds between two tokens."""

    bound: float
    """The tightest SLO that can be kept."""
    planned: float
    """TBT that is planned for."""
    latest: float
    """Seconds after which the next token is late: the bound and the slack of held tokens."""


def target_tbt(
    view: View, joining: Sequence[RequestView], step: float | None, fraction: float
) -> TbtTarget:
    """Return what to plan for.

    Args:
        view: The engine's view.
        joining: the requests that will decode after their prompt, besides those that do.
        step: a bound on the seconds of the decode step of all on the whole device, if known.
        fraction: the margin's.
    """
    rows = view.decode_rows
    bound = _tightest_bound(view, rows, joining, step)
    latest = rows.latest(bound)
    latest = bound if latest is None else latest
    usable = USABLE_SLACK_FRACTION * max(0.0, latest - bound - _reserve(bound))
    planned = fraction * (bound + usable)
    return TbtTarget(bound, planned, latest)


def _reserve(bound: float) -> float:
    """Return the slack in seconds that is left for launches that stall and late deliveries."""
    return min(MAX_RESERVE_SECONDS, RESERVE_FRACTION * bound) if bound >= SHORT_BOUND else 0.0


def _tightest_bound(
    view: View, rows: RowTable, joining: Sequence[RequestView], step: float | None
) -> float:
    """Return the tightest bound among the rows that decode alone can keep, in seconds.

    A bound that even one of them alone on the whole device could not keep is ignored. One that
    fewer of them could keep is not, so that no request joins them.
    """
    asked = [_slo(request) for request in joining]
    bounds = [*rows.bounds.tolist(), *(bound for bound in asked if bound is not None)]
    kept = [bound for bound in bounds if not step or bound >= step]
    if bounds and not kept:
        one = Load.decode([min(rows.load(joining).r)])
        least = view.estimator.predict(decode_step(one), view.units, bound=True)
        kept = [bound for bound in bounds if not least or bound >= least]
    return min(kept, default=max(DEFAULT_TBT_SECONDS, DEFAULT_TBT_STEPS * (step or 0.0)))


def _slo(request: RequestView) -> float | None:
    """Return the request's TBT bound in seconds, or its TPOT bound if it has none."""
    return request.slo.tpot if request.slo.tbt is None else request.slo.tbt
