"""Searches on an H200 as its profile has it: `python benchmarks/card.py --panels '*conv-9ms'`.

The simulated H200 of `sim/device.py` is a smooth law. This one takes as long as `calibrated`
predicts by the card's own profile, which the server predicts by, too, and is as uneven as the card
was seen to be (`late-gaps-h200.json`, `even-gaps-h200.json`): every launch off by `--noise`, one
step in so many an outlier, each configuration off by something of its own, all of them longer than
in the profile, for cards differ, and moments in which they are longer still. The workloads are
those of `goodput.py`, whose `--work` is not this one's.
"""

import hashlib
import io
import logging
import math
import multiprocessing
import sys
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import goodput

from twolane.common.resources import usable_cores
from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.profile import Profile
from twolane.estimate.query import (
    Corunner,
    LaunchShape,
    Load,
    decode_step,
    hybrid_pass,
    prefill_slice,
)
from twolane.lanes.work import DecodeWork, PrefillWork, Work
from twolane.results.provenance import provenance, save
from twolane.sim import machine as simulated
from twolane.sim import run as simulate
from twolane.sim.device import DeviceModel
from twolane.sim.lanes import Demand, SimLanes

RESULTS = Path(__file__).parent / "results"
OUTLIER = 1.3
"""Times as long as usual is one."""
EVERY, MOMENT = 7.0, 0.08
"""Seconds between two moments, and of one."""


class Ran(NamedTuple):
    """What a simulated lane runs, beside its demand."""

    shape: LaunchShape
    units: int
    scale: float
    """Of its time, by its own noise."""

    @property
    def like(self) -> tuple[object, ...]:
        """What configurations are told apart by."""
        kind, load = self.shape.kind, self.shape.load
        return kind, load.requests // 8 if kind == "decode" else load.new // 128, self.units


class CardDemand(Demand):
    """A demand that knows its launch."""

    launch: Ran


class CardModel(DeviceModel):
    """The device: `truth` says how long launches take, `uneven` how far off that is."""

    truth: Calibrated
    uneven: Namespace
    now = 0.0

    def steps(self, work: Work, units: int) -> Sequence[Demand]:
        """See `Device.steps`."""
        demands = []
        for step, demand in enumerate(super().steps(work, units)):
            card = CardDemand(*demand)
            card.launch = self._launch(work, units, step)
            demands.append(card)
        return demands

    def seconds(self, running: Sequence[Demand]) -> Sequence[float]:
        """See `Device.seconds`."""
        launches = [demand.launch for demand in running if isinstance(demand, CardDemand)]
        slow = self.uneven.moments if self.now % EVERY < MOMENT else 0.0
        times = (1.0 + slow) * self.uneven.slower
        return [times * self._takes(one, [o for o in launches if o is not one]) for one in launches]

    def _launch(self, work: Work, units: int, step: int) -> Ran:
        noise, rng = self.uneven.noise, self._rng
        if isinstance(work, DecodeWork):
            rows = [row.position + step for row in work.rows if not step or step < row.steps]
            scale = math.exp(rng.normal(0.0, noise))
            scale *= OUTLIER if rng.random() < self.uneven.outliers else 1.0
            return Ran(decode_step(Load.decode(rows)), units, scale)
        prompts = work.rows if isinstance(work, PrefillWork) else work.prompts
        n, r = [row.count for row in prompts], [row.start for row in prompts]
        if isinstance(work, PrefillWork):
            scale = math.exp(rng.normal(0.0, noise))
            layers = work.last - work.first
            return Ran(prefill_slice(Load(n, r), layers, finishes=work.finishes), units, scale)
        contexts = [row.position for row in work.decode]
        load = Load([*[1] * len(contexts), *n], [*contexts, *r])
        return Ran(hybrid_pass(load), units, math.exp(rng.normal(0.0, noise / 2)))

    def _takes(self, one: Ran, others: Sequence[Ran]) -> float:
        """Seconds of a launch beside the others, of which there is one at most."""
        shape, unlike = one.shape, {"hybrid", one.shape.kind}
        other = next((o for o in others if o.shape.kind not in unlike), None)
        if shape.kind == "hybrid":
            other = None
        corunner = Corunner(other.shape.load, other.units) if other else None
        seconds = self.truth.predict(shape, one.units, corunner)
        assert seconds is not None
        digest = hashlib.sha1(repr((one.like, other and other.like)).encode()).digest()
        off = math.sqrt(12) * (int.from_bytes(digest[:4], "big") / 2**32 - 0.5)
        return seconds * one.scale * math.exp(self.uneven.configurations * off)


class CardLanes(SimLanes):
    """Lanes whose device knows the time."""

    def _rate(self) -> None:
        if isinstance(self._device, CardModel):
            self._device.now = self._now
        super()._rate()


def searched(task: tuple[goodput.Panel, str, Namespace]) -> dict[str, object]:
    """One system in one panel."""
    panel, system, given = task
    logging.disable(logging.WARNING)  # the profile was taken with a driver that is not here
    path = RESULTS / f"profile-{panel.model}-h200.json"
    profile = Profile.read(path)
    CardModel.truth, CardModel.uneven = Calibrated(profile), given

    def machine(*args: object, **named: object) -> simulated.SimulatedMachine:
        made = simulated.SimulatedMachine(*args, **named)
        made.device.__class__, made.name = CardModel, profile.key.device
        return made

    command = panel.command(system, given.work, None)
    words = [*command.arguments[2:]]
    words[words.index("--seeds") + 1] = f"{given.seeds}"
    with (
        patch.object(simulate, "SimulatedMachine", machine),
        patch.object(simulate, "simulated_profile", lambda *_: path),
        patch.object(simulated, "SimLanes", CardLanes),
        patch.object(sys, "argv", ["twolane", *words]),
        redirect_stdout(io.StringIO()),
        suppress(SystemExit),
    ):
        from twolane.cli.main import main

        main()
    best, rates = goodput._best(command.log.parent / "summary.json", system)
    return {"panel": panel.name, "system": best, "goodput": rates}


def main() -> None:
    """Search, print, write the file."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    add = parser.add_argument
    add("--panels", nargs="+", default=["qwen3-8b-azure-conv-9ms"], help="names, or patterns")
    add("--systems", nargs="+", default=["auto"])
    add("--seeds", type=int, default=3)
    add("--noise", type=float, default=0.045, help="of a step or slice; half for a hybrid pass")
    add("--outliers", type=float, default=0.015, help="share of the decode steps")
    add("--configurations", type=float, default=0.03, help="how far each is off")
    add("--slower", type=float, default=1.03, help="times as long as in the profile")
    add("--moments", type=float, default=0.25, help="how much longer launches take in them")
    add("--work", type=Path, default=Path("card-work"), help="folder of the runs, of one device")
    add("--out", type=Path, default=RESULTS / "card.json")
    given = parser.parse_args()
    names = [p for p in goodput.PANELS if any(fnmatch(p.name, name) for name in given.panels)]
    tasks = [(panel, system, given) for panel in names for system in given.systems]
    with multiprocessing.get_context("spawn").Pool(min(len(tasks), len(usable_cores()))) as pool:
        found = pool.map(searched, tasks, chunksize=1)
    for one in found:
        print(one)
    device = {name: getattr(given, name) for name in ("noise", "outliers", "configurations")}
    device |= {"slower": given.slower, "moments": given.moments}
    save(given.out, provenance(given.panels), {"device": device, "found": found})


if __name__ == "__main__":
    main()
