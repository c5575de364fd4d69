"""The `predicted` policy: the replica with the earliest first token at the least cost to others.

A pure function of what is known of the replicas. It predicts the time to the first token at each
replica: the prompts that are kept before this one and what is new of it, by the replica's own
measured speed. A prompt that is in time only if a longer one is given up for it goes to a replica
that need not do so, if there is one.
Computing a prefix that another replica has also delays those who come later, so a request's own
computation counts more, the more prompts wait at every replica.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from twolane.engine.prompt_work import UNKNOWN, PromptPace, PromptWork
from twolane.router.state import RoutedRequest
from twolane.router.table import PAGES_COST, ReplicaView

FAIR_TURNS = 8
"""A replica in time gets a request at the latest after this many requests per replica went
elsewhere."""
REFERENCE_PROMPT = PromptWork.of(1024, 0)
"""Prompt by which replicas' paces are compared."""
RETRY_SECONDS = (1, 60)
"""Bounds on the whole seconds of a refusal's Retry-After."""


class Chosen(NamedTuple):
    """The replica chosen for a request."""

    name: str
    ttft: float
    """Predicted seconds to the first token; 0: not known."""
    reused: int
    """Prompt tokens in the replica's prefix cache."""


class NoReplica(NamedTuple):
    """A refusal: no replica can answer in time."""

    retry_after: int
    """Whole seconds after which to try again."""
    reason: str


class _Estimate(NamedTuple):
    view: ReplicaView
    ttft: float
    """Seconds to the first token."""
    cost: float
    """Cost that the choice minimises, in seconds."""
    displaces: bool = False
    """Whether the replica would give up a longer prompt for this one."""

    @property
    def late(self) -> float:
        """Seconds by which the first token would come after its bound, as far as known."""
        return self.view.correction * self.ttft - (self.view.ttft or math.inf)

    @property
    def in_time(self) -> bool:
        """Whether the first token would be in time, or no prompt waits at the replica."""
        return not self.view.queued.prompts or self.late <= 0


def choose(request: RoutedRequest, views: Sequence[ReplicaView]) -> Chosen | NoReplica:
    """Return the replica for a request, or a refusal.

    Args:
        request: the request.
        views: the replicas that could be sent it, as `Table.candidates` gives them.
    """
    if not views:
        return NoReplica(RETRY_SECONDS[0], "no replica is ready")
    usual, work = _usual_pace(views), _work_weight(views)
    estimates = [_estimate(request, view, view.pace or usual, work) for view in views]
    in_time = [each for each in estimates if each.in_time]
    if not in_time:
        return _refusal(estimates)
    if starved := [each for each in in_time if each.view.passed_over >= FAIR_TURNS]:
        return _chosen(max(starved, key=lambda each: each.view.passed_over))
    candidates = [each for each in in_time if not each.displaces] or in_time
    best = min(candidates, key=_by_cost)
    for each in candidates:
        # A session stays at its replica while the cost there exceeds the lowest by at most
        # a twentieth.
        if each.view.home and each.cost <= 1.05 * best.cost:
            return _chosen(each)
    return _chosen(best)


def _usual_pace(views: Sequence[ReplicaView]) -> PromptPace:
    """Return the median pace of the replicas whose pace is known."""
    known = [view.pace for view in views if view.pace]
    known.sort(key=lambda pace: pace.seconds(REFERENCE_PROMPT))
    return known[len(known) // 2] if known else UNKNOWN


def _work_weight(views: Sequence[ReplicaView]) -> float:
    """Return the weight of own prefill time: 1 while a replica is idle, and more as prompts queue
    everywhere, which it delays."""
    # Largest weight of a request's own prefill time relative to its waiting time.
    return min(8.0, 1.0 + min(view.queued.prompts for view in views))


def _estimate(
    request: RoutedRequest, view: ReplicaView, pace: PromptPace, work: float
) -> _Estimate:
    new = max(1, request.prompt_tokens - view.reused)
    missing = -(-(new + request.output_tokens) // view.page_size) - view.pages_free
    freed = max(0, missing) * view.page_size  # tokens of others, which must leave first
    if not pace:  # nothing was computed anywhere yet: the fewest tokens, then requests
        return _Estimate(view, 0.0, view.queued.tokens + freed + new + view.open)
    own = pace.seconds(PromptWork.of(new, view.reused))
    wait = pace.seconds(view.queued) if view.wait is None else view.wait
    wait += freed * pace.token
    displaces = view.ttft is not None and wait + own > view.ttft and view.longest > own
    if displaces:
        wait -= view.longest
    used = 1 - view.pages_free / view.pages if view.pages else 0.0
    cost = wait + work * own + PAGES_COST * max(0.0, used)
    return _Estimate(view, wait + own, cost, displaces)


def _by_cost(estimate: _Estimate) -> tuple[float, int, float]:
    return estimate.cost, estimate.view.open, -estimate.view.passed_over


def _chosen(estimate: _Estimate) -> Chosen:
    return Chosen(estimate.view.name, estimate.ttft, estimate.view.reused)


def _refusal(estimates: Sequence[_Estimate]) -> NoReplica:
    late = min(each.late for each in estimates)
    least, most = RETRY_SECONDS
    seconds = min(most, max(least, math.ceil(late)))
    return NoReplica(seconds, f"the first token would come {late:.1f} s later than its bound")
