"""The simulated GPU's parameters, from profiles: `python benchmarks/fit_device.py`.

Fits what `sim/gpus.toml` says of a card to the profiles of it that ship and, if it is there, to
what `gpu lanes` measured (`results/engine-CARD.json`), starting with what it says now, and writes
the parameters and how far off they are, on what was fitted and on the points that profiles hold
out. The parameters are then copied by hand.
"""

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import least_squares

from twolane.estimate.profile import SHIPPED, Neighbour, Profile, Sample
from twolane.estimate.query import Floats
from twolane.lanes.work import DecodeRow, DecodeWork, HybridWork, PrefillWork, PromptRow, Work
from twolane.model.shapes import SHAPES
from twolane.results.provenance import provenance, save
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import GPUS, Gpu

RESULTS = Path(__file__).parent / "results"
MODELS = "qwen3-8b", "codellama-34b"
OTHER = {"prefill": "decode", "decode": "prefill"}
FITTED = (
    *("bandwidth", "unit_bandwidth", "product_units", "power_units", "traffic_units"),
    *("power_exponent", "product_share", "prompt_attention_share", "decode_attention_share"),
    *("spill", "corner", "whole_corner", "step_corner", "one_grid", "attention_rows", "in_flight"),
    *("product_waits", "arithmetic_waits", "kernel_seconds", "pass_layer_seconds"),
    *("whole_layer_seconds", "split_seconds", "sampling_seconds"),
)
OUTLIER = 0.4
"""Bound on |log(model / measured)|, beyond which errors count no more."""
ANCHOR = 0.1
"""Penalty on the logarithm of a parameter's change, so that undetermined parameters keep their
value."""
DIGITS = 3


class Case(NamedTuple):
    """A profile's measurement, as work for the simulated lanes."""

    model: str
    what: str
    """Kinds of the launch and of its corunner."""
    running: Sequence[tuple[Work, int]]
    """Concurrent work with its units, the measured launch first."""
    seconds: float
    held_out: bool


def profiles(card: str) -> Mapping[str, Path]:
    """Return the shipped profiles of that GPU by model."""
    paths = {model: SHIPPED / f"{model}-{card}.json" for model in MODELS}
    return {model: path for model, path in paths.items() if path.exists()}


def cases(profiles: Mapping[str, Path]) -> list[Case]:
    """Return all samples of these models' profiles."""
    found = []
    for model, path in profiles.items():
        for sample in Profile.read(path).samples:
            what, running = f"{sample.kind} alone", [(_work(sample, sample.kind), sample.units)]
            if sample.beside is not None:
                other = OTHER[sample.kind]
                what = f"{sample.kind} beside {other}"
                running.append((_work(sample.beside, other), sample.beside.units))
            found.append(Case(model, what, running, sample.median, sample.held_out))
    return found


def figures(card: str) -> list[Case]:
    """Return the figures of `gpu lanes` on such a GPU; empty without its file."""
    path = RESULTS / f"engine-{card}.json"
    if not path.exists():
        return []
    content = msgspec.json.decode(path.read_bytes())
    rows = [
        row for row in content.get("rows", ()) if row["part"] in ("qwen3", "llama", "codellama")
    ]
    details = content.get("details") or {row["model"]: row for row in rows}
    alone = details["qwen3-8b"]
    found: list[Case] = []

    def add(model: str, seconds: float, *running: tuple[Work, int]) -> None:
        found.append(Case(model, "figures", running, seconds, held_out=False))

    for units, took in alone["decode_step_ms_64x2048"].items():
        add("qwen3-8b", took / 1e3, (_steps(64, 2048), int(units)))
    for units, rate in alone["prefill_tokens_s_8192"].items():
        add("qwen3-8b", 8192 / rate, (_prompt("qwen3-8b"), int(units)))
    chunk = PromptRow(0, 4096, 1024, samples=True)
    hybrid = HybridWork(_steps(64, 2048).rows, (chunk,))
    add("qwen3-8b", alone["hybrid_ms"]["pass"] / 1e3, (hybrid, 132))
    for model, rows in (("llama-3.1-8b", 64), ("codellama-34b", 32)):
        both = details[model]["both_lanes_84_48"]
        prefill, decode = (_prompt(model), 84), (_steps(rows, 2112), 48)
        add(model, 8192 / both["tokens_s"], prefill, decode)
        add(model, both["tbt_ms"]["50"] / 1e3, decode, prefill)
    return found


