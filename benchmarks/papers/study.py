"""What an experiment of a paper is, as data, and how its runs are served.

An experiment has runs and rows. A run is a system under a load, served by the simulator or, with
`--serve`, by a server on the machine's own GPU; or a question to a model of the device. A row puts
a figure of the paper beside ours, with one sentence on why they differ.
"""

import asyncio
import contextlib
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import msgspec
import numpy as np

from twolane.bench import serve
from twolane.bench.contenders import parse_system, system_flags
from twolane.bench.goodput import EarlyStop, highest, shares
from twolane.bench.server import Server, serving
from twolane.engine.config import EngineConfig
from twolane.results.result import BenchConfig, Result
from twolane.sim.config import SimulateConfig
from twolane.sim.gpus import GPUS
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest, has_arrivals, read_trace

TRACES = "TWOLANE_TRACES"
"""Environment variable that names the folder of the public traces."""
FILES = {
    "azure-code": "AzureLLMInferenceTrace_code_2023.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv_2023.csv",
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "sharegpt": "sharegpt_lengths.csv.gz",
}
"""Name of a workload's trace in that folder."""
OFFSET = 300.0
"""Seconds of a trace between the beginnings of two seeds' windows."""
UNSTABLE = {"ttft": 5.0, "ttft_per_1k": 0.5}
"""Bounds in seconds beyond which a queue counts as growing: the papers search until "the serving
system becomes unstable" and name no bound."""
ATTAINMENT = 0.99
"""Fraction of gaps and of first tokens that must keep the bounds in a search."""
OCTAVE = 9
"""Rates that a search tries from one to its double; neighbours are 8 % apart."""
SPAN = 6
"""How many times the rate where a search begins its highest one may be, and it its lowest one."""
MIN_RATE = 2 ** (math.ceil(-OCTAVE * math.log2(SPAN)) / OCTAVE)
"""The lowest rate that a search tries, over the one where it begins."""
APART = "1P1D"
"""System of a run in which prefill has one half of the GPUs and decode the other (simulated)."""
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
    requests: int = 150
    """Number of requests in a run of the short form."""
    whole: int = 1000
    """Number of requests in a run of the long form."""
    lengths: tuple[int, int] | None = None
    """Prompt and output tokens of every request, in place of a dataset."""
    draw: Callable[[int, int], list[TraceRequest]] | None = None
    """Requests from their number and a seed, in place of a dataset."""
    tbt: float | None = None
    """TBT SLO in seconds that the systems are told."""
    kept: tuple[float, float] = (math.inf, math.inf)
    """TTFT for each prompt token and TPOT, in seconds, that count as attained (Bullet, Table 4)."""
    levels: tuple[int, ...] | None = None
    link: float | None = None
    """Bytes/s between GPUs in each direction; None is NVLink's."""
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    prefix_cache: bool = True

    def spec(self, requests: int, seed: int, rate: float, traces: Path | None) -> WorkloadSpec:
        """The workload: of the trace if there is one, else drawn."""
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


@dataclass(frozen=True)
class Run:
    """A system under a load."""

    load: Load
    system: str
    """Name and settings, as `twolane bench goodput --system` takes them; or `APART`."""
    search: bool = False
    """Whether the highest rate is searched at which P99 TBT keeps the SLO."""
    told: bool = False
    """Whether the system is told the bound on TTFT by which the search judges; MuxWise and Drift
    assume one of their own where there is none."""


@dataclass(frozen=True)
class Ask:
    """A question to a model of the device, which serves nothing."""

    answer: Callable[[], Figures]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of the paper beside ours."""

    what: str
    figure: str
    """Name of the figure in `Figures`."""
    of: str
    """Name of the run."""
    over: str = ""
    """Name of the run whose figure it is divided by; without one the figure itself counts."""
    paper: float | None = None
    """The paper's figure; None where its text has no number."""
    unit: str = "times"
    scale: float = 1.0
    """Factor from the figure to its unit."""
    why: str
    """Why they differ, in one sentence."""


