"""Fits what several ranks add to the simulated H200's passes: `python benchmarks/fit_ranks.py`.

Fits how fast products are whose rows 128 does not divide, and how long kernels of a pass wait
after a sum, to hybrid passes of Qwen3-14B on two H200s, with all sums and with none
(`benchmarks/gpu/ranks.py`). Passes of 256 and 384 tokens and all that reuse a prefix are held out.
Writes the parameters and how far off every pass is before and after; they are copied by hand.
"""

import argparse
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import least_squares

from twolane.estimate.query import Floats
from twolane.kernels.sizes import SIZES
from twolane.lanes.work import DecodeRow, HybridWork, PromptRow
from twolane.model.shapes import SHAPES
from twolane.results.provenance import provenance, save
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import GPUS, Gpu

H200 = GPUS["h200"]

RESULTS = Path(__file__).parent / "results"
FILES = {
    "summed": "ranks-qwen3-14b-2xh200-auto-passes.json",
    "alone": "ranks-qwen3-14b-2xh200-alone-passes.json",
}
MODEL, RANKS, UNITS = "qwen3-14b", 2, 132
ROWS, CONTEXT = 10, 2048
"""Decode rows of every pass, and tokens that each of them reads."""
FITTED = (192, 320, 512)
"""Tokens of the fitted passes without reused tokens."""
BEFORE = {"bulk_bytes": math.inf, "pass_behind_seconds": 2.0e-6, "half_tile_share": 0.0}
"""Parameters that restore the earlier formulas."""
NAMES = "half_tile_share", "pass_behind_seconds"


class Pass(NamedTuple):
    """A hybrid pass by its tokens, decode rows included, and its prompt's reused tokens."""

    tokens: int
    reused: int

    @property
    def work(self) -> HybridWork:
        """The pass as work for the simulated lanes."""
        rows = tuple(DecodeRow(i, CONTEXT, 1) for i in range(ROWS))
        prompt = PromptRow(0, self.reused, self.tokens - ROWS, samples=True)
        return HybridWork(rows, (prompt,))

    @property
    def fitted(self) -> bool:
        """Whether it is among the fitted passes."""
        return self.tokens in FITTED and not self.reused


Seconds = Mapping[Pass, tuple[float, float]]
"""Seconds of each pass without and with all-reduces."""


def measured() -> Seconds:
    """Return the passes that were measured."""
    took = {
        name: msgspec.json.decode((RESULTS / file).read_bytes())["figures"]["hybrid_ms"]
        for name, file in FILES.items()
    }
    return {
        Pass(*(int(part) for part in name.split(" on "))): (alone / 1e3, took["summed"][name] / 1e3)
        for name, alone in took["alone"].items()
    }


def simulated(gpu: Gpu, passes: Seconds) -> Seconds:
    """Return the device model's seconds of the same passes, without noise."""
    found: dict[Pass, tuple[float, float]] = {}
    for summed in (False, True):
        changed = {"noise": 0.0}
        if not summed:
            none = dict.fromkeys(("link_seconds", "hop_seconds", "bulk_seconds"), 0.0)
            none |= {"behind_seconds": 0.0, "pass_behind_seconds": 0.0}
            changed |= none | {"link_bandwidth": math.inf}
        own = msgspec.structs.replace(gpu, **changed)
        device = DeviceModel(own, SHAPES[MODEL], RANKS, pass_sizes=SIZES)
        for each in passes:
            [seconds] = device.seconds([device.steps(each.work, UNITS)[0]])
            found[each] = (found[each][0], seconds) if summed else (seconds, 0.0)
    return found


def fit(gpu: Gpu, passes: Seconds) -> Gpu:
    """Return the least-squares parameters: first of the passes without all-reduces, then of
    these."""
    fitted = {each: seconds for each, seconds in passes.items() if each.fitted}

    def changed(logs: Floats) -> Gpu:
        values = {n: getattr(gpu, n) * math.exp(x) for n, x in zip(NAMES, logs, strict=True)}
        return msgspec.structs.replace(gpu, **values)

    def missed(logs: Floats) -> Floats:
        model = simulated(changed(logs), fitted)
        alone = [math.log(model[each][0] / seconds[0]) for each, seconds in fitted.items()]
        sums = [
            math.log((model[each][1] - model[each][0]) / (summed - alone))
            for each, (alone, summed) in fitted.items()
        ]
        return np.array([*alone, *sums])

    found = changed(least_squares(missed, np.zeros(len(NAMES)), diff_step=1e-2).x)
    rounded = {name: float(f"{getattr(found, name):.2g}") for name in NAMES}
    return msgspec.structs.replace(found, **rounded)


def table(gpu: Gpu, passes: Seconds) -> list[dict[str, object]]:
    """Return a table of each pass's milliseconds, measured and modelled, and the error in
    percent."""
    sums, model = 2 * SHAPES[MODEL].layers, simulated(gpu, passes)
    rows: list[dict[str, object]] = []
    for each, seconds in passes.items():
        row: dict[str, object] = {**each._asdict(), "fitted": each.fitted}
        for name, was, says in zip(("alone", "summed"), seconds, model[each], strict=True):
            row |= {
                f"{name}_measured_ms": round(was * 1e3, 2),
                f"{name}_model_ms": round(says * 1e3, 2),
                f"{name}_off_percent": round(100 * (says / was - 1), 1),
            }
        for name, (alone, summed) in (("measured", seconds), ("model", model[each])):
            row[f"sum_{name}_us"] = round((summed - alone) / sums * 1e6, 1)
        rows.append(row)
    return rows


def means(rows: list[dict[str, object]]) -> dict[str, float]:
    """Return the mean absolute errors in percent of the fitted passes and of the others."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name in ("alone", "summed"):
            kind = f"{name}, {'fitted' if row['fitted'] else 'held out'}"
            found.setdefault(kind, []).append(abs(float(str(row[f"{name}_off_percent"]))))
    return {kind: round(statistics.fmean(each), 1) for kind, each in found.items()}


def main() -> None:
    """Fit, print, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "device-ranks-h200.json")
    out = parser.parse_args().out
    passes = measured()
    gpu = fit(msgspec.structs.replace(H200, half_tile_share=0.7), passes)
    tables = {
        "before": table(msgspec.structs.replace(H200, **BEFORE), passes),
        "after": table(gpu, passes),
    }
    parameters = {name: getattr(gpu, name) for name in (*NAMES, "bulk_bytes")}
    print(parameters)
    for name, rows in tables.items():
        print(name, means(rows))
        for row in rows:
            print("   ", *row.values())
    found = {"parameters": parameters, "mean_off_percent": {n: means(r) for n, r in tables.items()}}
    save(out, provenance(list(FILES.values())), {**found, "passes": tables})


if __name__ == "__main__":
    main()
