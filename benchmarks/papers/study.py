"""What an experiment of a paper is, as data, and how its runs are served.

An experiment has runs and rows. A run is a system under a load, served by the simulator or, with
`--serve`, by a server on the machine's own GPU; or a question to a model of the device. A row puts
a claim of the paper beside what the runs gave. The papers' servers have no playout buffer, so
nothing but a first token is held back.
"""

import asyncio
import contextlib
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import msgspec
import numpy as np

from twolane.bench import goodput, serve
from twolane.bench.contenders import parse_system, system_flags
from twolane.bench.server import Server, serving
from twolane.engine.config import EngineConfig
from twolane.results.result import BenchConfig, Result
from twolane.sim.config import SimulateConfig
from twolane.sim.gpus import GPUS
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest, has_arrivals, read_trace, scale_rate, window

TRACES = "TWOLANE_TRACES"
"""Environment variable that names the folder of the public traces."""
FILES = {
    "azure-code": "AzureLLMInferenceTrace_code_2023.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv_2023.csv",
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "sharegpt": "sharegpt_lengths.csv.gz",
}
"""Name of a workload's trace in that folder; the other workloads are drawn."""
OFFSET = 300.0
"""Seconds of a trace between the beginnings of two seeds' windows."""
MAX_RUNNING = 1024
"""Most requests at a time (DuetServe §5.1); SGLang's default is what memory holds."""
ATTAINMENT = 0.99
"""Fraction of the gaps between tokens that must keep the bound in a search."""
OCTAVE = 12
"""Rates that a search tries from one to its double; neighbours are 6 % apart."""
STRIDE = 4
"""Rates from the first that a search tries to the second."""
SPAN = 6
"""How many times the rate where a search begins its highest one may be, and it its lowest one."""
MIN_RATE = 2 ** (math.ceil(-OCTAVE * math.log2(SPAN)) / OCTAVE)
"""The lowest rate that a search tries, over the one where it begins."""
APART = "1P1D"
"""System of a run in which prefill has one half of the GPUs and decode the other (simulated)."""
TWINS = {"a100-80gb": ("a100-80gb", "a100-80gb-split")}
"""Models of one GPU whose results are a range until one was measured."""
WARMUPS = 24
"""Requests that a server gets at once before its runs: its first memory is slow."""
Figures = dict[str, float]
"""Figures of one run by name; latencies in seconds."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model on GPUs under a workload."""

    model: str
    gpu: str = "a100-80gb"
    tp: int = 1
    dataset: str = ""
    rate: float = math.inf
    """Requests/s (a search begins here); infinite sends all requests at once."""
    requests: int = 600
    """Number of requests in a run."""
    bursts: bool = False
    """Whether the trace's own arrival times are replayed, scaled to the rate."""
    lengths: tuple[int, int] | None = None
    """Prompt and output tokens of every request, in place of a dataset."""
    draw: Callable[[int, int, float], list[TraceRequest]] | None = None
    """Requests from their number, a seed and a rate, in place of a dataset."""
    tbt: float | None = None
    """TBT SLO in seconds that the systems are told."""
    kept: tuple[float, float] = (math.inf, math.inf)
    """TTFT for each prompt token and TPOT, in seconds, that count as attained (Bullet, Table 4)."""
    link: float | None = None
    """Bytes/s between GPUs in each direction; None is NVLink's."""
    quantization: str | None = None
    prefix_cache: bool = True

    def spec(self, requests: int, seed: int, rate: float, traces: Path | None) -> WorkloadSpec:
        """Return the workload: of the trace if there is one, else drawn."""
        own: dict[str, object] = {"dataset": self.dataset}
        if self.lengths is not None:
            own = dict(
                zip(("random_input_len", "random_output_len"), self.lengths, strict=True),
                dataset="random",
            )
        elif traces is not None and (path := traces / FILES.get(self.dataset, "-")).is_file():
            own = {"dataset": str(path)}
            if has_arrivals(read_trace(str(path))):
                own["trace_offset"] = OFFSET * seed
        return WorkloadSpec(num_prompts=requests, request_rate=rate, seed=seed, **own)  # type: ignore[arg-type]

    def sent(
        self, requests: int, seed: int, rate: float, traces: Path | None
    ) -> list[TraceRequest]:
        """Return the requests of a run."""
        if self.draw is not None:
            return self.draw(requests, seed, rate)
        spec = self.spec(requests, seed, rate, traces)
        if not self.bursts or spec.trace_offset is None:
            return spec.build()
        rows = window(read_trace(spec.dataset), spec.trace_offset, None)[:requests]
        seconds = (rows[-1].arrival or 0.0) - (rows[0].arrival or 0.0)
        return scale_rate(rows, rate * seconds / len(rows))


