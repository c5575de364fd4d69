"""An emulated GPU: launches take the times of its profile, with measured unevenness.

The simulated GPU of `sim/device.py` is a smooth law. An emulated one answers by `calibrated` on
the card's own profile, which systems predict by, too. So that predictions are not the truth, every
launch is off by noise, some steps are outliers, each configuration is off by something of its own,
all take a little longer than in the profile, for cards differ, and there are moments in which
everything takes longer still.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from twolane.common.errors import FieldError
from twolane.devices import OnProgress
from twolane.engine.config import EngineConfig
from twolane.engine.predict import fitted, read_profile
from twolane.estimate import query
from twolane.estimate.base import Estimator
from twolane.lanes.settings import LaneSizes
from twolane.lanes.work import DecodeWork, PrefillWork, Work
from twolane.model.spec import ModelSpec
from twolane.sim.config import Unevenness
from twolane.sim.device import DeviceModel
from twolane.sim.gpus import Gpu
from twolane.sim.lanes import Demand, SimLanes
from twolane.sim.machine import SimulatedMachine

SLOW_EVERY_SECONDS, SLOW_SECONDS = 7.0, 0.08
"""Seconds from one slow period to the next, and their duration in seconds."""
STORED_ALIKE = 0.02
"""Relative difference of the bytes of a weight up to which a profile is of the same settings."""
ROWS_ALIKE, TOKENS_ALIKE = 8, 128
"""Widths in decode rows and new tokens of a configuration."""


class EmulatedLaunch(NamedTuple):
    """A step of work in the form of the estimator's queries."""

    shape: query.LaunchShape
    units: int
    scale: float
    """Factor of its own noise."""

    @property
    def configuration(self) -> tuple[object, ...]:
        """Key of launches that share a configuration's factor."""
        kind, load = self.shape.kind, self.shape.load
        size = load.requests // ROWS_ALIKE if kind == "decode" else load.new // TOKENS_ALIKE
        return kind, size, self.units


class LaunchDemand(Demand):
    """A demand with its launch."""

    launch: EmulatedLaunch


class EmulatedDevice(DeviceModel):
    """The device of an emulated GPU.

    Args:
        gpu: The kind of GPU, for its units and the host's time.
        spec: the model's shape.
        truth: says how long launches take.
        uneven: deviation from the profile.
        seed: Seed of the noise.
    """

    def __init__(
        self, gpu: Gpu, spec: ModelSpec, truth: Estimator, uneven: Unevenness, seed: int = 0
    ) -> None:
        super().__init__(gpu, spec, 1, seed)
        self._truth = truth
        self._uneven = uneven
        self.clock: Callable[[], float] = lambda: 0.0
        """Returns the virtual time in seconds, which determines slow periods."""

    def steps(self, work: Work, units: int) -> Sequence[Demand]:
        """See `Device.steps`."""
        demands = []
        for step, demand in enumerate(super().steps(work, units)):
            known = LaunchDemand(*demand)
            known.launch = self._launch(work, units, step)
            demands.append(known)
        return demands

    def seconds(self, running: Sequence[Demand]) -> Sequence[float]:
        """See `Device.seconds`."""
        launches = [demand.launch for demand in running if isinstance(demand, LaunchDemand)]
        slow = self._uneven.moments if self.clock() % SLOW_EVERY_SECONDS < SLOW_SECONDS else 0.0
        factor = (1.0 + slow) * self._uneven.slower
        return [
            factor * self._takes(one, [o for o in launches if o is not one]) for one in launches
        ]

    def _launch(self, work: Work, units: int, step: int) -> EmulatedLaunch:
        if isinstance(work, DecodeWork):
            rows = [row.position + step for row in work.rows if not step or step < row.steps]
            scale = self._off(self._uneven.noise)
            # Factor by which an outlier takes longer than other decode steps.
            scale *= 1.3 if self._rng.random() < self._uneven.outliers else 1.0
            return EmulatedLaunch(query.decode_step(query.Load.decode(rows)), units, scale)
        prompts = work.rows if isinstance(work, PrefillWork) else work.prompts
        new, reused = [row.count for row in prompts], [row.start for row in prompts]
        if isinstance(work, PrefillWork):
            layers = work.last - work.first
            shape = query.prefill_slice(query.Load(new, reused), layers, finishes=work.finishes)
            return EmulatedLaunch(shape, units, self._off(self._uneven.noise))
        contexts = [row.position for row in work.decode]
        load = query.Load([*[1] * len(contexts), *new], [*contexts, *reused])
        return EmulatedLaunch(query.hybrid_pass(load), units, self._off(self._uneven.noise / 2))

    def _off(self, deviation: float) -> float:
        return math.exp(self._rng.normal(0.0, deviation))

    def _takes(self, one: EmulatedLaunch, others: Sequence[EmulatedLaunch]) -> float:
        """Return the seconds of a launch beside the others, of which at most one is in the other
        lane."""
        shape, unlike = one.shape, {"hybrid", one.shape.kind}
        other = next((o for o in others if o.shape.kind not in unlike), None)
        if shape.kind == "hybrid":
            other = None
        corunner = query.Corunner(other.shape.load, other.units) if other else None
        seconds = self._truth.predict(shape, one.units, corunner)
        assert seconds is not None, "a fitted estimator answers"
        state = (one.configuration, other and other.configuration)
        digest = hashlib.sha1(repr(state).encode()).digest()
        uniform = math.sqrt(12) * (int.from_bytes(digest[:4], "big") / 2**32 - 0.5)
        return seconds * one.scale * math.exp(self._uneven.configurations * uniform)


class EmulatedMachine(SimulatedMachine):
    """A model on an emulated GPU.

    Args:
        gpu: the card's kind.
        spec: the model's shape.
        config: the engine's settings; its profile is the card's.
        uneven: see `EmulatedDevice`.
        seed: Seed of the noise.

    Raises:
        FieldError: the profile is missing, or is of another kind or number of GPUs.
        OSError, ProfileError: it cannot be read.
    """

    def __init__(
        self, gpu: Gpu, spec: ModelSpec, config: EngineConfig, uneven: Unevenness, *, seed: int = 0
    ) -> None:
        super().__init__(gpu, spec, config, seed=seed)
        if config.profile is None:
            raise FieldError("profile", "is needed to emulate its card")
        path = Path(config.profile)
        profile = read_profile(path)
        if profile.key.tensor_parallel != 1 or profile.key.units != gpu.units:
            raise FieldError("profile", f"is not of one {gpu.name}: {profile.key.device}")
        self._device = EmulatedDevice(gpu, spec, fitted(path, "calibrated"), uneven, seed)
        self.device = self._device
        self.name, self.revision = profile.key.device, profile.key.driver
        # The card's own: scales and what stays in 16 bits differ from `storage_of` in a thousandth.
        stored = profile.key.weight_itemsize or self.itemsize
        if not math.isclose(stored, self.weight_itemsize, rel_tol=STORED_ALIKE):
            raise FieldError("profile", f"is of weights of {stored:g} bytes, not of these settings")
        self.weight_itemsize = stored

    def start(self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress) -> SimLanes:
        """See `Machine.start`."""
        lanes = super().start(sizes, notify, progress)
        self._device.clock = lanes.clock
        return lanes
