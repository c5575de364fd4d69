"""Several replicas and a router on one virtual clock.

Each replica is a real engine on simulated lanes with a clock of its own; the replica whose next
event is earliest moves first, so that nothing happens out of order. A router sees what replicas
published at their last turn, as a real one does.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from twolane.common.errors import FieldError
from twolane.common.garbage import gc_disabled
from twolane.engine.build import Built, assemble
from twolane.engine.kv.prefix_digest import Landmarks, PrefixBook
from twolane.engine.loop import turn
from twolane.engine.messages import Outputs, Refused, Submit, ToEngine
from twolane.results.record import Record
from twolane.results.result import Result
from twolane.router.choose import Chosen
from twolane.router.policies import POLICIES, Policy
from twolane.router.state import ReplicaState, RoutedRequest
from twolane.router.table import SentRequest, Table
from twolane.sampling import SamplingParams
from twolane.sim.config import SimulateConfig
from twolane.sim.lanes import SimLanes
from twolane.sim.machine import SimulatedMachine
from twolane.sim.profile import simulated_profile
from twolane.sim.run import Ledger, shapes_of
from twolane.workload.prompts import PromptMaker
from twolane.workload.traces import TraceRequest

Hear = Callable[[float, Outputs], None]


@dataclass(frozen=True)
class FleetRun:
    """Result of a simulation of several replicas."""

    result: Result
    hit_rate: float
    """Hit rate of all prefix caches in prompt tokens."""
    sent: dict[str, int]
    """Number of requests by replica."""
    refused: int
    """Number of requests that the router refused."""


class SimReplica:
    """An engine on simulated lanes whose clock is moved from outside.

    Args:
        name: Name of the replica.
        built: The replica's engine.
        hear: gets its news with their times.
    """

    def __init__(self, name: str, built: Built, hear: Hear) -> None:
        assert isinstance(built.lanes, SimLanes)
        self.name = name
        self.built = built
        self.wakes_at: float | None = None
        """Virtual time of the next event in seconds; None: there is none."""
        self._lanes = built.lanes
        self._hear = hear
        self._book = PrefixBook(built.engine.state.kv.page_size)

    def move(self, now: float, messages: Sequence[ToEngine] = ()) -> None:
        """Advance the replica to a time, and run its loop until it waits."""
        self._lanes.advance(now)
        while (idle := turn(self.built.engine, messages, self._send)) is None:
            messages = ()
        event = self._lanes.next_event()
        alone = event is None  # a wake-up alone changes nothing that a system can see
        times = [at for at in (event, idle.wake_at) if at is not None and not alone]
        self.wakes_at = min(times) if times else None

    def state(self, known: int) -> ReplicaState:
        """Return the replica's published state.

        Args:
            known: version of the digest that the router has.
        """
        return ReplicaState.of(self.built.ready, self.built.engine.stats(), self._book, known)

    def _send(self, news: Outputs) -> None:
        if news.landmarks:
            self._book.change(news.landmarks)
        self._hear(self._lanes.clock(), news)


class FleetSimulation:
    """Replicas, a router and a workload.

    Args:
        config: Settings of each replica and of the workload.
        replicas: their number.
        policy: the router.
        requests: The workload's requests, in order of arrival.
        ledger: keeps what came of them.
    """

    def __init__(
        self,
        config: SimulateConfig,
        replicas: int,
        policy: Policy,
        requests: Sequence[TraceRequest],
        ledger: Ledger,
    ) -> None:
        self.replicas = [
            SimReplica(f"replica-{i:03}", built, self._hear)
            for i, built in enumerate(_engines(config, replicas))
        ]
        self.refused = 0
        self.sent = dict.fromkeys((each.name for each in self.replicas), 0)
        self.stopped = False
        self.now = 0.0
        self._by_name = {each.name: each for each in self.replicas}
        self._policy = policy
        self._requests = requests
        self._ledger = ledger
        self._prompts = PromptMaker(config.bench.vocab_range, config.bench.workload.seed)
        self._table = Table()
        self._versions: dict[str, int] = {}
        self._at: dict[str, tuple[str, SentRequest]] = {}
        """Open requests: replica, and the router's record."""

    @property
    def hit_rate(self) -> float | None:
        """Hit rate of the prefix caches in prompt tokens; None: none was looked up."""
        stats = [replica.built.engine.stats() for replica in self.replicas]
        queries = sum(each.prefix_queries for each in stats)
        return sum(each.prefix_hits for each in stats) / queries if queries else None

    def run(self) -> None:
        """Serve all requests, or until `stopped`."""
        events = [(each.arrival or 0.0, i) for i, each in enumerate(self._requests)]
        moving: list[tuple[float, str]] = []
        publish_at = 0.0
        while not self.stopped:
            arrival = events[0][0] if events else None
            wake = moving[0][0] if moving else None
            if arrival is None and wake is None:
                return
            soonest = min(at for at in (arrival, wake) if at is not None)
            if arrival is not None and publish_at <= soonest:
                self.now = publish_at
                self._publish(publish_at)
                # Seconds between two polls of each replica's state.
                publish_at += 0.1
                continue
            self.now = soonest
            if wake == soonest:
                at, name = heapq.heappop(moving)
                replica = self._by_name[name]
                if replica.wakes_at != at:
                    continue  # it was moved meanwhile
                replica.move(at)
            else:
                _, index = heapq.heappop(events)
                sent = self._arrive(soonest, index)
                if sent is None:
                    continue
                replica = sent
            if replica.wakes_at is not None:
                heapq.heappush(moving, (replica.wakes_at, replica.name))

    def _publish(self, now: float) -> None:
        for replica in self.replicas:
            state = replica.state(self._versions.get(replica.name, -1))
            if state.digest is not None:
                self._versions[replica.name] = state.digest.version
            self._table.publish(replica.name, state, now)

    def _arrive(self, now: float, index: int) -> SimReplica | None:
        """Route a request; return its replica."""
        request = self._requests[index]
        prompt = self._prompts.token_ids(index, request)
        ready = self.replicas[0].built.ready
        landmarks = Landmarks.of(prompt, ready.page_size, states=ready.state_bytes > 0)
        routed = RoutedRequest(len(prompt), request.output_tokens, landmarks)
        choice = self._policy(routed, self._table.views(routed, now))
        if not isinstance(choice, Chosen):
            self.refused += 1
            problem = Refused(str(index), "refused", choice.reason)
            self._ledger.hear(now, Outputs([], [problem], self.replicas[0].built.engine.stats()))
            return None
        sent = self._table.sent(choice.name, routed, now)
        self.sent[choice.name] += 1
        self._at[str(index)] = choice.name, sent
        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0)
        replica = self._by_name[choice.name]
        replica.move(now, [Submit(str(index), prompt, params)])
        return replica

    def _hear(self, at: float, news: Outputs) -> None:
        ended = [output.id for output in news.outputs if output.finish is not None]
        for request in (*ended, *(refused.id for refused in news.refused)):
            self._table.ended(*self._at.pop(request))
        self._ledger.hear(at, news)


