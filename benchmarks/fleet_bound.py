"""Upper bounds on any router: `python benchmarks/fleet_bound.py [--replicas 4] [--out FILE]`.

A replica is reduced to one law: a prompt takes so many seconds by its new and reused tokens, what
waits goes by deadline, and where not all can be in time the longest are given up. The pace is that
of `fleet.py`, times a factor with which round robin has the goodput that it has there. *exact* is a
router that knows every queue as it is and sends a prompt where the fewest are given up, then where
queue and own work, which counts eight times, are least. *pooled* is no router: one server with the
speed of all, which finds every prefix that was ever sent, splits any prompt and puts it off at no
cost. What it cannot hold, no router can.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
from fleet import SLOS, searched

from twolane.engine.prompt_work import PromptPace, PromptWork
from twolane.results.provenance import provenance, save
from twolane.workload.published import reused_tokens
from twolane.workload.traces import TraceRequest

BOUND = SLOS["ttft"]
IN_TIME = 0.95
SLICE = 0.05
"""Seconds between two scheduling points of a server."""
PATIENCE = 2.0
"""A prompt is refused after this multiple of its bound, as by `auto`."""
OWN = 8.0
"""Weight of a prompt's own seconds relative to its waiting time, as in the router."""
PACES = {
    "conversation": (1.20, PromptPace(3.8e-3, 1.93e-5, 9.5e-10)),
    "toolagent": (1.05, PromptPace(0.5e-3, 2.36e-5, 9.8e-10)),
}
"""Factor and pace of each workload."""
RANGES = {"conversation": (30.0, 80.0), "toolagent": (60.0, 160.0)}
"""Range of the goodput search for four replicas, in requests per second."""


@dataclass(eq=False)
class Prompt:
    """A prompt at a server."""

    due: float
    left: float
    """Remaining seconds of computation."""
    begun: bool = False


def given_up(prompts: Sequence[Prompt], at: float) -> list[Prompt]:
    """Return the fewest prompts that must be late, from prompts in order of their deadlines."""
    late: list[Prompt] = []
    yielding: list[Prompt] = []
    for prompt in prompts:
        at += prompt.left
        if not prompt.begun:
            yielding.append(prompt)
        if at > prompt.due and yielding:
            longest = max(yielding, key=lambda each: each.left)
            yielding.remove(longest)
            late.append(longest)
            at -= longest.left
    return late


@dataclass(eq=False)
class Server:
    """A server with one prompt at a time."""

    prompts: list[Prompt] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    """Ids of the blocks sent to it."""
    at: float = 0.0
    in_time: int = 0

    def advance(self, until: float) -> None:
        """Serve until a time, or until nothing waits."""
        while self.prompts and self.at < until:
            late = given_up(self.prompts, self.at)
            over = [each for each in late if self.at > each.due + (PATIENCE - 1) * BOUND]
            self.prompts = [each for each in self.prompts if each not in over]
            if self.prompts:
                self._compute(min(self.prompts, key=lambda p: (p in late, not p.begun, p.due)))
        self.at = max(self.at, until) if not self.prompts else self.at

    def _compute(self, prompt: Prompt) -> None:
        seconds = min(SLICE, prompt.left)
        prompt.begun, prompt.left, self.at = True, prompt.left - seconds, self.at + seconds
        if prompt.left <= 0.0:
            self.prompts.remove(prompt)
            self.in_time += self.at <= prompt.due

    def reused(self, request: TraceRequest) -> int:
        """Return the tokens of the request's leading blocks that were sent to it before."""
        known = 0
        for block in request.hash_ids:
            if block not in self.blocks:
                break
            known += 1
        return min(known * request.block_tokens, request.prompt_tokens - 1)


class Offer(NamedTuple):
    """A server as a candidate for one request."""

    server: Server
    prompt: Prompt


Router = Callable[[Sequence[Offer], int], Offer]


def round_robin(offers: Sequence[Offer], index: int) -> Offer:
    """Choose the servers in turn."""
    return offers[index % len(offers)]


def exact(offers: Sequence[Offer], index: int) -> Offer:
    """See the module."""

    def cost(offer: Offer) -> tuple[int, float]:
        queue = [*offer.server.prompts, offer.prompt]
        late = given_up(queue, offer.server.at)
        before = len(given_up(offer.server.prompts, offer.server.at))
        kept = sum(each.left for each in queue if each not in late and each is not offer.prompt)
        return len(late) - before, kept + OWN * offer.prompt.left

    return min(offers, key=cost)


def seconds(dataset: str, request: TraceRequest, reused: int) -> float:
    """Return seconds that a request's prompt takes."""
    factor, pace = PACES[dataset]
    return factor * pace.seconds(PromptWork.of(request.prompt_tokens - reused, reused))


def routed(dataset: str, requests: Sequence[TraceRequest], replicas: int, router: Router) -> float:
    """Return the share of requests in time with a router."""
    servers = [Server() for _ in range(replicas)]
    for index, request in enumerate(requests):
        now = request.arrival or 0.0
        offers = []
        for server in servers:
            server.advance(now)
            own = seconds(dataset, request, server.reused(request))
            offers.append(Offer(server, Prompt(now + BOUND, own)))
        server, prompt = router(offers, index)
        server.prompts.append(prompt)
        server.blocks.update(request.hash_ids)
    for server in servers:
        server.advance(float("inf"))
    return sum(server.in_time for server in servers) / len(requests)


def pooled(dataset: str, requests: Sequence[TraceRequest], replicas: int) -> float:
    """Return the share of requests in time at one server with the speed of all."""
    prompts: list[Prompt] = []
    now, lost = 0.0, 0
    for request, known in zip(requests, reused_tokens(requests), strict=True):
        spare, now = (request.arrival or 0.0) - now, request.arrival or 0.0
        while prompts and spare > 0.0:
            done = min(spare, prompts[0].left)
            prompts[0].left -= done
            spare -= done
            if prompts[0].left <= 0.0:
                del prompts[0]
        known = min(known, request.prompt_tokens - 1)
        prompts.append(Prompt(now + BOUND, seconds(dataset, request, known) / replicas))
        late = given_up(prompts, now)
        lost += len(late)
        prompts = [each for each in prompts if each not in late]
    return 1 - lost / len(requests)


def goodput(dataset: str, seed: int, options: argparse.Namespace, share: Callable) -> float:
    """Return the highest rate at which the fraction `share` is `IN_TIME`, to 0.5 %."""
    low, high = (each * options.replicas / 4 for each in RANGES[dataset])
    spec = searched(dataset, options.replicas, options.requests, 1.0).workload
    while high > 1.005 * low:
        rate = (low + high) / 2
        workload = msgspec.structs.replace(spec, request_rate=rate, seed=seed)
        if share(dataset, workload.build(), options.replicas) >= IN_TIME:
            low = rate
        else:
            high = rate
    return low


WAYS: dict[str, Callable] = {
    "round-robin": lambda *about: routed(*about, round_robin),
    "exact": lambda *about: routed(*about, exact),
    "pooled": pooled,
}


def main() -> None:
    """Search all and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", nargs="+", choices=PACES, default=list(PACES))
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=700)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for dataset in options.dataset:
        found[dataset] = {}
        for way, share in WAYS.items():
            rates = [goodput(dataset, seed, options, share) for seed in range(options.seeds)]
            found[dataset][way] = rates
            print(f"{dataset} {way}: mean {statistics.fmean(rates):.1f}/s of {rates}", flush=True)
    if options.out is not None:
        save(options.out, provenance(vars(options) | {"out": None}), {"goodput": found})


if __name__ == "__main__":
    main()