@dataclass(frozen=True)
class Run:
    """A system under a load."""

    load: Load
    system: str
    """Name and settings, as `twolane bench goodput --system` takes them; or `APART`."""
    search: bool = False
    """Whether the highest rate is searched at which P99 TBT keeps the SLO and no queue grows."""


@dataclass(frozen=True)
class Ask:
    """A question to a model of the device, which serves nothing."""

    answer: Callable[[str], Figures]
    """Figures from the GPU's name."""
    gpu: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim of the paper beside ours: a figure, or the geometric mean of ratios of two."""

    what: str
    figure: str
    """Name of the figure in `Figures`."""
    of: Sequence[str]
    """Names of the runs."""
    over: Sequence[str] = ()
    """Names of the runs whose figures they are divided by; without them the figure itself counts.
    A name without its last number stands for the best of the runs with one (`chunked`)."""
    minus: bool = False
    """Whether the figures are subtracted instead."""
    paper: float | None = None
    """The paper's figure; None where its text has no number."""
    unit: str = "times"
    scale: float = 1.0
    """Factor from the figure to its unit."""
    why: str = ""
    """Why it is not reproduced, as the runs show."""
    contradicts: str = ""
    """Why nothing could reproduce it: what the paper's own numbers rule out."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table of a paper."""

    where: str
    """Paper and place."""
    runs: Mapping[str, Run | Ask]
    rows: Sequence[Row] = ()
    shown: tuple[str, ...] = ("mean_ttft", "p99_tbt", "throughput")
    """Figures that the table of runs has."""
    seeds: int = 3
    """Number of patterns of arrivals."""

    @property
    def single(self) -> bool:
        """Whether one GPU serves it, so that `--serve` can measure it."""
        runs = self.runs.values()
        return all(isinstance(run, Run) and run.load.tp == 1 for run in runs)


def beside(
    loads: Mapping[str, Load], systems: Mapping[str, str], search: bool = False
) -> dict[str, Run]:
    """Return every system under every load, named `load: system`.

    Args:
        loads: The loads by name.
        systems: The systems by name.
        search: Whether the highest rate is searched.
    """
    return {
        f"{load}: {system}": Run(loads[load], systems[system], search)
        for load, system in product(loads, systems)
    }


def names(loads: Sequence[str], system: str) -> list[str]:
    """Return the names of a system's runs under these loads."""
    return [f"{load}: {system}" for load in loads]


def over(
    loads: Sequence[str],
    own: str,
    rival: str,
    figure: str,
    what: str,
    paper: float | None,
    why: str = "",
    *,
    less: bool = False,
    contradicts: str = "",
) -> Row:
    """Return the row of a system's figure over a rival's, or the rival's over its own.

    Args:
        loads: The loads over which the mean is taken.
        own: The system.
        rival: The other system.
        figure: The name of the figure.
        what: What is compared.
        paper: The paper's ratio.
        why: Why it is not reproduced.
        less: Whether less is better, so that the rival's figure is divided by the system's own.
        contradicts: What the paper's own numbers rule out.
    """
    of, other = names(loads, own), names(loads, rival)
    if less:
        of, other = other, of
    return Row(
        what=what, figure=figure, of=of, over=other, paper=paper, why=why, contradicts=contradicts
    )


