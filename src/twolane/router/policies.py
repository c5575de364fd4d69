"""Routing policies by name: Twolane's own and those that it is compared with."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from twolane.router.choose import Chosen, NoReplica, choose
from twolane.router.state import RoutedRequest
from twolane.router.table import ReplicaView

MAX_LANDMARKS = 1 << 17
"""Most landmarks in a replica's tree, since clients choose how many prompts there are."""

IMBALANCE = 10
"""Difference of open requests from which the load counts as uneven, Ray's default."""
MIN_MATCH = 0.1
"""Least share of the prompt that must match, Ray's default."""


class Policy(Protocol):
    """A routing policy; `views` are in order of their names."""

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> Chosen | NoReplica:
        """Return the replica for one request, which is then sent there."""


class RoundRobin:
    """Sends requests to the replicas in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> Chosen | NoReplica:
        """See `Policy`."""
        self._turn += 1
        return _picked(views, lambda: views[self._turn % len(views)])


class PowerOfTwo:
    """Sends a request to the less loaded of two random replicas (Mitzenmacher 2001)."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> Chosen | NoReplica:
        """See `Policy`."""
        return _picked(views, lambda: self.pick(views))

    def pick(self, views: Sequence[ReplicaView]) -> ReplicaView:
        """Return the one of two random replicas with fewer open requests."""
        return min(self._random.sample(views, min(2, len(views))), key=lambda view: view.open)


class LeastLoaded:
    """Sends a request to the replica with the fewest open requests."""

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> Chosen | NoReplica:
        """See `Policy`."""
        return _picked(views, lambda: min(views, key=lambda view: (view.open, -view.passed_over)))


class RayPrefixAware:
    """Ray Serve LLM's `PrefixCacheAffinityRouter` as its documentation describes it.

    While the numbers of open requests differ by less than `IMBALANCE`, the replica that was sent
    most of the prompt's beginning gets it, if that is at least `MIN_MATCH` of the prompt; else
    the replica whose tree is smallest. Otherwise power of two choices. Its tree holds what was
    sent, not what replicas still have; here in landmarks (docs.ray.io, "PrefixCacheAffinityRouter
    for LLM inference optimization").

    Args:
        most: landmarks of a replica; beyond, those that were put in first are forgotten.
    """

    def __init__(self, most: int = MAX_LANDMARKS) -> None:
        self._two = PowerOfTwo()
        self._trees: dict[str, dict[int, int]] = {}
        """By replica: the landmarks sent to it, with the tokens between each and the one before."""
        self._sizes: dict[str, int] = {}
        self._most = most

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> Chosen | NoReplica:
        """See `Policy`."""
        chosen = _picked(views, lambda: self._pick(request, views))
        if isinstance(chosen, Chosen):
            self._insert(chosen.name, request)
        return chosen

    def _pick(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> ReplicaView:
        loads = [view.open for view in views]
        if max(loads) - min(loads) >= IMBALANCE:
            return self._two.pick(views)
        matched = [self._matched(view.name, request) for view in views]
        longest = max(matched)
        if longest >= MIN_MATCH * request.prompt_tokens:
            best = [view for view, found in zip(views, matched, strict=True) if found == longest]
        else:
            sizes = [self._sizes.get(view.name, 0) for view in views]
            best = [view for view, size in zip(views, sizes, strict=True) if size == min(sizes)]
        return self._two.pick(best)

    def _matched(self, name: str, request: RoutedRequest) -> int:
        tree, matched = self._trees.get(name, {}), 0
        for tokens, landmark in zip(*request.landmarks[:2], strict=True):
            if landmark not in tree:
                break
            matched = tokens
        return matched

    def _insert(self, name: str, request: RoutedRequest) -> None:
        tree, before = self._trees.setdefault(name, {}), 0
        for tokens, landmark in zip(*request.landmarks[:2], strict=True):
            if landmark not in tree:
                tree[landmark] = tokens - before
                self._sizes[name] = self._sizes.get(name, 0) + tree[landmark]
            before = tokens
        while len(tree) > self._most:
            self._sizes[name] -= tree.pop(next(iter(tree)))


def _picked(views: Sequence[ReplicaView], pick: Callable[[], ReplicaView]) -> Chosen | NoReplica:
    if not views:
        return NoReplica(1, "no replica is ready")
    view = pick()
    return Chosen(view.name, 0.0, view.reused)


POLICIES: dict[str, Callable[[], Policy]] = {
    "predicted": lambda: choose,
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "least-loaded": LeastLoaded,
    "ray-prefix": RayPrefixAware,
}
"""Constructors of policies by name."""
