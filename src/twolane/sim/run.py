"""`twolane simulate`: a workload served by the real engine on simulated GPUs.

The loop, the system, the KV cache and the report are those of `serve` and `bench serve`; the lanes
run on a virtual clock (`sim/lanes.py`). There is no HTTP and no text: a request reaches the engine
when it is due.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from twolane.common.errors import FieldError
from twolane.common.files import naming_file
from twolane.common.garbage import gc_disabled
from twolane.engine.build import assemble
from twolane.engine.config import EngineConfig
from twolane.engine.loop import run
from twolane.engine.messages import Output, Outputs, Refused, Submit, Times
from twolane.model.load.hub import resolve
from twolane.model.spec import ModelSpec, skewed
from twolane.results.metrics import LAG_PERCENTILES, Distribution
from twolane.results.record import INTERRUPTED, OK, Record, status_outcome
from twolane.results.result import BenchConfig, Energy, Result
from twolane.results.summary import result_json
from twolane.sampling import SamplingParams
from twolane.sim.config import SimulateConfig
from twolane.sim.emulated import EmulatedMachine
from twolane.sim.lanes import SimLanes
from twolane.sim.machine import SimulatedMachine
from twolane.sim.port import SimPort
from twolane.sim.profile import simulated_profile
from twolane.sim.report import LaunchCounts, engine_figures, report
from twolane.workload.prompts import PromptMaker
from twolane.workload.traces import TraceRequest


class Served(msgspec.Struct, frozen=True):
    """One request of a simulation."""

    record: Record
    cached: int | None
    """Number of prompt tokens from the prefix cache."""
    times: Times
    """Times in the engine."""


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation."""

    result: Result
    served: Sequence[Served]
    """Requests served, by index."""


def shapes_of(config: EngineConfig) -> ModelSpec:
    """Return the model's shape: a built-in one, or a checkpoint's.

    Raises:
        ValueError: there is no such model, or it asks for something that is not built.
    """
    spec = resolve(config.model, "dummy").spec()
    if config.max_positions is not None:
        spec = replace(spec, max_positions=config.max_positions)
    return skewed(spec, config.router_skew)


def simulate(
    config: SimulateConfig,
    workload: Sequence[TraceRequest] | None = None,
    on_record: Callable[[Record], bool] = lambda record: False,
    on_tokens: Callable[[int, Sequence[float], int], bool] = lambda index, times, new: False,
) -> Simulation:
    """Simulate serving the workload; the same configuration and seed give the same result.

    Args:
        config: Settings of the simulation.
        workload: the requests, if they were built already.
        on_record: called when a request has ended; True stops the run.
        on_tokens: the same when tokens have come: the request's index, the times of all its tokens
            so far and how many of them are new, in seconds.

    Raises:
        FieldError, ValueError: a setting is wrong.
        FieldError, TraceError: the workload is.
    """
    config.check()
    requests = config.bench.workload.build() if workload is None else workload
    seed, gpu, spec = config.bench.workload.seed, config.device(), shapes_of(config.engine)
    if spec.kv_heads % config.tp and config.tp % spec.kv_heads:
        raise FieldError("tp", f"{config.tp} does not divide the model's {spec.kv_heads} KV heads")
    machine = SimulatedMachine(gpu, spec, config.engine, tp=config.tp, seed=seed)
    if config.uneven is not None:
        machine = EmulatedMachine(gpu, spec, config.engine, config.uneven, seed=seed)
    profile = config.engine.profile or str(simulated_profile(gpu, spec, config.tp, config.engine))
    engine = msgspec.structs.replace(config.engine, profile=profile)
    built = assemble(engine, machine, lambda: None, lambda stage, fraction: None)
    ledger = Ledger(requests, on_record, on_tokens)
    built.engine.state.watched_until = math.inf  # so that it tells of all launches
    assert isinstance(built.lanes, SimLanes)
    port = SimPort(built.lanes, _arrivals(config.bench, requests), ledger.hear, config.host_factor)
    ledger.stop = lambda: setattr(port, "stopped", True)
    try:
        with gc_disabled():  # a tenth of the time; what the loop drops has no cycles
            run(built.engine, port)
    finally:
        built.close()
    if ledger.stopped:
        ledger.interrupt(built.lanes.clock())
    figures = engine_figures(config, built, ledger.launches)
    result = ledger.result(config, figures, machine.energy(built.lanes))
    return Simulation(result, ledger.in_order())


def show(config: SimulateConfig, result_file: Path | None, requests_file: Path | None) -> None:
    """Simulate with a progress bar, save the requested files, and print the report."""
    requests = config.bench.workload.build()
    config.check()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"simulating {config.gpu}", total=len(requests))

        def count(record: Record) -> bool:
            progress.advance(task)
            return False

        simulation = simulate(config, requests, count)
    try:
        if result_file is not None:
            with naming_file(result_file):
                result_file.write_bytes(result_json(simulation.result))
        if requests_file is not None:
            save_requests(requests_file, simulation.served)
    finally:  # a full disk costs the files, not what was simulated
        Console().print(report(config, simulation.result))


