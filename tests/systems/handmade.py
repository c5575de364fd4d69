"""Views made by hand, for what a system decides at one scheduling point."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from twolane.devices import LANES
from twolane.engine.launch_costs import LaunchCosts
from twolane.engine.pacing import Gaps
from twolane.estimate.base import Estimator
from twolane.kernels.sizes import SIZES
from twolane.slo import Slo
from twolane.systems.view import LaneView, View

UNITS = 132
LEVELS = ((116, 16), (100, 32), (84, 48), (52, 80), (132, 0), (0, 132))
LAYERS = 36


NONE = Slo()


@dataclass(frozen=True)
class Asked:
    """A request as systems see it."""

    id: str = "r"
    arrival: float = 0.0
    priority: int = 0
    deadline: float | None = None
    slo: Slo = NONE
    new: int = 0
    reused: int = 0
    page_cost: int = 0
    started: bool = False
    generated: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    slack: float = 0.0
    context: int = 0
    to_generate: int = 100


@dataclass(frozen=True)
class Part:
    """A request's part of a batch."""

    request: Asked
    start: int
    n: int


@dataclass(frozen=True)
class Batch:
    """A prefill batch."""

    chunks: Sequence[Part]
    layers_launched: int = 0
    layers_done: int = 0


def waiting(name: str, new: int, **more: Any) -> Asked:
    return Asked(name, new=new, **more)


def decoding(name: str, context: int, generated: int = 1, **more: Any) -> Asked:
    """By default its last token came just now, after 10 ms for each."""
    times = {"first_token_at": -0.010 * (generated - 1), "last_token_at": 0.0}
    return Asked(name, context=context, generated=generated, **{**times, **more})


def batch(*requests: Asked, layers: int = 0) -> Batch:
    return Batch([Part(one, one.reused, one.new) for one in requests], layers, layers)


def view(estimator: Estimator, **more: Any) -> View:
    """At time 0, with room for everybody and nothing under way."""
    lanes = {lane: LaneView() for lane in LANES} | more.pop("lanes", {})
    nothing = View(
        now=0.0,
        layers=LAYERS,
        units=UNITS,
        levels=LEVELS,
        pass_sizes=SIZES,
        waiting=(),
        batch=None,
        launched_batches=(),
        parked=None,
        decoding=(),
        joining=dict.fromkeys(LANES, ()),
        lanes=lanes,
        free_pages=100_000,
        reclaimable_pages=0,
        free_slots=1000,
        slo=NONE,
        gaps=Gaps(),
        estimator=estimator,
        launch_costs=LaunchCosts(LAYERS),
    )
    return replace(nothing, **more)
