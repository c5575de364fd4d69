"""Searches for goodput by a recipe: `python benchmarks/recipe.py one-card [PART ...] [--simulate]`.

A recipe is a file of `benchmarks/recipes/`: its parts (a model, a workload, bounds) and its
engines, which each part searches in turn as `twolane bench goodput` does, with the same patterns of
arrivals. `--simulate` searches on simulated GPUs, `--emulate` on one that takes as long as a card's
profile says. On a card a search begins where the simulation that is on file expects its answer,
times what the first engine was off by. `--set KEY=VALUE` changes a setting of all parts, as
`--set num_prompts=1200`. Runs stay in `--work`: the same command continues. `--out` gets a file a
part, which grows with each engine.
"""

import argparse
import contextlib
import itertools
import logging
import multiprocessing
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
from one_server import Contender, Probe, measure
from searches import WARMUPS, Found, searched

from twolane.bench import contenders, goodput
from twolane.bench.goodput import Search
from twolane.bench.target import Target
from twolane.estimate.profile import SHIPPED
from twolane.results.provenance import provenance, save
from twolane.results.result import BenchConfig
from twolane.sim.config import Unevenness
from twolane.workload.prompts import TokenRange
from twolane.workload.spec import WorkloadSpec

HERE = Path(__file__).parent
NEAR = 8.0
"""A search that begins at an expected rate tries none below this fraction of it."""

SIMULATED = frozenset(
    {"tp", "link_bandwidth", "disaggregated", "estimator", "quantization", "kv_cache_dtype"}
    | {"profile", "host_factor"}
)
"""Settings of engines that a simulation has, by its own names."""


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One contender of a part."""

    systems: tuple[str, ...] = ()
    """Systems with settings, of which the best at each bound counts; by default the engine's
    name."""
    settings: dict[str, Any] = {}
    """Settings of `twolane serve`, by their names with underscores; a simulation has them, too."""
    replicas: int = 1
    """Number of simulated GPUs that each serve an equal part of the requests."""
    command: str | None = None
    """Command of another server with OpenAI's API, which is not simulated."""
    sweep: tuple[str, ...] = ()
    """Flags of that command with the values to try, see `bench goodput --sweep`."""


class Part(msgspec.Struct, frozen=True):
    """A model under one workload, with the settings of its searches."""

    model: str
    tbt: tuple[float, ...]
    """Bounds on TBT in milliseconds."""
    goodput: dict[str, float]
    """Other bounds in milliseconds, by their names in `bench goodput`."""
    engines: tuple[str, ...]
    """Names of the recipe's engines, or systems with settings, several separated by `|`."""
    rest: dict[str, Any]
    """Settings of the search, its workload and its client, by the names of their fields."""
    gpu: str = "h200"
    """GPU of a simulation."""
    flags: str = "--load-format dummy --device cuda --max-model-len 16384"
    """Further options of `twolane serve`, with `{model}` and `{profiles}`, the folder of those that
    are shipped."""
    settings: dict[str, Any] = {}
    """Settings of all engines."""
    saturated: bool = False
    """Whether a point is the number of requests served per second at `start_rate`, far above what
    can be served, and 0 where TBT was not kept."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts and engines of a comparison."""

    about: str
    search: dict[str, Any]
    """Settings that all parts share."""
    parts: dict[str, dict[str, Any]]
    engines: dict[str, Engine] = {}
    best_simulated: bool = False
    """Whether a card serves only those systems of an engine that held most in simulation."""
    coarse: float | None = None
    """Tolerance of a first search with one pattern, after which only the best of an engine's
    systems is searched at each bound."""
    one_server: Probe | None = None
    """Speeds to measure, if one server serves all bounds of an engine, as headers of requests."""


def part_of(recipe: Recipe, name: str, given: argparse.Namespace) -> Part:
    """Return a part with the recipe's settings and those of the command line.

    Raises:
        SystemExit: a setting is unknown.
    """
    asked = {**recipe.search, **recipe.parts[name], **given.set}
    own = {key: asked.pop(key) for key in Part.__struct_fields__ if key in asked}
    known = {*WorkloadSpec.__struct_fields__, *Search.__struct_fields__, "vocab_range"}
    if unknown := asked.keys() - known:
        raise SystemExit(f"{name}: unknown settings {', '.join(sorted(unknown))}")
    own["engines"] = given.engines or own.get("engines") or tuple(recipe.engines)
    return msgspec.convert({**own, "rest": asked}, Part)


