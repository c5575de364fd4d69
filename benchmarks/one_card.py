"""Every system on one card, as ratios to `auto`: `python benchmarks/one_card.py [PART ...]`.

A part is a model, a workload and a bound on TBT. Each part runs on one card, from `auto` over all
other systems to `auto` again, with the same patterns of arrivals; whoever runs beside it spoils it.
A system is not searched from scratch: its search begins where simulation expects the answer, times
what `auto` was off by, and tries two or three rates. So `--simulate` comes first, on a CPU; then
the same command without it, on a GPU. Runs stay in `--work`: an ended part goes on with the same
command. `--out` gets a file a part, which grows with each system.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from searches import WARMUPS, Bounds, Found, search, searched

from twolane.results.provenance import provenance, save
from twolane.results.result import BenchConfig
from twolane.workload.prompts import TokenRange
from twolane.workload.spec import WorkloadSpec

RESULTS = Path(__file__).parent / "results"
SYSTEMS = (
    *("drift", "muxwise", "bullet", "duetserve"),
    *("chunked:token_budget=256", "chunked:token_budget=512", "chunked:token_budget=1024"),
    *("static-split:decode_units=32", "static-split:decode_units=48", "temporal"),
)
MAX_PROMPT_TOKENS = 12_000
"""Tokens to which longer prompts are cut."""


class Part(msgspec.Struct, frozen=True):
    """One model under one workload and one bound."""

    model: str
    dataset: str
    tbt_ms: float
    start: float
    """Requests/s where the simulated search for `auto` begins."""
    prompts: int
    """Requests in a run."""

    @property
    def name(self) -> str:
        return f"{self.model}-{self.dataset}-{self.tbt_ms:g}ms"


PARTS = (
    Part("qwen3-8b", "azure-conv", 12, 18, 600),
    Part("qwen3-8b", "azure-code", 12, 14, 600),
    Part("qwen3-8b", "azure-conv", 21, 22, 600),
    Part("qwen3-8b", "azure-code", 21, 18, 600),
    Part("qwen3-30b-a3b", "azure-conv", 20, 10, 600),
    Part("qwen3-30b-a3b", "azure-conv", 30, 16, 600),
)
"""The order in which a session runs them: what differs most comes first. The bounds suit an H200;
on an H100 `--bounds 15 30` suit."""


def part_files(folder: Path, parts: Sequence[Part]) -> dict[str, dict[str, float]]:
    """Return the median goodput by part and system in a folder of results."""
    found = {}
    for part in parts:
        if (path := folder / f"{part.name}.json").exists():
            content = msgspec.json.decode(path.read_bytes())
            found[part.name] = {
                one["system"]: statistics.median(one["goodput"]) for one in content["found"]
            }
    return found


def run(
    part: Part,
    target: dict[str, object],
    guesses: dict[str, float],
    given: argparse.Namespace,
) -> Iterator[list[Found]]:
    """Run `auto`, the others, and `auto` again unless it would only repeat; return the results so
    far."""
    workload = WorkloadSpec(
        dataset=part.dataset,
        num_prompts=given.prompts or part.prompts,
        max_input_len=given.longest,
    )
    bounds = Bounds((part.tbt_ms / 1e3,))
    off = 1.0

    def one(system: str, turn: str) -> Found:
        guess = off * (guesses.get(system) or part.start)
        asked = search(target, workload, bounds, guess, given.seeds, given.tolerance)
        load = BenchConfig(num_warmups=WARMUPS, vocab_range=given.vocab_range)
        [answer] = searched(asked, [system], given.work / part.name / turn, load, keep=True)
        return answer

    found = [one("auto", "auto-before")]
    yield found
    if guesses.get("auto") and found[0].median:
        off = found[0].median / guesses["auto"]
    for system in given.systems:
        if found[-1].interrupted:
            return
        found.append(one(system, system.replace(":", "-").replace("=", "-")))
        yield found
    if "simulate" not in target and not given.once and not found[-1].interrupted:
        found.append(one("auto", "auto-after"))
        yield found


def ratios(found: Sequence[Found]) -> dict[str, float]:
    """Return the median goodput of each system over that of `auto`, before and after the others."""
    own = [rate for one in found if one.system == "auto" for rate in one.goodput]
    auto = statistics.median(own or [0.0])
    others = [one for one in found[1:] if one.system != "auto" and not one.interrupted]
    return {one.system: one.median / auto for one in others if auto}


def moved(found: Sequence[Found]) -> float | None:
    """Return the goodput of `auto` after the others over that before; None: it ran once, or held
    none."""
    ended = [one.median for one in found if one.system == "auto" and not one.interrupted]
    return ended[1] / ended[0] if len(ended) > 1 and ended[0] else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="by name; by default all")
    add("--simulate", metavar="GPU", help="search on a simulated GPU: h100 or h200")
    add("--card", default="h200", help="name of the GPU in the files")
    add("--flags", default="--load-format dummy --device cuda --max-model-len 16384",
        help="flags of the servers")  # fmt: skip
    add("--model", help="model of the servers in place of the part's, for a trial")
    add("--bounds", nargs="+", type=float, help="bounds on TBT in ms in place of the parts' own")
    add("--systems", nargs="*", default=SYSTEMS, help="these beside auto, or none")
    add("--prompts", type=int, help="requests in a run; by default the part's")
    add("--longest", type=int, default=MAX_PROMPT_TOKENS, help="tokens to which prompts are cut")
    add("--vocab-range", type=TokenRange.parse, default=TokenRange(), metavar="LOW:HIGH",
        help="token ids to draw prompts from")  # fmt: skip
    add("--seeds", type=int, default=2, help="patterns of arrivals")
    add("--tolerance", type=float, default=0.1,
        help="share by which the rate that fails may be above the one that holds")  # fmt: skip
    add("--once", action="store_true", help="do not run auto again after the others")
    add("--work", type=Path, default=Path("one-card-work"), help="folder of the runs")
    add("--out", type=Path, default=RESULTS / "one-card", help="folder of the results")
    given = parser.parse_args()
    given.chosen = PARTS
    if given.bounds:
        places = {(p.model, p.dataset): p for p in PARTS}
        given.chosen = tuple(
            msgspec.structs.replace(part, tbt_ms=tbt)
            for tbt in given.bounds
            for part in places.values()
        )
    names = [part.name for part in given.chosen]
    if unknown := [name for name in given.parts if name not in names]:
        parser.error(f"no such part: {', '.join(unknown)}; there are: {', '.join(names)}")
    return given


def main() -> None:
    """Run each part and write its file."""
    given = _options()
    parts = [p for p in given.chosen if not given.parts or p.name in given.parts]
    guesses = {} if given.simulate else part_files(given.out / "simulated", parts)
    for part in parts:
        target: dict[str, object] = {"serve": f"{given.model or part.model} {given.flags}"}
        if given.simulate:
            target = {"simulate": given.simulate, "model": part.model}
        begun = time.monotonic()
        for found in run(part, target, guesses.get(part.name, {}), given):
            _save(part, found, time.monotonic() - begun, given)
        print(f"{part.name}, {time.monotonic() - begun:.0f} s, auto moved by {moved(found)}")
        for system, ratio in ratios(found).items():
            print(f"  {system}: {ratio:.2f}")


def _save(part: Part, found: Sequence[Found], seconds: float, given: argparse.Namespace) -> None:
    """Write the part's file."""
    about = provenance({"part": part, "seeds": given.seeds, "flags": given.flags})
    content = {
        "card": f"simulated {given.simulate}" if given.simulate else given.card,
        "seconds": seconds,
        "tolerance": given.tolerance,
        "prompts": given.prompts or part.prompts,
        "auto_moved": moved(found),
        "ratios": ratios(found),
        "found": found,
    }
    kind = "simulated" if given.simulate else given.card
    save(given.out / kind / f"{part.name}.json", about, content)


if __name__ == "__main__":
    main()