class Servers:
    """Keeps the latest server up, for the runs of one system that follow one another."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._words: list[str] = []
        self._server: Server | None = None

    def get(self, words: list[str], log: Path) -> tuple[Server, bool]:
        """Return the server with these arguments, and whether it was started now; one with others
        is stopped first."""
        if self._server is not None and words == self._words:
            return self._server, False
        self.close()
        self._server, self._words = self._open.enter_context(serving(words, log)), words
        return self._server, True

    def close(self) -> None:
        """Stop the server that is up."""
        self._open.close()
        self._server = None


@dataclass(frozen=True)
class Bench:
    """How runs are served: from which traces, simulated or on a server."""

    traces: Path | None = None
    requests: int | None = None
    """Number of requests in each run, in place of the load's own."""
    serve: str | None = None
    """Flags of the servers that are started; None simulates."""
    model: str | None = None
    """Model in place of the experiment's own, for a trial."""
    logs: Path = Path("papers-work")
    known: dict[tuple[Run, str, int], Figures] = field(default_factory=dict)
    """Figures of runs that several experiments show."""
    servers: Servers = field(default_factory=Servers)

    def gpus(self, run: Run | Ask) -> tuple[str, ...]:
        """Return the models of the run's GPU; one server stands for itself."""
        gpu = run.gpu if isinstance(run, Ask) else run.load.gpu
        return (gpu,) if self.serve is not None else TWINS.get(gpu, (gpu,))

    def count(self, run: Run | Ask) -> int:
        """Return the number of requests in one run; 0 where nothing is served."""
        return 0 if isinstance(run, Ask) else self.requests or run.load.requests

    def figures(self, run: Run | Ask, gpu: str, seed: int) -> Figures:
        """Return the figures of a run on one model of its GPU."""
        if isinstance(run, Ask):
            return run.answer(gpu)
        if (run, gpu, seed) not in self.known:
            serve = self._served if self.serve is not None else self._simulated
            self.known[run, gpu, seed] = serve(run, gpu, seed)
        return self.known[run, gpu, seed]

    def _simulated(self, run: Run, gpu: str, seed: int) -> Figures:
        """Return the figures at the run's rate, or at the highest that a search finds; of a search
        in which no rate holds only `goodput`, which is 0, and `failed`."""
        if not run.search:
            return figures(run.load, self._result(run, gpu, seed, run.load.rate))
        tried: dict[float, Figures | None] = {}

        def holds(rate: float) -> bool:
            tried[rate] = self.held(run, gpu, seed, rate)
            return tried[rate] is not None

        return searched(run, tried, holds)

    def held(self, run: Run, gpu: str, seed: int, rate: float) -> Figures | None:
        """Return the figures at a rate that holds; None if it does not."""
        assert run.load.tbt is not None
        slos = {"tbt": run.load.tbt}
        result = self._result(run, gpu, seed, rate, slos)
        kept = goodput.shares(result.metrics, slos)["tbt"] or 0.0
        if result.interrupted or kept < ATTAINMENT or not goodput.lasting(result, rate):
            return None
        return figures(run.load, result)

    def _result(
        self, run: Run, gpu: str, seed: int, rate: float, slos: dict[str, float] | None = None
    ) -> Result:
        """Return one run; with bounds it is ended when they cannot be kept any more."""
        load = run.load
        requests = load.sent(self.count(run), seed, rate, self.traces)
        asked = SimulateConfig(
            engine=engine(run),
            gpu=gpu,
            tp=load.tp // 2 if run.system == APART else load.tp,
            link_bandwidth=load.link,
            bench=BenchConfig(workload=WorkloadSpec(seed=seed), goodput=slos or {}),
        )
        if slos is None:
            return simulate(asked, requests).result
        stop = goodput.EarlyStop(requests, [slos], ATTAINMENT)
        return simulate(asked, requests, stop, stop.tokens).result

    def _served(self, run: Run, gpu: str, seed: int) -> Figures:
        """Return the figures of a run over HTTP on a server without another system's requests.

        Loads draw other tokens, or one would find its prompts in the prefix cache of the last.
        """
        name = "".join(c if c.isalnum() else "-" for c in run.system)
        words = [self.model or run.load.model, *(self.serve or "").split()]
        words += system_flags(run.system)
        if run.load.tbt is not None:
            words.append(f"--slo-tbt-ms={run.load.tbt * 1e3:g}")
        self.logs.mkdir(parents=True, exist_ok=True)
        server, cold = self.servers.get(words, self.logs / f"{name}.log")
        spec = run.load.spec(self.count(run), seed, run.load.rate, self.traces)
        config = BenchConfig(
            base_url=server.url,
            workload=spec,
            prompt_seed=zlib.crc32(msgspec.json.encode(spec)),
            num_warmups=min(WARMUPS, self.count(run)) if cold else 0,
        )
        return figures(run.load, asyncio.run(serve.run(config)))


