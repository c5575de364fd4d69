"""The systems by name, and how one is made with its settings.

`package.module.Class` names a system outside of this package, which is imported from the working
directory or from the installed packages.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

from twolane.common.errors import FieldError
from twolane.devices import MachineKind
from twolane.systems.auto.system import Auto
from twolane.systems.base import System
from twolane.systems.baselines.chunked import Chunked
from twolane.systems.baselines.prefill_first import PrefillFirst
from twolane.systems.baselines.static_split import StaticSplit
from twolane.systems.baselines.temporal import Temporal
from twolane.systems.baselines.two_stream import TwoStream
from twolane.systems.papers.bullet import Bullet
from twolane.systems.papers.drift import Drift
from twolane.systems.papers.duetserve import DuetServe
from twolane.systems.papers.muxwise import MuxWise

__all__ = ["SYSTEMS", "System", "defaults", "describe", "make_system", "system_class"]


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


def system_class(name: str) -> type[System]:
    """Return the system of that name, or of that path `package.module.Class`.

    Raises:
        FieldError: naming `system`: there is none, or what the path names is not one.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    module, dot, attribute = name.rpartition(".")
    if not dot:
        known = ", ".join(SYSTEMS)
        problem = f"{name!r} is unknown; there are: {known}, and package.module.Class of your own"
        raise FieldError("system", problem)
    kind: Any = getattr(_imported(module, name), attribute, None)
    if kind is None:
        raise FieldError("system", f"{name!r}: module {module} has no {attribute}")
    if not {System, msgspec.Struct} <= {*getattr(kind, "__mro__", ())}:
        needed = "a subclass of twolane.systems.base.System and msgspec.Struct"
        raise FieldError("system", f"{name!r} is not {needed}")
    if kind.plan is System.plan:
        raise FieldError("system", f"{name!r} has no method `plan`")
    return kind  # type: ignore[no-any-return]


def _imported(module: str, name: str) -> object:
    """Import the module of the system `name`, from the working directory first."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(module)
    except Exception as error:  # whatever the user's module raises
        problem = f"{name!r}: importing {module} failed: {type(error).__name__}: {error}"
        raise FieldError("system", problem) from error


def describe(name: str) -> str:
    """Return the description of a system in one line."""
    return (system_class(name).__doc__ or "").split("\n", 1)[0]


def defaults(name: str) -> dict[str, Any]:
    """Return the settings of a system with their defaults; `msgspec.NODEFAULT` for none."""
    kind = cast(type[msgspec.Struct], system_class(name))
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def make_system(name: str, options: dict[str, str] | None = None) -> System:
    """Return the system of that name, with settings given as text.

    Raises:
        FieldError: naming `system`, which is unknown, or `options`: one is unknown or out of range.
    """
    kind, settings = system_class(name), defaults(name)
    for option in options or {}:
        if option not in settings:
            known = ", ".join(settings)
            raise FieldError("options", f"{option!r} is not one of system {name}; it has: {known}")
    try:
        return msgspec.convert(options or {}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError("options", f"of system {name}: {error}") from None
