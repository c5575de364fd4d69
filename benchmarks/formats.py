"""Goodput of `auto` with FP8 and bfloat16 on one GPU: `python benchmarks/formats.py`.

`--simulate h200` comes first, on a CPU: it writes what is to be expected, and where the searches on
the GPU begin. Then the same command without it. Both formats have the same patterns of arrivals.
The file in `--out` grows with each format; runs stay in `--work`, and the same command goes on.
"""

import argparse
import itertools
import time
from pathlib import Path

import msgspec
from searches import WARMUPS, Bounds, Found, search, searched

from twolane.results.provenance import provenance, save
from twolane.results.result import BenchConfig
from twolane.workload.spec import WorkloadSpec

FORMATS = {"bf16": {}, "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"}}
"""The settings of each format, by the engine's names."""
MODEL, DATASET, MAX_PROMPT_TOKENS = "qwen3-8b", "azure-conv", 12_000
START = {"bf16": 22.0, "fp8": 44.0}
"""Start rates of simulated searches in requests/s."""


def main() -> None:
    """Search each format at each bound and write the file."""
    given = _options()
    kind = f"simulated-{given.simulate}" if given.simulate else given.card
    path = given.out / f"formats-{kind}.json"
    expected, found = _expected(given), []
    begun = time.monotonic()
    for tbt, form in itertools.product(given.bounds, given.formats):
        guess = given.start.get(form) or expected.get((form, tbt)) or START[form]
        found.append({"format": form, "found": _one(form, tbt, guess, given)})
        content = {
            "card": kind,
            "seconds": time.monotonic() - begun,
            "prompts": given.prompts,
            "tolerance": given.tolerance,
            "expected": [{"format": f, "tbt": t, "rate": r} for (f, t), r in expected.items()],
            "found": found,
        }
        save(path, provenance({"model": MODEL, "dataset": DATASET, "seeds": given.seeds}), content)
        print(f"{form} at {tbt:g} ms: {found[-1]['found'].goodput}", flush=True)


def _one(form: str, tbt: float, guess: float, given: argparse.Namespace) -> Found:
    """Search one format at a bound in milliseconds."""
    settings = FORMATS[form]
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
    target: dict[str, object] = {"serve": " ".join([given.model, given.flags, *flags])}
    if given.simulate:
        target = {"simulate": given.simulate, "model": MODEL, **settings}
    workload = WorkloadSpec(
        dataset=DATASET, num_prompts=given.prompts, max_input_len=MAX_PROMPT_TOKENS
    )
    asked = search(target, workload, Bounds((tbt / 1e3,)), guess, given.seeds, given.tolerance)
    load = BenchConfig(num_warmups=WARMUPS)
    [found] = searched(asked, ["auto"], given.work / f"{form}-{tbt:g}ms", load)
    return found


def _expected(given: argparse.Namespace) -> dict[tuple[str, float], float]:
    """Return the simulated requests/s of this GPU by format and bound, times `--off`."""
    path = given.out / f"formats-simulated-{given.card}.json"
    if given.simulate or not path.exists():
        return {}
    runs = msgspec.json.decode(path.read_bytes())["found"]
    return {
        (one["format"], 1e3 * one["found"]["tbt"]): min(one["found"]["goodput"]) for one in runs
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--simulate", metavar="GPU", help="search on a simulated GPU: h100 or h200")
    add("--card", default="h200", help="name of the GPU in the files")
    add("--bounds", nargs="+", type=float, default=[9.0], help="bounds on TBT in ms")
    add("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    add("--model", default=MODEL, help="model of the servers, for a trial")
    add("--flags", default="--load-format dummy --device cuda --max-model-len 16384",
        help="flags of the servers")  # fmt: skip
    add("--start", nargs="+", default=[], metavar="FORMAT:RATE",
        help="requests/s where searches begin, in place of what was simulated")  # fmt: skip
    add("--prompts", type=int, default=600, help="requests in a run")
    add("--seeds", type=int, default=2, help="patterns of arrivals")
    add("--tolerance", type=float, default=0.1,
        help="share by which the rate that fails may be above the one that holds")  # fmt: skip
    add("--work", type=Path, default=Path("formats-work"), help="folder of the runs")
    add("--out", type=Path, default=Path(__file__).parent / "results/formats")
    given = parser.parse_args()
    given.start = {form: float(rate) for form, rate in (each.split(":") for each in given.start)}
    return given


if __name__ == "__main__":
    main()