def searched(
    run: Run, tried: Mapping[float, Figures | None], holds: Callable[[float], bool]
) -> Figures:
    """Return the figures at the highest rate that a search finds, with the lowest that failed
    above it as `failed`; `holds` adds each rate to those `tried`."""
    first = run.load.rate
    ends = {"floor": first / SPAN, "top": first * SPAN}
    rate = goodput.highest(holds, first, OCTAVE, stride=STRIDE, **ends)
    above = [other for other, found in tried.items() if found is None and other > rate]
    return {**(tried.get(rate) or {}), "goodput": rate, "failed": min(above, default=math.inf)}


def engine(run: Run) -> EngineConfig:
    """Return the settings of the engine that a run simulates."""
    system, options = parse_system("two-stream" if run.system == APART else run.system)
    load = run.load
    return EngineConfig(
        model=load.model,
        system=system,
        options=options,
        slo=Slo(tbt=load.tbt),
        tbt_buffer=0.0,
        max_running=MAX_RUNNING,
        prefix_cache=load.prefix_cache,
        quantization=load.quantization,  # type: ignore[arg-type]
        disaggregated=run.system == APART,
    )


def figures(load: Load, result: Result) -> Figures:
    """Return the figures of the requests that were answered; a prompt beyond the model's positions
    is refused."""
    answered = [record for record in result.records if record.ok]
    ttft = np.array([record.ttft for record in answered])
    tpot = np.array([record.tpot or 0.0 for record in answered])
    tbt = np.concatenate([record.gaps for record in answered])
    prompts = np.array([record.prompt_tokens for record in answered])
    outputs = np.array([record.output_tokens for record in answered])
    e2e = np.array([record.e2e for record in answered])
    named = {
        "ttft": ttft,
        "ttft_per_token": ttft / prompts,
        "tpot": tpot,
        "tbt": tbt,
        "e2e": e2e,
        "e2e_per_token": e2e / outputs,
    }
    each, pace = load.kept
    return {
        **{f"mean_{name}": float(values.mean()) for name, values in named.items()},
        **{
            f"p{q}_{name}": float(np.percentile(values, q))
            for q, (name, values) in product((50, 90, 99), named.items())
        },
        "throughput": len(answered) / result.duration,
        "finished": result.metrics.steady.finished if result.metrics.steady else 0.0,
        "tokens": float(prompts.sum() + outputs.sum()) / result.duration,
        "prompt_tokens": float(prompts.sum()) / result.duration,
        "attainment": float(((ttft <= each * prompts) & (tpot <= pace)).mean()),
        "answered": len(answered) / len(result.records),
        **(_lanes(load, result) if result.simulated else {}),
    }


def _lanes(load: Load, result: Result) -> Figures:
    """Return how the lanes shared the simulated device: SMs in use, and each lane's mean share."""
    assert result.simulated is not None
    spent: dict[str, float] = result.simulated["lane_seconds"]  # type: ignore[assignment]
    busy: dict[str, float] = {}
    area: dict[str, float] = {}
    for name, seconds in spent.items():
        lane, _, width = name.rpartition(" ")
        busy[lane] = busy.get(lane, 0.0) + seconds
        area[lane] = area.get(lane, 0.0) + seconds * int(width)
    lanes = {f"{lane}_units": area[lane] / busy[lane] for lane in busy if busy[lane]}
    hits = result.simulated["prefix_hit_rate"]
    return {
        **lanes,
        "utilisation": sum(area.values()) / (GPUS[load.gpu].units * result.duration),
        "hit_rate": float(hits or 0.0),  # type: ignore[arg-type]
    }


def traces_from(given: Path | None) -> Path | None:
    """Return the folder of the traces: as given, or as the environment names it."""
    if given is not None:
        return given
    named = os.environ.get(TRACES)
    return Path(named) if named else None
