"""Answers that need no server: of the device model, of estimators, and of measured profiles."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from study import Ask, Figures

from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.catalog import ESTIMATORS
from twolane.estimate.errors import held_out, predicted
from twolane.estimate.profile import SHIPPED, Profile
from twolane.lanes.work import DecodeRow, HybridWork, PrefillWork, PromptRow, Work
from twolane.model.shapes import SHAPES
from twolane.sim.fused_attention import FusedAttentionDevice
from twolane.sim.gpus import GPUS
from twolane.sim.profile import simulated_profile


@cache
def _device(gpu: str, model: str, tp: int) -> FusedAttentionDevice:
    return FusedAttentionDevice(GPUS[gpu], SHAPES[model], tp)


def seconds(work: Work, gpu: str, model: str, tp: int) -> float:
    """Return the seconds of a launch alone on all SMs: the mean of some, for the device has
    noise."""
    device, units = _device(gpu, model, tp), GPUS[gpu].units
    times = [sum(device.seconds([step])[0] for step in device.steps(work, units)) for _ in range(9)]
    return float(np.mean(times))


def chunk_costs(gpu: str, model: str, prompt: int, chunk: int) -> Figures:
    """Return prefill of a prompt by chunks (Bullet, Figure 5): the last chunk, and all, against
    whole."""
    layers = SHAPES[model].layers

    def prefill(new: int, reused: int) -> float:
        rows = (PromptRow(0, reused, new, samples=True),)
        return seconds(PrefillWork(0, rows, 0, layers, finishes=True), gpu, model, 1)

    each = [prefill(chunk, at) for at in range(0, prompt, chunk)]
    return {
        "last over first": each[-1] / each[0],
        "chunked over whole": sum(each) / prefill(prompt, 0),
    }


def budgets(gpu: str, model: str, tp: int) -> Figures:
    """Return TBT of hybrid passes by token budget (MuxWise, Figure 6): 32 requests decode at 1K."""
    rows = tuple(DecodeRow(slot, 1024, 1) for slot in range(32))

    def tbt(budget: int) -> float:
        prompt = PromptRow(40, 0, budget - len(rows), samples=True)
        return seconds(HybridWork(rows, (prompt,)), gpu, model, tp)

    return {f"budget {n}": tbt(n) for n in (256, 512, 1024, 2048, 4096, 8192)}


def contention(gpu: str, model: str) -> Figures:
    """Return by how much decode is slower beside prefill (MuxWise, Figure 11), from a profile.

    Args:
        gpu: The simulated GPU of the profile; empty: one of a card that ships.
        model: The model's name; of a card's profile the name of its file.
    """
    profile = _profile(gpu, model) if gpu else Profile.read(SHIPPED / f"{model}.json")
    alone = Calibrated(profile)
    samples = profile.of("decode", beside=True)
    slower = np.array(
        [s.median / (alone.predict(s.launch, s.units) or s.median) - 1 for s in samples]
    )
    wide = slower[[sample.units >= 32 for sample in samples]]
    return {
        "mean": float(slower.mean()),
        "P90": float(np.percentile(slower, 90)),
        "largest": float(slower.max()),
        "co-runs": float(len(slower)),
        "largest from 32 SMs": float(wide.max()),
    }


@cache
def _profile(gpu: str, model: str) -> Profile:
    return Profile.read(Path(simulated_profile(GPUS[gpu], SHAPES[model], 1)))


def errors(gpu: str, model: str) -> Figures:
    """Return the mean error of Bullet's estimator, also without its copies, and of one without
    contention (Bullet, Figure 11)."""
    profile = _profile(gpu, model)
    profiles = {"all samples": profile, "no copies beside products": _with(profile, contended=[])}
    fitted = {name: ESTIMATORS["sm-roofline"](some) for name, some in profiles.items()}
    fitted["contention ignored"] = ESTIMATORS["solo-run"](profile)
    found: Figures = {}
    for case, samples in held_out(profile).items():
        for name, estimator in fitted.items():
            off = [abs(predicted(estimator, s) / s.median - 1) for s in samples]
            found[f"{case}, {name}"] = float(np.mean(off))
    return found


def _with(profile: Profile, **changes: object) -> Profile:
    fields = {name: getattr(profile, name) for name in Profile.__struct_fields__}
    return Profile(**{**fields, **changes})


def ask(answer: Callable[..., Figures], gpu: str, *args: object) -> Ask:
    """Return a question with its arguments after the GPU's name."""
    return Ask(lambda name: answer(name, *args), gpu)