def _steps(rows: int, context: int) -> DecodeWork:
    return DecodeWork(tuple(DecodeRow(i, context, 1) for i in range(rows)), 1)


def _prompt(model: str) -> PrefillWork:
    row = PromptRow(0, 0, 8192, samples=True)
    return PrefillWork(0, (row,), 0, SHAPES[model].layers, True)


def _work(sample: Sample | Neighbour, kind: str) -> Work:
    """Return the work of a launch; beside another lane's, a slice of any length will do."""
    rows = [(n, r) for n, r, count in sample.runs for _ in range(count)]
    steps = tuple(DecodeRow(0, r, 1) for n, r in rows if n == 1)
    prompts = tuple(PromptRow(0, r, n, samples=True) for n, r in rows if n > 1)
    if kind == "decode":
        return DecodeWork(steps, 1)
    if kind == "hybrid":
        return HybridWork(steps, prompts)
    layers = sample.layers if isinstance(sample, Sample) else 1
    finishes = isinstance(sample, Sample) and sample.finishes
    return PrefillWork(0, prompts, 0, layers, finishes)


def errors(gpu: Gpu, cases: Sequence[Case]) -> Floats:
    """Return log(model / measured) of each case, without noise."""
    quiet = msgspec.structs.replace(gpu, noise=0.0)
    devices = {model: DeviceModel(quiet, SHAPES[model]) for model in {case.model for case in cases}}
    found = []
    for case in cases:
        device = devices[case.model]
        demands = [device.steps(work, units)[0] for work, units in case.running]
        found.append(math.log(device.seconds(demands)[0] / case.seconds))
    return np.array(found)


def fit(gpu: Gpu, cases: Sequence[Case]) -> Gpu:
    """Return the least-squares parameters; models and kinds have equal weight."""
    kinds = [case.what if case.what == "figures" else (case.model, case.what) for case in cases]
    weights = 1.0 / np.sqrt([Counter(kinds)[kind] for kind in kinds])

    def changed(logs: Floats) -> Gpu:
        values = {
            name: float(getattr(gpu, name) * math.exp(log))
            for name, log in zip(FITTED, logs, strict=True)
        }
        return msgspec.structs.replace(gpu, **values)

    def missed(logs: Floats) -> Floats:
        clipped = np.clip(errors(changed(logs), cases), -OUTLIER, OUTLIER)
        return np.concatenate([weights * clipped, ANCHOR * logs])

    found = changed(least_squares(missed, np.zeros(len(FITTED)), diff_step=1e-3).x)
    rounded = {name: float(f"{getattr(found, name):.{DIGITS}g}") for name in FITTED}
    return msgspec.structs.replace(found, **rounded)


def table(gpu: Gpu, cases: Sequence[Case]) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """Return a table by model and kind: number of samples, bias and mean error in percent."""
    found: dict[str, dict[str, list[float]]] = {}
    missed = errors(gpu, cases)
    for case, error in zip(cases, missed.tolist(), strict=True):
        found.setdefault(case.model, {}).setdefault(case.what, []).append(100 * error)
    return {
        model: {
            what: (len(all_of), statistics.fmean(all_of), statistics.fmean(map(abs, all_of)))
            for what, all_of in each.items()
        }
        for model, each in found.items()
    }


def main() -> None:
    """Fit, print, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--card", choices=GPUS, default="h200", help="what profiles are of")
    parser.add_argument("--out", type=Path, help="by default device-CARD.json in results")
    given = parser.parse_args()
    card, shipped = given.card, profiles(given.card)
    if not shipped:
        parser.error(f"--card: no profile of {card} ships; `twolane profile` takes one")
    measured = cases(shipped)
    fitted = [*figures(card), *(case for case in measured if not case.held_out)]
    gpu = fit(GPUS[card], fitted)
    for name in FITTED:
        print(f"    {name}={getattr(gpu, name):g},")
    tables = {
        "fitted to": table(gpu, fitted),
        "held out": table(gpu, [case for case in measured if case.held_out]),
    }
    for samples, by_model in tables.items():
        for model, rows in by_model.items():
            for what, (n, bias, mean) in rows.items():
                print(f"{samples}: {model}, {what}: {n} samples, {bias:+.1f} %, {mean:.1f} %")
    parameters = {name: getattr(gpu, name) for name in FITTED}
    about = provenance([path.name for path in shipped.values()])
    out = given.out or RESULTS / f"device-{card}.json"
    save(out, about, {"parameters": parameters, "samples_bias_mean_percent": tables})


if __name__ == "__main__":
    main()
