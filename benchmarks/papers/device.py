"""Answers that need no server: of the device model, of estimators, and of a cache's size."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
from study import Ask, Figures

from twolane.estimate.catalog import ESTIMATORS
from twolane.estimate.errors import predicted
from twolane.estimate.profile import Profile, Sample
from twolane.estimate.query import LaunchShape, Load
from twolane.lanes.work import DecodeRow, DecodeWork, HybridWork, PrefillWork, PromptRow, Work
from twolane.model.shapes import SHAPES
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import GPUS
from twolane.sim.profile import simulated_profile
from twolane.workload.papers import WORKLOADS
from twolane.workload.traces import TraceRequest

STEP = 2
"""Fewest SMs that are tried."""
NEAR = 0.01
"""Fraction of the best hit rate that a pool may miss and still count as large enough."""


@cache
def _device(model: str, gpu: str, tp: int) -> DeviceModel:
    return DeviceModel(GPUS[gpu], SHAPES[model], tp)


def seconds(work: Work, units: int, model: str, gpu: str, tp: int) -> float:
    """Seconds of a launch alone on that many SMs: the mean of some, for the device has noise."""
    device = _device(model, gpu, tp)
    times = [sum(device.seconds([step])[0] for step in device.steps(work, units)) for _ in range(9)]
    return float(np.mean(times))


def prefill(new: int, reused: int, layers: int) -> PrefillWork:
    """A whole prompt of new tokens over reused ones."""
    return PrefillWork(0, (PromptRow(0, reused, new, samples=True),), 0, layers, finishes=True)


def decode(batch: int, context: int) -> DecodeWork:
    """A decode step of a batch whose requests have this many tokens in the KV cache."""
    return DecodeWork(tuple(DecodeRow(slot, context, 1) for slot in range(batch)), 1)


def chunk_costs(model: str, gpu: str, prompt: int, chunk: int) -> Figures:
    """Prefill of a prompt by chunks (Bullet, Figure 5): the last chunk, and all, against whole."""
    layers, units = SHAPES[model].layers, GPUS[gpu].units
    starts = range(0, prompt, chunk)
    each = [seconds(prefill(chunk, at, layers), units, model, gpu, 1) for at in starts]
    whole = seconds(prefill(prompt, 0, layers), units, model, gpu, 1)
    return {"last over first": each[-1] / each[0], "chunked over whole": sum(each) / whole}


def budgets(model: str, gpu: str, tp: int) -> Figures:
    """TBT of hybrid passes by token budget and by the chunk's reused context (MuxWise, Figure 6):
    32 requests decode at 1K."""
    rows = tuple(DecodeRow(slot, 1024, 1) for slot in range(32))
    units = GPUS[gpu].units

    def tbt(budget: int, reused: int) -> float:
        prompt = PromptRow(40, reused, budget - len(rows), samples=True)
        return seconds(HybridWork(rows, (prompt,)), units, model, gpu, tp)

    by_budget = {f"budget {n}": tbt(n, 0) for n in (256, 512, 1024, 2048, 4096, 8192)}
    by_reuse = {f"512 over {r}": tbt(512, r) for r in (1024, 4096, 16_384, 65_536, 122_880)}
    return by_budget | by_reuse


def demand(model: str, gpu: str, tp: int, reuse: Sequence[int]) -> Figures:
    """GPUs' worth of SMs that prefill of 2K new tokens within 400 ms, and decode of a batch of 32
    within 100 ms, need by reused context (MuxWise, Figure 3); none where all are too slow."""
    layers, units = SHAPES[model].layers, GPUS[gpu].units
    needed: Figures = {}
    for r in reuse:
        works = {"prefill": (prefill(2048, r, layers), 0.4), "decode": (decode(32, max(r, 1)), 0.1)}
        for (phase, (work, bound)), few in itertools.product(works.items(), range(STEP, units + 1)):
            name = f"{phase} {r}"
            if name not in needed and seconds(work, few, model, gpu, tp) <= bound:
                needed[name] = few / units * tp
    return needed


def hit_rates(dataset: str, count: int, model: str, terabytes: Sequence[float]) -> Figures:
    """Share of prompt tokens found in a pool of that size, oldest use evicted first (MuxWise,
    Figure 5)."""
    requests = WORKLOADS[dataset].draw(count, 0)
    token = SHAPES[model].kv_bytes_per_token(2)
    block = next(request.block_tokens for request in requests if request.hash_ids)

    def rate(size: float) -> float:
        return _hits(requests, int(size * 1e12 / (token * block)))

    distinct = len(set(itertools.chain.from_iterable(r.hash_ids for r in requests)))
    best, low, high = _hits(requests, distinct), 0.0, distinct * block * token / 1e12
    while high - low > NEAR * high:
        middle = (low + high) / 2
        low, high = (low, middle) if rate(middle) >= (1 - NEAR) * best else (middle, high)
    return {**{f"{size:g} TB": rate(size) for size in terabytes}, "best": best, "enough_tb": high}


def _hits(requests: Sequence[TraceRequest], blocks: int) -> float:
    """Share of prompt tokens in leading blocks that an LRU pool of so many blocks holds."""
    pool: OrderedDict[int, None] = OrderedDict()
    hit = asked = 0
    for request in requests:
        known = 0
        for block in request.hash_ids:
            if block not in pool:
                break
            known += 1
        hit += min(known * request.block_tokens, request.prompt_tokens)
        asked += request.prompt_tokens
        # The first block is used last: a prefix outlives what follows it.
        for block in reversed(request.hash_ids):
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > blocks:
            pool.popitem(last=False)
    return hit / asked


@cache
def _profile(model: str, gpu: str) -> Profile:
    return Profile.read(Path(simulated_profile(GPUS[gpu], SHAPES[model], 1)))


def sample_counts(model: str, gpu: str, counts: Sequence[int]) -> Figures:
    """Mean error of Bullet's estimator by the number of samples of each kind that it is calibrated
    with, and of estimators without contention (Bullet, Figures 9 to 11)."""
    profile = _profile(model, gpu)
    held = {
        f"{'co-run' if beside else 'solo'} {kind}": [
            s for s in profile.of(kind, beside=beside) if s.held_out
        ]
        for kind in ("prefill", "decode")
        for beside in (False, True)
    }
    found: Figures = {}
    for count in (*counts, 0):
        some = _few(profile, count) if count else profile
        estimator = ESTIMATORS["sm-roofline"](some)
        for case, samples in held.items():
            found[f"{case}, {count or 'all'} samples"] = _error(estimator, samples)
    solo = ESTIMATORS["solo-run"](profile)
    found |= {f"{case}, contention ignored": _error(solo, held[case]) for case in held}
    return found


def _few(profile: Profile, count: int) -> Profile:
    """The profile with this many samples of each kind to fit on, evenly spaced, beside the corners
    of the plan that the sweep is made of."""
    kept = [s for s in profile.samples if s.held_out or s.anchors]
    for kind, beside in itertools.product(("prefill", "decode", "hybrid"), (False, True)):
        training = [s for s in profile.training(kind, beside=beside) if not s.anchors]
        places = np.linspace(0, len(training) - 1, min(count, len(training))).astype(int)
        kept += [training[i] for i in sorted(set(places.tolist()))]
    return Profile(**{name: getattr(profile, name) for name in _OTHERS}, samples=kept)


_OTHERS = [name for name in Profile.__struct_fields__ if name not in ("samples", "notes")]


def _error(estimator: object, samples: Sequence[Sample]) -> float:
    errors = [abs(predicted(estimator, s) / s.median - 1) for s in samples]  # type: ignore[arg-type]
    return float(np.mean(errors))


def roofline_signs(model: str, gpu: str) -> Figures:
    """Mean of prediction / truth - 1 of DuetServe's roofline, on all and on few SMs (Figure 8):
    prefill of 8 × 1,024 and decode of 16 × 1,024 tokens; above 0 is conservative."""
    estimator = ESTIMATORS["attention-roofline"](_profile(model, gpu))
    layers, units = SHAPES[model].layers, GPUS[gpu].units
    rows = tuple(PromptRow(slot, 0, 1024, samples=True) for slot in range(8))
    works: dict[str, tuple[Work, LaunchShape]] = {
        "prefill": (
            PrefillWork(0, rows, 0, layers, finishes=True),
            LaunchShape("prefill", Load([1024] * 8, [0] * 8), layers, True),
        ),
        "decode": (
            decode(16, 1024),
            LaunchShape("decode", Load.decode([1024] * 16), 0, True),
        ),
    }
    found = {}
    for name, (work, shape) in works.items():
        for part, few in (("few", units // 8), ("half", units // 2), ("all", units)):
            truth = seconds(work, few, model, gpu, 1)
            guess = estimator.predict(shape, few)
            assert guess is not None
            found[f"{name}, {part} SMs"] = float(guess) / truth - 1
    return found


def ask(answer: object, *args: object, **named: object) -> Ask:
    """A question with its arguments."""
    return Ask(partial(answer, *args, **named))  # type: ignore[arg-type]
