"""`twolane profile`: measures the plan's points in order, saves, and resumes where it was."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twolane.devices import OnProgress
from twolane.engine.build import make_kv_manager, running
from twolane.engine.config import EngineConfig
from twolane.engine.predict import machine_key
from twolane.engine.settings import check_settings, context_length
from twolane.estimate.profile import Key, Profile, ProfileError, cached_profile
from twolane.lanes.base import Machine
from twolane.lanes.load import load
from twolane.lanes.settings import LaneSizes, memory_errors
from twolane.model.load.hub import cache_dir
from twolane.profile.clocks import Clocks
from twolane.profile.grid import ROUNDS, Point, plan
from twolane.profile.measure import measure
from twolane.profile.rig import Rig

log = logging.getLogger("twolane.profile")

SAVE_SECONDS = 5.0
"""Seconds between two writes of the profile."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run of `twolane profile`."""

    path: Path
    profile: Profile
    measured: int
    """Points of this run."""
    left: int
    """Points of the plan that are still to be measured."""


def take_profile(
    config: EngineConfig,
    *,
    out: Path | None,
    seconds: float,
    rounds: int = ROUNDS,
    progress: OnProgress,
) -> Outcome:
    """Measure for this many seconds, going on with the profile that is there.

    Args:
        config: the model, the device and its limits; what concerns requests does not matter.
        out: the file; None: where servers look for it.
        seconds: Seconds of measuring, without the start and the probes.
        rounds: Number of rounds of the plan.
        progress: called with the stage and the share of it that is done.

    Raises:
        ValueError: a setting is wrong, or the file is the profile of something else.
    """
    check_settings(config)
    with memory_errors(config):
        machine = load(config, progress)
    with rig_on(config, machine, progress) as rig:
        key = machine_key(machine, rig.lanes.units)
        path = out or cached_profile(cache_dir(), key)
        profile = resumed(path, empty_profile(key, machine, rig, config.seed))
        with memory_errors(config):
            probe(profile, machine, rig.limits.shares, progress)
        points = plan(rig.limits, profile.seed, rounds)
        with Clocks(_gpu(machine)) as clocks:
            measured = work_through(profile, path, rig, points, clocks, seconds, progress)
    done = profile.done()
    return Outcome(path, profile, measured, sum(point.name not in done for point in points))


def empty_profile(key: Key, machine: Machine, rig: Rig, seed: int) -> Profile:
    """Return the profile of a machine before anything is measured."""
    levels, sizes = list(rig.lanes.levels), tuple(machine.pass_sizes)
    return Profile(
        key, machine.spec, levels, rig.sizes.page_size, seed, machine=machine.kind, pass_sizes=sizes
    )


def probe(profile: Profile, machine: Machine, shares: Sequence[int], progress: OnProgress) -> None:
    """Add the rates of products and copies that the profile of a GPU lacks.

    The profile of a CPU has no probes: DuetServe's are of SMs.
    """
    there = {probe.units for probe in profile.probes}
    missing = [units for units in shares if units not in there]
    if machine.kind != "cuda" or (not missing and profile.contended):
        return
    import torch

    from twolane.lanes.cuda.machine import CudaMachine
    from twolane.profile.probes import contended, probed

    assert isinstance(machine, CudaMachine)
    begun = time.monotonic()
    if missing:
        profile.probes += probed(machine.partitions, machine.device, missing, progress)
    if not profile.contended:
        profile.contended = contended(machine.partitions, machine.device, machine.spec, progress)
    torch.cuda.empty_cache()
    profile.seconds += time.monotonic() - begun


def work_through(
    profile: Profile,
    path: Path,
    rig: Rig,
    points: list[Point],
    clocks: Clocks,
    seconds: float,
    progress: OnProgress,
) -> int:
    """Measure the points that the profile lacks; return their number. Saves every few seconds."""
    done, begun, spent = profile.done(), time.monotonic(), profile.seconds
    left = [point for point in points if point.name not in done]
    profile.planned = len(points)
    saved = begun
    measured = 0
    try:
        for measured, point in enumerate(left):
            now = time.monotonic()
            if now - begun >= seconds:
                return measured
            progress("measure", max((now - begun) / seconds, measured / len(left)))
            profile.samples += measure(rig, point, clocks)
            profile.seconds = spent + time.monotonic() - begun
            if time.monotonic() - saved >= SAVE_SECONDS:
                profile.save(path)
                saved = time.monotonic()
        return len(left)
    finally:
        profile.save(path)


def _gpu(machine: Machine) -> str | None:
    """Return the UUID of the machine's GPU; None for other machines."""
    if machine.kind != "cuda":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def resumed(path: Path, fresh: Profile) -> Profile:
    """Return the profile at this path, to continue it, or the fresh one if there is none.

    Raises:
        ProfileError: it is of something else.
    """
    if not path.exists():
        return fresh
    profile = Profile.read(path)
    for name in Key.__struct_fields__:
        there, here = getattr(profile.key, name), getattr(fresh.key, name)
        if there != here:
            raise ProfileError(f"{path} is of {name} {there!r}; this is {here!r}")
    return profile


@contextmanager
def rig_on(config: EngineConfig, machine: Machine, progress: OnProgress) -> Iterator[Rig]:
    """Start the lanes as they would serve; yield a rig on them."""
    most = context_length(config, machine.spec)
    kv = make_kv_manager(config, machine, most)
    sizes = LaneSizes(kv.tokens // kv.page_size, kv.page_size, running(config), most)
    with memory_errors(config):
        lanes = machine.start(sizes, lambda: None, progress)
    try:
        lanes.fill_kv()
        # New tokens of the largest prefill batch that is measured.
        yield Rig(
            lanes,
            sizes,
            layers=machine.spec.layers,
            vocab_size=machine.spec.vocab_size,
            batch_tokens=16_384,
            seed=config.seed,
            clocks_settle=machine.settles,
            own_tokens=machine.spec.moe is not None,
        )
    finally:
        lanes.close()