def over(
    load: str,
    figure: str,
    what: str,
    paper: float | None,
    why: str,
    *,
    own: str,
    rival: str,
    more: bool,
) -> Row:
    """A system's figure under a load over another's, or the other way round where less is better.

    Args:
        own, rival: names of the systems in the runs of that load.
        more: whether more is better.
    """
    runs = f"{load}: {own}", f"{load}: {rival}"
    of, other = runs if more else reversed(runs)
    return Row(what=f"{what}, {load}", figure=figure, of=of, over=other, paper=paper, why=why)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table of a paper."""

    where: str
    """Paper and place."""
    runs: Mapping[str, Run | Ask]
    rows: Sequence[Row] = ()
    shown: tuple[str, ...] = ()
    """Figures that the table of runs has."""
    headline: str = ""
    """What the paper's abstract claims, if this experiment is its source."""
    single: bool = field(default=False)
    """Whether one GPU serves it, so that `--serve` can measure it."""


def figures_of(
    run: str, named: str, figures: Iterable[tuple[str, str, float, str, float, str]]
) -> list[Row]:
    """Figures of one run, which are divided by no other's.

    Args:
        run: its name.
        named: what each row calls it.
        figures: of each `what`, `figure`, `paper`, `unit`, `scale` and `why` of its row.
    """
    return [
        Row(
            what=f"{what}, {named}",
            figure=figure,
            of=run,
            paper=paper,
            unit=unit,
            scale=scale,
            why=why,
        )
        for what, figure, paper, unit, scale, why in figures
    ]


def beside(
    loads: Mapping[str, Load], systems: Mapping[str, str], search: bool = False
) -> dict[str, Run]:
    """Every system under every load, named `load: system`."""
    return {
        f"{load}: {system}": Run(loads[load], systems[system], search)
        for load, system in product(loads, systems)
    }


