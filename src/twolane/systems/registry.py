"""The systems by name, and how one is made with its settings.

A system is a frozen msgspec struct: its fields are its settings, its first docstring line is
its description. Systems never import torch.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import msgspec

from twolane.common.errors import FieldError
from twolane.common.vocabulary import EstimatorName, MachineKind
from twolane.systems.auto.system import Auto
from twolane.systems.baselines.chunked import Chunked
from twolane.systems.baselines.prefill_first import PrefillFirst
from twolane.systems.baselines.static_split import StaticSplit
from twolane.systems.baselines.temporal import Temporal
from twolane.systems.baselines.two_stream import TwoStream
from twolane.systems.papers.bullet import Bullet
from twolane.systems.papers.drift import Drift
from twolane.systems.papers.duetserve import DuetServe
from twolane.systems.papers.muxwise import MuxWise
from twolane.systems.plan import Plan
from twolane.systems.view import View

__all__ = ["SYSTEMS", "System", "defaults", "describe", "make_system"]


class System(Protocol):
    """A policy with its settings.

    `memory` is its own small frozen state, which it gets again at the next scheduling point.
    """

    estimator: ClassVar[EstimatorName]
    """Name of the estimator that the system uses with a profile, unless the user names another."""
    reads_slos: ClassVar[bool]
    """Whether plans depend on latency bounds; if not, one run of a search counts for every
    bound."""
    gives_up: ClassVar[bool]
    """Whether prompts that cannot meet their deadline are served after smaller ones that can."""

    def start(self) -> Any:
        """Return the memory before the first plan."""

    def plan(self, view: View, memory: Any) -> tuple[Plan, Any]:
        """Return the next plan and the new memory, which depend on nothing but the arguments."""


@runtime_checkable
class ChoosesLevels(Protocol):
    """A system whose paper names the partitions that it chooses from."""

    def decode_shares(self, units: int, step: int) -> Sequence[int]:
        """Return the units for decode of each level that the system wants.

        Args:
            units: number of units of the device.
            step: number of units of which every share is a multiple.
        """


SYSTEMS: dict[str, type[System]] = {
    "prefill-first": PrefillFirst,
    "chunked": Chunked,
    "static-split": StaticSplit,
    "two-stream": TwoStream,
    "temporal": Temporal,
    "drift": Drift,
    "muxwise": MuxWise,
    "bullet": Bullet,
    "duetserve": DuetServe,
    "auto": Auto,
}


DISAGGREGATED = "two-stream"
"""Name of the system that serves if prefill and decode have a device each. All other systems decide
how the lanes share one device."""


def default_system(kind: MachineKind, *, disaggregated: bool = False) -> str:
    """Return the name of the system that serves on such a device if none is named.

    On CPU cores `auto` has no profile to plan by, and its hybrid passes take several decode steps'
    time: gaps between tokens are shorter under `static-split` (docs/design/systems.md).
    """
    if disaggregated:
        return DISAGGREGATED
    return "static-split" if kind == "cpu" else "auto"


def describe(name: str) -> str:
    """Return the description of a system in one line."""
    return (SYSTEMS[name].__doc__ or "").split("\n", 1)[0]


def defaults(name: str) -> dict[str, Any]:
    """Return the settings of a system with their defaults."""
    kind = cast(type[msgspec.Struct], SYSTEMS[name])
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def make_system(name: str, options: dict[str, str] | None = None) -> System:
    """Return the system of that name, with settings given as text.

    Raises:
        FieldError: naming `system`, which is unknown, or `options`: one is unknown or out of range.
    """
    if name not in SYSTEMS:
        raise FieldError("system", f"{name!r} is unknown; there are: {', '.join(SYSTEMS)}")
    kind, settings = SYSTEMS[name], defaults(name)
    for option in options or {}:
        if option not in settings:
            known = ", ".join(settings)
            raise FieldError("options", f"{option!r} is not one of system {name}; it has: {known}")
    try:
        return msgspec.convert(options or {}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError("options", f"of system {name}: {error}") from None