def save_requests(path: Path, served: Sequence[Served]) -> None:
    """Write one line of CSV for each request; times in seconds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(REQUEST_COLUMNS)
        writer.writerows(_request_row(one) for one in served)


REQUEST_COLUMNS = (
    *("index", "arrival", "prompt_tokens", "cached_tokens", "output_tokens", "outcome"),
    *("ttft", "tpot", "max_tbt", "e2e", "queue", "prefill", "decode"),
)


def _request_row(one: Served) -> list[object]:
    record, times = one.record, one.times
    spans = (
        record.ttft,
        record.tpot,
        max(record.gaps, default=None),
        record.e2e,
        times.queue,
        times.prefill,
        times.decode,
    )
    return [
        record.index,
        f"{record.sent:.6f}",
        record.prompt_tokens,
        one.cached,
        record.output_tokens,
        record.outcome,
        *("" if span is None else f"{span:.6f}" for span in spans),
    ]


def _arrivals(
    bench: BenchConfig, requests: Sequence[TraceRequest]
) -> Iterator[tuple[float, Submit]]:
    """Yield the requests as messages; prompts are made when due, since not all would fit into
    memory."""
    prompts = PromptMaker(bench.vocab_range, bench.workload.seed)
    for index, request in enumerate(requests):
        params = SamplingParams(
            max_tokens=request.output_tokens, ignore_eos=bench.ignore_eos, temperature=0.0
        )
        yield (
            request.arrival or 0.0,
            Submit(str(index), prompts.token_ids(index, request), params),
        )


@dataclass
class _OpenRequest:
    """A request in progress."""

    times: list[float] = field(default_factory=list)
    cached: int | None = None


@dataclass(eq=False)
class Ledger:
    """Makes records from the engines' outputs."""

    requests: Sequence[TraceRequest]
    """The workload's requests; the id of each is its index as text."""
    on_record: Callable[[Record], bool]
    """See `simulate`."""
    on_tokens: Callable[[int, Sequence[float], int], bool]
    """See `simulate`."""

    def __post_init__(self) -> None:
        self._open: dict[str, _OpenRequest] = {}
        self.served: list[Served] = []
        self.launches = LaunchCounts()
        self.stop: Callable[[], None]
        """Function that ends the run."""
        self.stopped = False

    def hear(self, at: float, news: Outputs) -> None:
        """Record the outputs of a turn."""
        self.launches.add(news.launches)
        for output in news.outputs:
            self._output(at, output)
        for refused in news.refused:
            self._refused(at, refused)

    def interrupt(self, at: float) -> None:
        """Record the open requests as interrupted, like a stopped client."""
        ended = {one.record.index for one in self.served}
        for index, asked in enumerate(self.requests):
            if index not in ended and (asked.arrival or 0.0) <= at:
                request = self._open.get(str(index), _OpenRequest())
                self._add(at, index, INTERRUPTED, "the run was stopped", request, Times())

    def in_order(self) -> list[Served]:
        """Return the requests served, in order of sending."""
        return sorted(self.served, key=lambda one: one.record.index)

    def result(
        self, config: SimulateConfig, simulated: dict[str, object], energy: Energy | None = None
    ) -> Result:
        """Return the result as a bench client would see it, with figures of the simulation."""
        records = tuple(one.record for one in self.in_order())
        return Result(
            config=config.bench,
            model=config.engine.model,
            date=datetime.now().astimezone(),
            workload=tuple(self.requests),
            records=records,
            duration=max((record.ended for record in records), default=0.0),
            interrupted=self.stopped,
            loop_lag=Distribution.of((), LAG_PERCENTILES),
            simulated=simulated,
            energy=energy,
        )

    def _output(self, at: float, output: Output) -> None:
        request = self._open.get(output.id)
        if request is None:
            request = self._open[output.id] = _OpenRequest(cached=output.cached)
        at = at if output.due is None else max(at, output.due)
        request.times += [at] * len(output.tokens)
        if output.tokens and self.on_tokens(int(output.id), request.times, len(output.tokens)):
            self.stopped = True
            self.stop()
        if output.finish is not None:
            del self._open[output.id]
            self._end(at, output.id, OK, "", request, output.times or Times())

    def _refused(self, at: float, refused: Refused) -> None:
        status = 429 if refused.code == "refused" else 400
        self._end(at, refused.id, status_outcome(status), refused.message, _OpenRequest(), Times())

    def _end(
        self, at: float, name: str, outcome: str, error: str, request: _OpenRequest, times: Times
    ) -> None:
        record = self._add(at, int(name), outcome, error, request, times)
        if self.on_record(record):
            self.stopped = True
            self.stop()

    def _add(
        self, at: float, index: int, outcome: str, error: str, request: _OpenRequest, times: Times
    ) -> Record:
        asked = self.requests[index]
        record = Record(
            index=index,
            asked_prompt=asked.prompt_tokens,
            asked_output=asked.output_tokens,
            scheduled=asked.arrival or 0.0,
            waited=0.0,
            sent=asked.arrival or 0.0,
            ended=at,
            outcome=outcome,
            error=error,
            token_times=tuple(request.times),
            usage_prompt=asked.prompt_tokens,
            usage_output=len(request.times),
            usage_cached=request.cached,
        )
        self.served.append(Served(record, request.cached, times))
        return record
