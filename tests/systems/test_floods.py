"""One phase is flooded: does the other one go on? On a simulated H200, Qwen3-8B's shapes."""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from tests.systems.names import SYSTEM_NAMES
from tests.systems.simulation import LAYERS, LEVELS, UNITS, Simulation, simulate, submit
from twolane.model.shapes import SHAPES
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import GPUS
from twolane.sim.lanes import SimLanes
from twolane.slo import Slo
from twolane.systems.registry import make_system

H200 = GPUS["h200"]

PROMPTS = 30
"""Of 4,000 tokens each, faster than all units can compute them."""
TBT = 0.02
STARVED = 5 * TBT
"""Seconds: a gap as long as this is no longer decoding."""


def flooded(name: str, arrivals: list, tbt: float) -> Simulation:
    spec = replace(SHAPES["qwen3-8b"], layers=LAYERS)
    lanes = SimLanes(UNITS, LEVELS, DeviceModel(H200, spec))
    slo = Slo(tbt=tbt)
    return simulate(make_system(name), arrivals, lanes=lanes, pages=20_000, slots=64, slo=slo)


@cache
def prompts() -> list:
    """A request that decodes, and the flood."""
    flood = [(0.1 + 0.016 * i, submit(f"f{i}", 4000, 1)) for i in range(PROMPTS)]
    return [(0.0, submit("victim", 50, 150)), *flood]


@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_a_prefill_flood_does_not_starve_decode(name: str) -> None:
    """In `prefill-first` it does: nobody decodes as long as a prompt waits (MuxWise Figure 1)."""
    sim = flooded(name, prompts(), TBT)
    flood_ends = max(sim.times[f"f{i}"][0] for i in range(PROMPTS))
    assert flood_ends > 0.1 + 0.016 * PROMPTS  # they do come faster than they can go
    gaps = [b - a for a, b in itertools.pairwise(sim.times["victim"])]
    assert (max(gaps) > STARVED) == (name == "prefill-first")


@pytest.mark.parametrize("tbt", [TBT, 1e-4], ids=["kept", "hopeless"])
@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_a_decode_flood_does_not_starve_prefill(name: str, tbt: float) -> None:
    """Not even where decode misses its bound whatever it gets."""
    arrivals = [(0.0, submit(f"f{i}", 20, 150)) for i in range(30)]
    arrivals.append((0.05, submit("victim", 4000, 1)))
    sim = flooded(name, arrivals, tbt)
    flood_ends = min(sim.times[f"f{i}"][-1] for i in range(30))
    assert flood_ends > 0.12
    assert sim.times["victim"][0] < 0.05 + (flood_ends - 0.05) / 2
