"""Profiles made of known formulas, over the points that `twolane profile` would measure."""

import random
from collections.abc import Callable
from copy import deepcopy
from functools import cache

import numpy as np

from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.profile import Key, Neighbour, Profile, Sample, load_of, model_digest
from twolane.estimate.query import Load
from twolane.model.shapes import SHAPES
from twolane.profile.grid import LaneCapacity, Point, plan

SHAPE = SHAPES["qwen3-8b"]
UNITS = 132
LEVELS = ((116, 16), (100, 32), (84, 48), (52, 80), (132, 0), (0, 132))
LIMITS = LaneCapacity(UNITS, LEVELS, 600_000, 32, 256, 40_960, 16_384)


def prefill_layer(load: Load, units: int) -> float:
    """Equation 1, with coefficients like those of an 8B model."""
    own = 1e-10 * load.squares + 1.5e-10 * load.products + 6e-7 * load.new
    return 3e-5 + own * UNITS / units


def decode_step(load: Load, units: int) -> float:
    """Equation 2; bandwidth grows up to 48 units."""
    return (3e-8 * load.reused + 1e-5 * load.requests + 4e-3) * max(1.0, 48 / units)


def slowdown(own: Load, other: Load) -> float:
    """More with more in the other lane, at most 1.4."""
    return 1.0 + 0.1 * min(4.0, np.log10(1 + other.new + other.reused / 10))


def profile(noise: float = 0.0, rounds: int = 24, seed: int = 0) -> Profile:
    """As if measured."""
    draw = random.Random(seed)
    key = Key("made up", "", "0", model_digest(SHAPE), 2, UNITS)
    result = Profile(key, SHAPE, list(LEVELS), 32, seed)
    for point in plan(LIMITS, seed, rounds):
        result.samples += _samples(point, lambda: draw.lognormvariate(0.0, noise))
    return result


def calibrated() -> Calibrated:
    """The estimator of a profile with noise; fitted once, and everybody's own."""
    return deepcopy(_calibrated())


@cache
def _calibrated() -> Calibrated:
    return Calibrated(profile(noise=0.01))


def _samples(point: Point, error: Callable[[], float]) -> list[Sample]:
    prompts, contexts = load_of(point.prompts), load_of(point.contexts)
    p, d = point.prefill_units, point.decode_units
    made = []

    def add(kind, runs, units, layers, finishes, seconds, beside=None):
        times = [float(seconds * error())]
        made.append(
            Sample(
                point.name, kind, list(runs), units, layers, finishes, times, beside,
                held_out=point.held_out,
            )
        )  # fmt: skip

    if point.kind == "hybrid":
        both = SHAPE.layers * prefill_layer(prompts, p) + decode_step(contexts, p)
        add("hybrid", [*point.contexts, *point.prompts], p, SHAPE.layers, True, both)
        return made
    if point.contexts:
        beside = Neighbour(list(point.prompts), p) if point.prompts else None
        slow = slowdown(contexts, prompts) if beside else 1.0
        add(
            "decode", point.contexts, d, SHAPE.layers, True, slow * decode_step(contexts, d), beside
        )
    if point.prompts:
        beside = Neighbour(list(point.contexts), d) if point.contexts else None
        slow = slowdown(prompts, contexts) if beside else 1.0
        add("prefill", point.prompts, p, 4, False, 4 * slow * prefill_layer(prompts, p), beside)
    return made