def engine_of(recipe: Recipe, name: str) -> Engine:
    """Return an engine by its name, or of the systems that stand in its place."""
    found = recipe.engines.get(name, Engine())
    systems = found.systems or tuple(name.split("|"))
    return msgspec.structs.replace(found, systems=systems)


class Task(msgspec.Struct, frozen=True):
    """The searches of one engine in a part."""

    recipe: Recipe
    name: str
    """Name of the part."""
    part: Part
    engine: str
    mode: str
    """`simulate`, `emulate`, or the name of a card."""
    folder: Path
    """Folder of the runs."""

    @property
    def target(self) -> dict[str, object]:
        """The server or simulation."""
        part, engine = self.part, engine_of(self.recipe, self.engine)
        settings = {**part.settings, **engine.settings}
        if self.mode in ("simulate", "emulate"):
            target = {"simulate": part.gpu, "model": part.model, **simulated(settings)}
            if self.mode == "emulate":
                uneven = msgspec.to_builtins(Unevenness())
                profile = str(SHIPPED / f"{part.model}-{part.gpu}.json")
                target = {"profile": profile, "uneven": uneven, **target}
            return target
        if engine.command is not None:
            command = engine.command.replace("{model}", part.model)
            return Target(serve_command=command, sweep=engine.sweep).words()
        more = part.flags.replace("{model}", part.model).replace("{profiles}", str(SHIPPED))
        return {"serve": " ".join([part.model, more, *flags(settings)])}

    @property
    def systems(self) -> list[str]:
        """Every system with every combination of its settings."""
        engine = engine_of(self.recipe, self.engine)
        if engine.command is not None:
            return goodput.variants(
                Target(serve_command=engine.command, sweep=engine.sweep).contenders[0]
            )
        return [one for listed in engine.systems for one in goodput.variants(listed)]

    def search(self, guess: float | None = None, **more: Any) -> Search:
        """Return the search, which begins at a guess if there is one."""
        rest = {**self.part.rest, **more}
        spec = {key: rest.pop(key) for key in WorkloadSpec.__struct_fields__ if key in rest}
        rest.pop("vocab_range", None)
        slos = {name: bound / 1e3 for name, bound in self.part.goodput.items()}
        tbts = tuple(bound / 1e3 for bound in rest.pop("tbt", self.part.tbt))
        start = rest.get("start_rate", 1.0)
        rest.setdefault("least_rate", start / 4)
        if guess:
            rest |= {"start_rate": guess, "least_rate": guess / NEAR}
            rest["first_step"] = 1 + rest.get("tolerance", 0.02)
        if len(tbts) == 1:
            slos["tbt"], tbts = tbts[0], ()
        words = {**rest, "slos": slos, "tbts": tbts, "workload": {**spec}, "target": self.target}
        return msgspec.convert(words, Search)

    @property
    def load(self) -> BenchConfig:
        """The client."""
        text = self.part.rest.get("vocab_range")
        given = {} if text is None else {"vocab_range": TokenRange.parse(text)}
        return BenchConfig(num_warmups=WARMUPS, **given)


def simulated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a server as those of a simulation's target.

    Raises:
        SystemExit: a simulation has no such setting.
    """
    named = dict(settings)
    if "tensor_parallel_size" in named:
        named["tp"] = named.pop("tensor_parallel_size")
    if "link_gb_s" in named:
        named["link_bandwidth"] = 1e9 * named.pop("link_gb_s")
    if unknown := named.keys() - SIMULATED:
        raise SystemExit(f"not simulated: {', '.join(sorted(unknown))}")
    return named


def flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings as words of a command line."""
    for name, value in settings.items():
        yield f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")


