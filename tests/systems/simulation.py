"""The engine on simulated lanes, with every launch on record."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.sim.durations import FixedDurations
from twolane.devices import LaneName
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.loop import run
from twolane.engine.messages import Launched, Output, Outputs, Refused, Submit, ToEngine
from twolane.engine.pacing import Pacer
from twolane.engine.state import State
from twolane.engine.trace import Trace
from twolane.estimate.base import Estimator
from twolane.estimate.online import OnlineEstimator
from twolane.kernels.sizes import SIZES
from twolane.sampling import SamplingParams
from twolane.sim.lanes import SimLanes
from twolane.sim.port import SimPort
from twolane.slo import Slo
from twolane.systems.base import System

LAYERS = 8
UNITS = 132
LEVELS = ((100, 32), (84, 48), (66, 66))


@dataclass
class Ran:
    """A launch as the trace shows it."""

    lane: LaneName
    name: str
    start: float
    end: float
    units: int
    requests: list[str]
    tokens: int
    reason: str

    def overlaps(self, other: "Ran") -> bool:
        return self.start < other.end and other.start < self.end


@dataclass
class Record(Trace):
    """Keeps launches and request events instead of writing them."""

    silent = False

    launches: list[Ran] = field(default_factory=list)
    events: list[tuple[str, str, float]] = field(default_factory=list)
    ends: dict[str, tuple[str, int]] = field(default_factory=dict)
    """(reason, tokens) by request."""

    def launch(self, lane: LaneName, name: str, start: float, end: float, **args: Any) -> None:
        self.launches.append(
            Ran(
                lane,
                name,
                round(start, 6),
                round(end, 6),
                args["units"],
                args["requests"],
                args["tokens"],
                args["reason"],
            )
        )

    def request_event(self, request: str, name: str, at: float, **args: Any) -> None:
        self.events.append((request, name, at))

    def request_end(self, request: str, at: float, reason: str, tokens: int) -> None:
        self.ends[request] = reason, tokens

    def of(self, lane: LaneName) -> list[Ran]:
        return [ran for ran in self.launches if ran.lane == lane]


@dataclass
class Simulation:
    """What came out of a run: launches, tokens by request with their times, finish reasons."""

    engine: Engine
    record: Record
    seconds: float
    times: dict[str, list[float]]
    finish: dict[str, str]
    refused: list[Refused]
    outputs: dict[str, Output]
    """All of each request as one."""
    launches: list[Launched]
    """Those that a watcher was told of."""


def submit(name: str, prompt: int, output: int, **more: Any) -> Submit:
    """A prompt unlike any other one."""
    tokens = [hash_of(name, i) for i in range(prompt)]
    return Submit(name, tokens, SamplingParams(max_tokens=output, ignore_eos=True), **more)


def hash_of(name: str, i: int) -> int:
    return (sum(map(ord, name)) * 7919 + i * 104_729) % 997


def joined(before: Output | None, news: Output) -> Output:
    if before is None:
        return news
    return Output(
        id=news.id,
        tokens=before.tokens + news.tokens,
        finish=news.finish,
        cached=before.cached if before.tokens else news.cached,
        logprobs=(before.logprobs or []) + (news.logprobs or []) or None,
        prompt_logprobs=before.prompt_logprobs if before.tokens else news.prompt_logprobs,
        times=news.times,
    )


def simulate(
    system: System,
    arrivals: Sequence[tuple[float, ToEngine]],
    *,
    durations: FixedDurations | None = None,
    pages: int = 1000,
    slots: int = 64,
    lanes: SimLanes | None = None,
    estimator: Estimator | None = None,
    slo: Slo | None = None,
    pacer: Pacer | None = None,
    eos: tuple[int, ...] = (),
) -> Simulation:
    """Run until everything has ended; no page may be missing then."""
    lanes = lanes or SimLanes(UNITS, LEVELS, durations or FixedDurations())
    record = Record()
    books, pacer = KVCacheManager(pages, 16, slots, prefix_cache=True), pacer or Pacer()
    bounds = pacer.planned(slo or Slo())
    state = State(books, lanes, LAYERS, estimator or OnlineEstimator(), record, bounds, pacer)
    engine = Engine(system, state, ServedModel(1000, eos, 8192), pass_sizes=SIZES)
    heard: list[tuple[float, Outputs]] = []
    port = SimPort(lanes, arrivals, lambda at, news: heard.append((at, news)))
    run(engine, port)
    kv = engine.state.kv
    kv.check()
    state = engine.state
    assert not (state.requests or state.in_flight or state.launched)
    assert kv.free_pages + kv.reclaimable_pages == pages
    times: dict[str, list[float]] = {}
    finish: dict[str, str] = {}
    outputs: dict[str, Output] = {}
    for at, news in heard:
        for output in news.outputs:
            times.setdefault(output.id, []).extend([at] * len(output.tokens))
            outputs[output.id] = joined(outputs.get(output.id), output)
            if output.finish:
                finish[output.id] = output.finish
    refused = [refused for _, news in heard for refused in news.refused]
    launches = [launched for _, news in heard for launched in news.launches]
    return Simulation(engine, record, lanes.clock(), times, finish, refused, outputs, launches)