def _engines(config: SimulateConfig, replicas: int) -> list[Built]:
    """Return engines of equal replicas with different device noise."""
    gpu, spec = config.device(), shapes_of(config.engine)
    profile = config.engine.profile or str(simulated_profile(gpu, spec, config.tp, config.engine))
    engine = msgspec.structs.replace(config.engine, profile=profile)
    seed = config.bench.workload.seed
    machines = (
        SimulatedMachine(gpu, spec, config.engine, tp=config.tp, seed=seed + i)
        for i in range(replicas)
    )
    return [
        assemble(engine, machine, lambda: None, lambda stage, fraction: None)
        for machine in machines
    ]


def simulate_fleet(
    config: SimulateConfig,
    replicas: int,
    router: str,
    requests: Sequence[TraceRequest],
    on_record: Callable[[Record], bool] = lambda record: False,
    on_tokens: Callable[[int, Sequence[float], int], bool] = lambda index, times, new: False,
    policy: Policy | None = None,
) -> FleetRun:
    """Simulate several replicas; the same arguments give the same result.

    Args:
        config: Settings of each replica; the workload's seed decides about prompts and noise.
        replicas: their number.
        router: name in `router.policies.POLICIES`.
        requests: The workload's requests, in order of arrival.
        on_record: see `sim.run.simulate`, as for `on_tokens`.
        policy: a router to use instead of the named one.

    Raises:
        FieldError: a setting is wrong.
    """
    config.check()
    if router not in POLICIES:
        raise FieldError("router", f"{router!r} is unknown; there are: {', '.join(POLICIES)}")
    if replicas < 1:
        raise FieldError("replicas", f"must be positive, not {replicas}")
    ledger = Ledger(requests, on_record, on_tokens)
    fleet = FleetSimulation(config, replicas, policy or POLICIES[router](), requests, ledger)
    ledger.stop = lambda: setattr(fleet, "stopped", True)
    try:
        with gc_disabled():
            fleet.run()
    finally:
        for replica in fleet.replicas:
            replica.built.close()
    if ledger.stopped:
        ledger.interrupt(fleet.now)
    rate = fleet.hit_rate
    simulated = {
        "router": router,
        "replicas": replicas,
        "gpu": config.gpu,
        "prefix_hit_rate": rate,
        "sent": fleet.sent,
        "refused": fleet.refused,
    }
    result = ledger.result(config, simulated)
    return FleetRun(result, rate or 0.0, fleet.sent, fleet.refused)
