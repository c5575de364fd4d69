"""Predictions of the simulator before anything is measured: `python benchmarks/predictions.py
[--goodput]`.

Llama-3.1-70B on eight H100s and H200s (decode step, prefill, goodput with Tool&Agent), the steps
and prefill of the papers' other models there, and two
figures of the papers that the device model was not fitted on: MuxWise's token budget (Fig. 6) and
Bullet's cost of chunks (§2.3.2, Fig. 5). docs/notes has what came out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from twolane.bench import contenders, goodput
from twolane.bench.goodput import Search
from twolane.engine.config import EngineConfig
from twolane.lanes.work import DecodeRow, DecodeWork, HybridWork, PrefillWork, PromptRow, Work
from twolane.model.shapes import SHAPES
from twolane.results.provenance import provenance, save
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import GPUS
from twolane.sim.machine import storage_of
from twolane.workload.spec import WorkloadSpec

OUT = Path(__file__).parent / "results" / "predictions.json"
SYSTEMS = ("auto", "chunked:token_budget=256/512/1024/2048", "muxwise", "drift")
LARGE = "llama-3.1-70b"


class Simulated:
    """A device model without noise for single launches.

    Args:
        gpu: its name.
        model: the model's name.
        tp: number of ranks.
        quantization: that of `EngineConfig`.
    """

    def __init__(self, gpu: str, model: str, tp: int, quantization: str | None = None) -> None:
        quiet = msgspec.structs.replace(GPUS[gpu], noise=0.0)
        spec, config = SHAPES[model], EngineConfig(model=model, quantization=quantization)
        self._units, self._layers = quiet.units, spec.layers
        self._device = DeviceModel(quiet, spec, tp, storage=storage_of(config, spec))

    def decode(self, rows: int, context: int) -> float:
        """Return the seconds of a step."""
        return self._seconds(DecodeWork(_rows(rows, context), 1))

    def prefill(self, new: int, reused: int = 0) -> float:
        """Return the seconds of a prompt."""
        return self._seconds(PrefillWork(0, _prompt(new, reused), 0, self._layers, True))

    def hybrid(self, budget: int, rows: int, context: int, reused: int = 0) -> float:
        """Return the seconds of a pass of this many tokens, the decode rows included."""
        return self._seconds(HybridWork(_rows(rows, context), _prompt(budget - rows, reused)))

    def _seconds(self, work: Work) -> float:
        [seconds] = self._device.seconds([self._device.steps(work, self._units)[0]])
        return seconds


def _rows(count: int, context: int) -> tuple[DecodeRow, ...]:
    return tuple(DecodeRow(i, context, 1) for i in range(count))


def _prompt(new: int, reused: int) -> tuple[PromptRow, ...]:
    return (PromptRow(0, reused, new, samples=True),)


def launches() -> dict[str, float]:
    """Return milliseconds of single launches, tokens/s of prompts, and ratios."""
    found = {}
    for gpu in ("h100", "h200"):
        eight = Simulated(gpu, LARGE, 8)
        found[f"{gpu} x8, step of 64 x 2K, ms"] = 1e3 * eight.decode(64, 2048)
        found[f"{gpu} x8, prefill of 8K, tokens/s"] = 8192 / eight.prefill(8192)
        for model, scheme in (("qwen3-32b", None), ("qwen3-235b-a22b", "fp8")):
            other, name = Simulated(gpu, model, 8, scheme), f"{model} {scheme or 'bf16'}, {gpu} x8"
            found[f"{name}, step of 64 x 2K, ms"] = 1e3 * other.decode(64, 2048)
            found[f"{name}, prefill of 8K, tokens/s"] = 8192 / other.prefill(8192)
    a100 = Simulated("a100-80gb", LARGE, 8)
    for budget in (256, 512, 1024, 2048, 4096):
        found[f"MuxWise Fig. 6a, budget {budget}, ms"] = 1e3 * a100.hybrid(budget, 32, 1024)
    for reused in (1024, 4096, 16_384, 32_768):
        for budget in (256, 512):
            name = f"MuxWise Fig. 6b, budget {budget} on {reused}, ms"
            found[name] = 1e3 * a100.hybrid(budget, 32, 1024, reused)
    one = Simulated("a100-80gb", "llama-3.1-8b", 1)
    chunks = [one.prefill(1024, 1024 * i) for i in range(16)]
    found["Bullet Fig. 5, last chunk over first"] = chunks[-1] / chunks[0]
    found["Bullet Fig. 5, chunks over whole prompt"] = sum(chunks) / one.prefill(16 * 1024)
    return found


def search(gpu: str, prompts: int) -> Search:
    """Return the search for 70B on eight GPUs under Drift's and MuxWise's bounds."""
    return Search(
        target={"simulate": gpu, "model": LARGE, "tp": 8},
        workload=WorkloadSpec(dataset="toolagent", num_prompts=prompts),
        slos={"ttft": 1.0, "ttft_per_1k": 1.0, "tbt": 0.1},
        start_rate=2.0,
        least_rate=0.25,
        tolerance=0.09,
        brief=prompts < goodput.LEAST_REQUESTS,
    )


def rates(gpu: str, prompts: int, systems: Sequence[str], work: Path) -> dict[str, float]:
    """Return requests a second by system."""
    asked = search(gpu, prompts)
    names = [variant for one in systems for variant in goodput.variants(one)]
    run, reads = contenders.simulation(asked), contenders.reads_slos
    [found] = goodput.find(asked, names, run, work / gpu, reads_slos=reads)
    return {name: each[0] for name, each in found.items()}


def main() -> None:
    """Predict, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goodput", action="store_true", help="search goodput, too: many minutes")
    parser.add_argument("--gpus", nargs="+", default=["h200", "h100"])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--prompts", type=int, default=600, help="requests in a run")
    parser.add_argument("--work", type=Path, default=Path("predictions-work"))
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    about = provenance({gpu: search(gpu, asked.prompts) for gpu in asked.gpus})
    figures: dict[str, object] = {"simulated": True, "launches": launches()}
    found: dict[str, dict[str, float]] = {}
    for gpu in asked.gpus if asked.goodput else ():
        found[gpu] = rates(gpu, asked.prompts, asked.systems, asked.work)
        save(asked.out, about, {**figures, "goodput": found})
    save(asked.out, about, {**figures, "goodput": found})
    print(msgspec.json.format(asked.out.read_bytes()).decode())


if __name__ == "__main__":
    main()