def run(task: Task, guesses: Mapping[float, tuple[str, float]], off: float) -> list[Found]:
    """Search one engine at every bound, from the expected rates times `off`; print each run."""
    if task.part.saturated:
        return [served(task, system) for system in task.systems]
    recipe, systems = task.recipe, task.systems
    if recipe.coarse and len(systems) > 1:
        rough = task.search(seeds=1, tolerance=recipe.coarse)
        swept = searched(rough, systems, task.folder / "coarse", task.load, keep=True)
        guesses = {1e3 * tbt: best(swept, tbt) for tbt in {one.tbt for one in swept}}
    if not guesses:
        return searched(task.search(), systems, task.folder, task.load, keep=True)
    found: list[Found] = []
    for tbt in sorted(task.part.tbt, reverse=True):
        system, rate = guesses.get(round(tbt, 6), (systems[0], 0.0))
        chosen = [system] if recipe.best_simulated or recipe.coarse else systems
        asked = task.search(off * rate or None, tbt=(tbt,))
        found += searched(asked, chosen, task.folder / f"{tbt:g}ms", task.load, keep=True)
    return found


def served(task: Task, system: str) -> Found:
    """Return the requests served per second by a saturated system, of three patterns or more."""
    search = task.search()
    simulate, rates = contenders.simulation(search), []
    for seed in range(search.seed, search.seed + max(3, search.seeds)):
        workload = search.at(search.start_rate, seed)
        result, ended = simulate(system, workload, [{"tbt": search.slos["tbt"]}])
        rates.append(0.0 if ended else len(result.records) / result.duration)
    return Found(system, search.slos["tbt"], rates)


def best(found: Sequence[Found], tbt: float) -> tuple[str, float]:
    """Return the system that held most at a bound, the first of equals, and its median rate."""
    won = max((one for one in found if one.tbt == tbt), key=lambda one: one.median)
    return won.system, won.median


class Row(msgspec.Struct):
    """The result of one system of an engine at one bound."""

    engine: str
    turn: int
    """Place among the part's engines; one that is named twice has two."""
    found: Found
    rate: float
    """Median goodput in requests per second, of all replicas together."""
    speeds: dict[str, float] = {}
    """Speeds of its server, see `one_server.Measured`."""


def rows_of(
    task: Task, turn: int, found: Sequence[Found], speeds: dict[str, float] | None = None
) -> list[Row]:
    """Return an engine's results, those of every system, best first at each bound."""
    replicas = engine_of(task.recipe, task.engine).replicas
    ordered = sorted(found, key=lambda one: (one.tbt, -one.median))
    return [Row(task.engine, turn, one, one.median * replicas, speeds or {}) for one in ordered]


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return each engine's best goodput over that of the part's first engine, by bound."""
    named: dict[tuple[str, float], list[float]] = {}
    for (_, tbt), own in itertools.groupby(rows, lambda row: (row.turn, row.found.tbt)):
        first = next(own)
        if not first.found.interrupted:
            named.setdefault((first.engine, tbt), []).append(first.rate)
    medians = {key: statistics.median(rates) for key, rates in named.items()}
    against = rows[0].engine if rows else ""
    return {
        f"{engine} at {tbt * 1e3:g} ms": rate / medians[against, tbt]
        for (engine, tbt), rate in medians.items()
        if engine != against and medians.get((against, tbt))
    }


def expected(path: Path) -> dict[str, dict[float, tuple[str, float]]]:
    """Return the best system and its rate by engine and bound in ms, from a file of results."""
    if not path.exists():
        return {}
    rows = msgspec.convert(msgspec.json.decode(path.read_bytes())["rows"], list[Row])
    found: dict[str, dict[float, tuple[str, float]]] = {}
    for row in rows:
        bounds = found.setdefault(row.engine, {})
        bounds.setdefault(round(1e3 * row.found.tbt, 6), (row.found.system, row.found.median))
    return found


def write(task: Task, given: argparse.Namespace, rows: Sequence[Row], begun: float) -> None:
    """Write a part's file."""
    content = {
        "recipe": given.recipe,
        "part": task.name,
        "card": task.mode if given.served else f"{task.mode}d {task.part.gpu}",
        "seconds": time.monotonic() - begun,
        "ratios": ratios(rows),
        "rows": rows,
    }
    save(given.out / given.kind / f"{task.name}.json", provenance(task.part), content)
    for row in rows:
        if row.turn == rows[-1].turn:
            spread = " ".join(f"{rate:.2f}" for rate in row.found.goodput) or "interrupted"
            where = f"{task.name}, {row.engine}, {row.found.system}"
            print(f"{where} at {row.found.tbt * 1e3:g} ms: {spread}", flush=True)


