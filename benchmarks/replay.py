"""A server on a GPU beside its simulation: `python benchmarks/replay.py --gpus 0 1 2 3`.

Three systems under two workloads, three minutes each, at 0.8 of their goodput or less: measured
with `twolane bench serve`, simulated with `twolane simulate`, the same requests at the same times.
What `--work` has is not done again. `--gpus` without a number only simulates. `--out` gets a file
for each replay.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpus
import msgspec

from twolane.bench.server import serving
from twolane.results.provenance import provenance, save

MODEL, SECONDS, SEED = "qwen3-8b", 180, 7
MAX_PROMPT_TOKENS = 32_768
"""Prompt tokens."""
DELIVERY_MS = 1.0
"""Milliseconds by which a server plans below the TBT bound, and a simulation does not: a twentieth
of it."""
KEYS = (
    *("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "mean_itl_ms"),
    *("request_throughput", "output_throughput", "total_cached_tokens", "total_input_tokens"),
    *("outcomes", "duration"),
)
"""Keys of a result; all but the last two are compared."""


class Replay(msgspec.Struct, frozen=True):
    """A system under a workload."""

    system: str
    options: tuple[str, ...]
    """Words of `twolane serve` and of `twolane simulate`."""
    dataset: str
    rate: float
    tbt_ms: float | None = None
    """TBT bound in milliseconds; None: the system uses no SLOs."""

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.system}-{self.dataset}"

    seconds: int = SECONDS

    @property
    def requests(self) -> list[str]:
        """Options of the workload."""
        return [
            *("--dataset", self.dataset, "--num-prompts", f"{round(self.rate * self.seconds)}"),
            *("--request-rate", f"{self.rate:g}", "--seed", f"{SEED}"),
            *("--max-input-len", f"{MAX_PROMPT_TOKENS}"),
        ]

    def serve(self) -> list[str]:
        """Return the arguments of `twolane serve`."""
        profile = gpus.profile(MODEL)
        return [
            *(MODEL, "--load-format", "dummy", "--device", "cuda", "--profile", profile),
            *self._served(0),
        ]

    @property
    def bench(self) -> list[str]:
        """Return the arguments of `twolane` without address and file."""
        own = [
            "--prompt-format",
            "ids",
            "--ignore-eos",
            "--save-result",
            "--num-warmups",
            f"{gpus.WARMUPS}",
        ]
        return ["bench", "serve", *own, *self.requests]

    @property
    def simulate(self) -> list[str]:
        """Return the arguments of `twolane` without the file."""
        return ["simulate", MODEL, "--gpu", "h200", *self.requests, *self._served(DELIVERY_MS)]

    def _served(self, spared_ms: float) -> list[str]:
        bounds = ["--slo-ttft-ms", "1000", "--slo-tbt-ms", f"{(self.tbt_ms or 0) - spared_ms:g}"]
        return [
            *(
                "--max-model-len",
                f"{MAX_PROMPT_TOKENS + 4096}",
                "--system",
                self.system,
                *self.options,
            ),
            *(bounds if self.tbt_ms else ()),
        ]


CHUNKED = ("--option", "token_budget=512")
REPLAYS = (
    Replay("auto", (), "azure-conv", 16, 21),
    Replay("chunked", CHUNKED, "azure-conv", 14),
    Replay("muxwise", (), "azure-conv", 14, 21),
    Replay("auto", (), "conversation", 0.9, 21),
    Replay("chunked", CHUNKED, "conversation", 0.4),
    Replay("muxwise", (), "conversation", 0.9, 21),
)


def measured(replay: Replay, work: Path) -> None:
    """Serve the model and run the load."""
    file, log = work / f"{replay.name}-measured.json", work / f"{replay.name}-server.txt"
    with serving(replay.serve(), log) as server:
        _twolane([*replay.bench, "--base-url", server.url], file)


def _twolane(words: Sequence[str], file: Path) -> None:
    """Run `twolane`; return its result without the lists of latencies."""
    part = file.with_suffix(".part")
    line = [sys.executable, "-m", "twolane", *words, "--result-file", str(part)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    result = msgspec.json.decode(part.read_bytes())
    file.write_bytes(msgspec.json.encode({key: result[key] for key in KEYS}))
    part.unlink()


class Compared(msgspec.Struct):
    """A replay's two results."""

    name: str
    serve: str
    bench: str
    simulate: str
    measured: dict[str, object]
    simulated: dict[str, object]


def compared(replay: Replay, work: Path) -> Compared | None:
    """Return the measured result, if any, and its simulation, made if missing."""
    real, made = work / f"{replay.name}-measured.json", work / f"{replay.name}-simulated.json"
    if not made.exists():
        _twolane(replay.simulate, made)
    if not real.exists():
        return None
    return Compared(
        replay.name,
        shlex.join(["twolane", "serve", *replay.serve()]),
        shlex.join(["twolane", *replay.bench]),
        shlex.join(["twolane", *replay.simulate]),
        msgspec.json.decode(real.read_bytes()),
        msgspec.json.decode(made.read_bytes()),
    )


def table(rows: Iterable[Compared]) -> str:
    """Return a table of measured and simulated values and their ratio."""
    lines = []
    for row in rows:
        cells = []
        for key in KEYS[:-2]:
            real, said = row.measured[key], row.simulated[key]
            assert isinstance(real, (int, float)) and isinstance(said, (int, float))
            off = f" {said / real - 1:+.0%}" if real else ""
            cells.append(f"{real:.4g} / {said:.4g}{off}")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Do the missing runs and write the file."""
    parser = gpus.options(__doc__, "replay-work", "replay-h200")
    parser.add_argument("--length", type=int, default=SECONDS, help="seconds of a replay")
    parser.add_argument("--only", nargs="+", help="only these replays")
    parser.add_argument("--one", choices=[r.name for r in REPLAYS], help="only measure this one")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    replays = [
        msgspec.structs.replace(each, seconds=given.length)
        for each in REPLAYS
        if given.only is None or each.name in given.only
    ]
    if given.one:
        [replay] = [each for each in replays if each.name == given.one]
        measured(replay, given.work)
        return
    here = ["--work", str(given.work)]
    here += ["--length", str(given.length)]
    groups = [
        [gpus.Command([__file__, "--one", replay.name, *here], given.work / f"{replay.name}.txt")]
        for replay in replays
        if not (given.work / f"{replay.name}-measured.json").exists()
    ]
    gpus.run(groups, given.gpus, given.seconds)
    with ThreadPoolExecutor(2) as pool:
        rows = pool.map(lambda each: compared(each, given.work), replays)
        found = [row for row in rows if row is not None]
    for row in found:
        about = provenance({"model": MODEL, "seconds": given.length, "seed": SEED})
        save(given.out / f"{row.name}.json", about, msgspec.to_builtins(row))
    print(table(found))


if __name__ == "__main__":
    main()