class Servers:
    """Keeps the latest server up, for the runs of one system that follow one another."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._words: list[str] = []
        self._server: Server | None = None

    def get(self, words: list[str], log: Path) -> tuple[Server, bool]:
        """The server with these arguments, and whether it was started now; one with others is
        stopped first."""
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
    """How runs are served: in what form, from which traces, simulated or on a server."""

    whole: bool = False
    traces: Path | None = None
    requests: int | None = None
    """Number of requests in each run, in place of the load's own."""
    serve: str | None = None
    """Flags of the servers that are started; None simulates."""
    model: str | None = None
    """Model in place of the experiment's own, for a trial."""
    logs: Path = Path("papers-work")
    known: dict[tuple[Run, int], Figures] = field(default_factory=dict)
    """What runs came to: several experiments show the same ones."""
    servers: Servers = field(default_factory=Servers)

    def count(self, run: Run) -> int:
        """Number of requests in one run."""
        return self.requests or (run.load.whole if self.whole else run.load.requests)

    def figures(self, run: Run | Ask, seed: int) -> Figures:
        """What comes of a run."""
        if isinstance(run, Ask):
            return run.answer()
        if (run, seed) not in self.known:
            self.known[run, seed] = self._figures(run, seed)
        return self.known[run, seed]

    def _figures(self, run: Run, seed: int) -> Figures:
        if self.serve is not None:
            return self._served(run, seed)
        if run.search:
            return self._searched(run, seed)
        return figures(run.load, self._simulated(run, seed, run.load.rate)[0])

    def _requests(
        self, run: Run, seed: int, rate: float
    ) -> tuple[WorkloadSpec, list[TraceRequest]]:
        if run.load.draw is not None:
            return WorkloadSpec(seed=seed), run.load.draw(self.count(run), seed)
        spec = run.load.spec(self.count(run), seed, rate, self.traces)
        return spec, spec.build()

    def _simulated(
        self, run: Run, seed: int, rate: float, slos: dict[str, float] | None = None
    ) -> tuple[Result, bool]:
        """A run, and whether it was ended since the bounds could not be kept any more."""
        load = run.load
        workload, requests = self._requests(run, seed, rate)
        asked = SimulateConfig(
            engine=engine(run, load.model),
            gpu=load.gpu,
            tp=load.tp // 2 if run.system == APART else load.tp,
            link_bandwidth=load.link,
            bench=BenchConfig(workload=workload, goodput=slos or {}),
        )
        if slos is None:
            result = simulate(asked, requests).result
        else:
            watch = EarlyStop(requests, [slos], ATTAINMENT)
            result = simulate(asked, requests, watch, watch.tokens).result
        return result, result.interrupted

    def _searched(self, run: Run, seed: int) -> Figures:
        """Goodput, and the figures at that rate; only `goodput` where no rate holds."""
        assert run.load.tbt is not None
        slos = {"tbt": run.load.tbt, **UNSTABLE}
        best: dict[float, Figures] = {}

        def holds(rate: float) -> bool:
            result, hopeless = self._simulated(run, seed, rate, slos)
            kept = shares(result.metrics, slos).values()
            if good := not hopeless and all((share or 0.0) >= ATTAINMENT for share in kept):
                best[rate] = figures(run.load, result)
            return good

        start = run.load.rate
        rate = highest(holds, start, OCTAVE, floor=start / SPAN, top=start * SPAN, stride=3)
        return {**best.get(rate, {}), "goodput": rate}

    def _served(self, run: Run, seed: int) -> Figures:
        """A run over HTTP on a server that has no other system's requests.

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


def engine(run: Run, model: str) -> EngineConfig:
    """Settings of the engine that a run simulates."""
    system, options = parse_system("two-stream" if run.system == APART else run.system)
    load = run.load
    bound = {"ttft": UNSTABLE["ttft"], "ttft_per_token": UNSTABLE["ttft_per_1k"] / 1024}
    return EngineConfig(
        model=model,
        system=system,
        options=options,
        slo=Slo(tbt=load.tbt, **bound) if run.told else Slo(tbt=load.tbt),
        tbt_buffer=0.0,  # the papers' servers hold no tokens back
        levels=load.levels,
        prefix_cache=load.prefix_cache,
        quantization=load.quantization,  # type: ignore[arg-type]
        kv_cache_dtype=load.kv_cache_dtype,  # type: ignore[arg-type]
        disaggregated=run.system == APART,
    )


def figures(load: Load, result: Result) -> Figures:
    """Of those that were answered; a prompt beyond the model's positions is refused."""
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
    own = {
        **{f"mean_{name}": float(values.mean()) for name, values in named.items()},
        **{f"p50_{name}": float(np.percentile(values, 50)) for name, values in named.items()},
        **{f"p90_{name}": float(np.percentile(values, 90)) for name, values in named.items()},
        **{f"p99_{name}": float(np.percentile(values, 99)) for name, values in named.items()},
        "throughput": len(answered) / result.duration,
        "tokens": float(prompts.sum() + outputs.sum()) / result.duration,
        "attainment": float(((ttft <= each * prompts) & (tpot <= pace)).mean()),
        "answered": float(len(answered)),
    }
    return {**own, **(_lanes(load, result) if result.simulated else {})}


def _lanes(load: Load, result: Result) -> Figures:
    """How the lanes shared the simulated device: SMs in use, and each lane's mean share."""
    assert result.simulated is not None
    spent: dict[str, float] = result.simulated["lane_seconds"]  # type: ignore[assignment]
    units = GPUS[load.gpu].units
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
        "utilisation": sum(area.values()) / (units * result.duration),
        "hit_rate": float(hits or 0.0),  # type: ignore[arg-type]
    }


def traces_from(given: Path | None) -> Path | None:
    """The folder of the traces: as given, or as the environment names it."""
    if given is not None:
        return given
    named = os.environ.get(TRACES)
    return Path(named) if named else None