def in_turn(tasks: Sequence[Task], given: argparse.Namespace) -> None:
    """Search one engine after the other, on a card, until one is interrupted."""
    begun, rows, off = time.monotonic(), [], 1.0
    hints = expected(given.out / f"simulated-{given.card}" / f"{tasks[0].name}.json")
    if tasks[0].recipe.one_server is not None:
        commands = [command_of(task, hints) for task in tasks]
        for turn, now in measure(commands, tasks[0].recipe.one_server, given.within):
            rows = [row for row in rows if row.turn != turn]
            rows += rows_of(tasks[turn], turn, now.found, now.speeds)
            if rows:
                write(tasks[turn], given, rows, begun)
        return
    for turn, task in enumerate(tasks):
        guesses = hints.get(task.engine, {})
        found = run(task, guesses, off)
        rows += rows_of(task, turn, found)
        write(task, given, rows, begun)
        pairs = [(one.median, guesses.get(round(1e3 * one.tbt, 6), ("", 0.0))[1]) for one in found]
        if not turn and all(min(pair) > 0 for pair in pairs):
            off = statistics.fmean(held / guess for held, guess in pairs)
        if any(one.interrupted for one in found):
            return


def command_of(task: Task, hints: Mapping[str, Any]) -> Contender:
    """Return the command of an engine's only server, and its search at each bound."""
    target, guesses, [system, *_] = task.target, hints.get(task.engine, {}), task.systems
    words = contenders.system_flags(system)
    own = f"{sys.executable} -m twolane serve --no-capture-when-idle {target.get('serve')}"
    command = str(target.get("command") or own)
    searches = {
        tbt: task.search(guesses.get(round(tbt, 6), ("", None))[1], tbt=(tbt,))
        for tbt in task.part.tbt
    }
    if playout := task.part.rest.get("playout"):  # never two buffers
        words += ["--tbt-buffer-at", "client", f"--tbt-buffer-ms={playout * 1e3:g}"]
    added = [] if "command" in target else words
    return Contender(task.engine, command, added, searches, task.folder, task.load)


def side_by_side(tasks: Sequence[Task], given: argparse.Namespace) -> None:
    """Search all engines of a part in simulation, several at a time."""
    begun, rows = time.monotonic(), []
    with multiprocessing.get_context("spawn").Pool(min(given.processes, len(tasks))) as pool:
        jobs = [(task, {}, 1.0) for task in tasks]
        for turn, found in enumerate(pool.imap(_quietly, jobs)):
            rows += rows_of(tasks[turn], turn, found)
            write(tasks[turn], given, rows, begun)


def _quietly(job: tuple[Task, dict[float, tuple[str, float]], float]) -> list[Found]:
    """Search in a process of a pool."""
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(None):
        return run(*job)


