"""Profiles measured in the simulator, so that predictions err as on a real GPU."""

import hashlib
import itertools
import math
import tempfile
from functools import cache
from pathlib import Path

from twolane.engine.config import EngineConfig
from twolane.engine.predict import machine_key
from twolane.estimate.profile import Interconnect
from twolane.model.load.hub import cache_dir
from twolane.model.spec import ModelSpec
from twolane.profile.clocks import Clocks
from twolane.profile.grid import CONTENDED_ROWS, REVISION, plan
from twolane.profile.run import empty_profile, rig_on, work_through
from twolane.sim.gpus import Gpu
from twolane.sim.machine import SHARE_STEP, SimulatedMachine

ROUNDS = 15
"""Rounds of the plan, about as many as four minutes measure on a GPU."""


@cache
def device_digest() -> str:
    """Return a digest of the simulated device's code and parameters."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:12]


def simulated_profile(
    gpu: Gpu, spec: ModelSpec, tp: int, config: EngineConfig | None = None, *, rounds: int = ROUNDS
) -> Path:
    """Return the file of the profile of a model on such GPUs, measured once and cached.

    The same plan, rig and lanes as on a card. The device's noise is of another seed than that of
    any simulation; the levels are the default ones, whatever a simulation offers. Of a simulation's
    `config` weights and KV cache are stored alike.
    """
    formats = config or EngineConfig(model="simulated")
    config = EngineConfig(
        model="simulated", quantization=formats.quantization, kv_cache_dtype=formats.kv_cache_dtype
    )
    # Seed of the device's noise while it is measured.
    machine = SimulatedMachine(gpu, spec, config, tp=tp, seed=0x50524F46)
    key = machine_key(machine, gpu.units)
    name = Path(key.file_name).with_suffix(f".{REVISION}-{device_digest()}.json")
    path = cache_dir() / "profiles" / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as scratch,  # a profile that is there is whole
        rig_on(config, machine, lambda stage, share: None) as rig,
        Clocks(None) as clocks,
    ):
        part = Path(scratch, path.name)
        profile = empty_profile(key, machine, rig, config.seed)
        device, shares = machine.device, range(SHARE_STEP, gpu.units + 1, SHARE_STEP)
        profile.probes = [device.probe(units) for units in shares]
        profile.contended = [
            device.contended(units, rows)
            for rows, units in itertools.product(CONTENDED_ROWS, shares[:-1])
        ]
        profile.interconnect = Interconnect(
            bytes_per_second=gpu.link_bandwidth or Interconnect().bytes_per_second,
            units=gpu.link_units,
        )
        points = plan(rig.limits, profile.seed, rounds)
        work_through(profile, part, rig, points, clocks, math.inf, lambda stage, share: None)
        part.replace(path)
    return path