def on_gpus(names: Sequence[str], given: argparse.Namespace) -> None:
    """Run each part on one of several GPUs, with its share of the CPUs.

    All engines of a part run on the same GPU, since cards differ.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    threads = [
        threading.Thread(target=_worker, args=(place, gpu, waiting, stop, given))
        for place, gpu in enumerate(given.gpus)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _worker(
    place: int,
    gpu: int,
    waiting: "queue.SimpleQueue[str]",
    stop: threading.Event,
    given: argparse.Namespace,
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // len(given.gpus)
    own = cpus[share * place : share * (place + 1)]
    words = [word for word in sys.argv[1:] if word not in given.parts]
    words = [*words[: words.index("--gpus")], *words[words.index("--gpus") + 1 + len(given.gpus) :]]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    with contextlib.suppress(queue.Empty):
        while not stop.is_set():
            name = waiting.get_nowait()
            command = [sys.executable, __file__, *words[:1], name, *words[1:]]
            with subprocess.Popen(command, env=environment, start_new_session=True) as process:
                if own:
                    os.sched_setaffinity(process.pid, own)
                while process.poll() is None and not stop.wait(0.2):
                    pass
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)


def draw(folder: Path, path: Path) -> None:
    """Draw goodput against the bound, axes a part, of every file of results in a folder."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    files = sorted(folder.glob("*.json"))
    height = -(-len(files) // 2)
    figure, axes = pyplot.subplots(height, 2, squeeze=False, figsize=(10, 3.4 * height))
    for ax, file in itertools.zip_longest(axes.flat, files):
        if file is None:
            ax.set_visible(False)
            continue
        for place, (engine, bounds) in enumerate(expected(file).items()):
            points = sorted((tbt, rate) for tbt, (_, rate) in bounds.items())
            style = {"marker": "os^vD<>Px*"[place % 10], "color": f"C{place}"}
            if engine == "auto":
                style |= {"color": "black", "linewidth": 2.5}
            ax.plot(*zip(*points, strict=True), label=engine, **style)
        ax.set(title=file.stem, xlabel="P99 TBT SLO (ms)", ylabel="requests/s", ylim=(0, None))
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=5)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)


def value_of(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE, a value as TOML writes it or a plain text."""
    key, _, value = text.partition("=")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def options() -> argparse.Namespace:
    """Parse the command line."""
    names = ", ".join(path.stem for path in sorted((HERE / "recipes").glob("*.toml")))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("recipe", help=f"name or file of a recipe: {names}")
    add("parts", nargs="*", metavar="PART", help="names or patterns; by default all parts")
    add("--simulate", nargs="?", const="", metavar="GPU", help="h100, h200, …; by default a part's")
    add("--emulate", nargs="?", const="", metavar="GPU", help="a GPU whose profiles are shipped")
    add("--engines", nargs="+", help="these engines, or systems, instead of the recipe's")
    add("--set", nargs="+", default=[], type=value_of, metavar="KEY=VALUE")
    add("--card", default="h200", help="name of the GPU in the files")
    add("--gpus", type=int, nargs="+", help="run as many parts at a time, one on each GPU")
    add("--processes", type=int, default=2, help="searches at a time in simulation")
    add("--within", type=float, default=0.0, help="seconds after which a search is cut; 0: never")
    add("--figure", type=Path, help="draw the results on file to this PNG; search nothing")
    add("--work", type=Path, help="folder of the runs; by default RECIPE-work")
    add("--out", type=Path, help="folder of the results; by default results/RECIPE")
    given = parser.parse_args()
    given.set = dict(given.set)
    gpu = given.simulate if given.simulate is not None else given.emulate
    given.served = gpu is None
    given.mode = given.card if given.served else "simulate" if given.emulate is None else "emulate"
    if gpu:
        given.set["gpu"] = gpu
    given.kind = given.card if given.served else f"{given.mode}d-{gpu or given.card}"
    given.file = Path(given.recipe)
    if not given.file.suffix:
        given.file = HERE / "recipes" / f"{given.recipe}.toml"
    given.work = given.work or Path(f"{given.file.stem}-work")
    given.out = given.out or HERE / "results" / given.file.stem
    return given


def main() -> None:
    """Search the parts that are asked for, and write a file for each."""
    given = options()
    if given.figure:
        draw(given.out / given.kind, given.figure)
        return
    recipe = msgspec.toml.decode(given.file.read_bytes(), type=Recipe)
    names = [n for n in recipe.parts if not given.parts or any(fnmatch(n, p) for p in given.parts)]
    if not names:
        raise SystemExit(f"no such part; there are: {', '.join(recipe.parts)}")
    if given.gpus:
        on_gpus(names, given)
        return
    for name in names:
        part = part_of(recipe, name, given)
        asked = part.engines if given.served else tuple(dict.fromkeys(part.engines))
        runnable = [one for one in asked if given.served or not engine_of(recipe, one).command]
        folder = given.work / given.kind / name
        tasks = [
            Task(recipe, name, part, one, given.mode, folder / f"{turn}-{goodput.file_name(one)}")
            for turn, one in enumerate(runnable)
        ]
        (in_turn if given.served else side_by_side)(tasks, given)


if __name__ == "__main__":
    main()
