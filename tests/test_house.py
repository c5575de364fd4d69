"""The walls of the house: which package may import which, read from the source.

Every import counts, those for type checking and those inside functions, too. A new package needs
a line in `ROOMS`.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import twolane

SHARED = ("common", "devices", "playout", "sampling", "slo")
"""Rooms that all others may import."""
MESSAGES = (
    *("engine.messages", "engine.config", "engine.settings", "engine.prompt_work"),
    *("engine.kv.page_hash", "engine.kv.prefix_digest", "engine.constrained.matching"),
)
"""What the API process knows of the engine: its messages and its settings."""
FACTS = (
    *("model.spec", "model.shapes", "model.families"),
    *("model.load.hub", "model.load.configs", "model.load.facts"),
    *("model.load.gguf_file", "model.load.adapter_files"),
)
"""What is known of a model without its weights, and without torch."""
ROOMS: Mapping[str, tuple[str, ...]] = {
    "common": (),
    "playout": (),
    "sampling": ("common",),
    "slo": ("common",),
    "devices": (),
    "kernels": (),
    "parallel": (),
    "model": ("kernels", "parallel"),
    "lanes": ("model", "kernels", "parallel"),
    "estimate": (*FACTS, "kernels.sizes"),
    "systems": ("estimate",),
    "engine": ("systems", "estimate", "lanes", *FACTS),
    "frontend": (*MESSAGES, *FACTS),
    "server": ("frontend", "router.state", *MESSAGES, *FACTS),
    "fleet": ("server", "router", "fleet", *MESSAGES),
    "llm": ("frontend", *MESSAGES),
    "router": MESSAGES,
    "workload": (),
    "results": ("workload",),
    "profile": ("engine", "estimate", "lanes", *FACTS),
    "sim": (
        *("engine", "systems", "estimate", "lanes", "profile", "results", "workload", "router"),
        *(*FACTS, "kernels.sizes"),
    ),
    "bench": ("sim", "results", "workload", "engine.config", "systems", "estimate"),
    "cli": (
        *("server", "fleet", "frontend", "engine", "systems", "lanes", "profile", "sim", "bench"),
        *("estimate", "results", "workload", *FACTS),
    ),
    "__main__": ("cli",),
}
"""Rooms and modules that each room may import, besides itself and `SHARED`."""
UPWARD: Mapping[tuple[str, str], str] = {}
"""(importer, imported) that break a wall today, with what is to be done about it."""
CYCLES: Mapping[tuple[str, str], str] = {}
"""(importer, imported) that close a cycle today, with what is to be done about it."""
LAZY: Mapping[tuple[str, str], str] = {
    ("", "llm"): "the public name `twolane.LLM` is loaded when it is first asked for",
}
"""(importer, imported) inside a function that do not count, with the reason."""
WITHOUT_TORCH = ("systems", "estimate", "frontend", "server", "router")
"""Rooms that never import torch, nor anything of the project that loads it at once."""
TORCH = ("torch", "triton", "flashinfer", "transformers")
"""Libraries that load torch when they are imported."""


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    importer: str
    """A module of the project without `twolane.`; empty for the package itself."""
    target: str
    """The same for a module of the project; otherwise the library's full name."""
    ours: bool
    """Whether the target is of the project."""
    deferred: bool
    """Whether it is inside a function or for type checking only."""


@functools.cache
def _named(source: str) -> tuple[tuple[str, bool], ...]:
    """The full names that a module imports, and whether each import is deferred."""
    return tuple(_targets(ast.parse(source), deferred=False))


def imports(sources: Mapping[str, str]) -> list[Import]:
    """Every import of these modules, by name without `twolane.`."""
    found = []
    for name, source in sources.items():
        for target, deferred in _named(source):
            found.append(_resolved(name, target, deferred, sources))
    return [one for one in found if (one.importer, one.target) not in LAZY]


def _targets(node: ast.AST, *, deferred: bool) -> Iterator[tuple[str, bool]]:
    """Full dotted names, `package.name` for each name of a `from` import."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, deferred) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        yield from ((f"{node.module}.{alias.name}", deferred) for alias in node.names)
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _targets(child, deferred=deferred or inside or typing)


def _resolved(importer: str, target: str, deferred: bool, modules: Mapping[str, str]) -> Import:
    """The import of the module that a full name is of."""
    if target.split(".")[0] != "twolane":
        return Import(importer, target, ours=False, deferred=deferred)
    path = target.split(".")[1:]
    if ".".join(path) not in modules:
        path = path[:-1]  # a name in a module
    return Import(importer, ".".join(path), ours=True, deferred=deferred)


def upward(found: list[Import]) -> set[tuple[str, str]]:
    """(importer, imported) that `ROOMS` does not allow."""
    return {
        (one.importer, one.target)
        for one in found
        if one.ours and one.importer and one.target and not _allowed(one.importer, one.target)
    }


def _allowed(importer: str, target: str) -> bool:
    room, other = importer.split(".")[0], target.split(".")[0]
    if room == other or (other in SHARED and room not in SHARED):
        return True
    return any(_within(target, of) for of in ROOMS[room])


def _within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def cycles(found: list[Import], ignored: Mapping[tuple[str, str], str]) -> list[set[str]]:
    """The modules that import one another, each group of them."""
    arrows: dict[str, set[str]] = {}
    for one in found:
        if one.ours and (one.importer, one.target) not in ignored:
            arrows.setdefault(one.importer, set()).add(one.target)
    reached = {name: _reached(name, arrows) for name in arrows}
    groups = {frozenset(m for m in reached[n] if n in reached.get(m, ())) for n in reached}
    return [set(group) for group in groups if group]


def _reached(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    """The modules that importing this one leads to; itself only if there is a cycle."""
    seen: set[str] = set()
    left = list(arrows.get(start, ()))
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += arrows.get(name, ())
    return seen


def torch_users(found: list[Import]) -> set[str]:
    """Modules of `WITHOUT_TORCH` that name torch, or load it by what they import at once."""
    loads = {one.importer for one in found if _is_torch(one) and not one.deferred}
    arrows: dict[str, set[str]] = {}
    for one in found:
        if one.ours and not one.deferred:
            arrows.setdefault(one.importer, set()).add(one.target)
    users = {one.importer for one in found if not one.ours and _within(one.target, "torch")}
    users |= loads | {name for name in arrows if loads & _reached(name, arrows)}
    return {name for name in users if name.split(".")[0] in WITHOUT_TORCH}


def _is_torch(one: Import) -> bool:
    return not one.ours and any(_within(one.target, library) for library in TORCH)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Every module of the project."""
    root, found = Path(twolane.__file__).parent, {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def test_every_room_has_its_walls(sources: dict[str, str]) -> None:
    assert {name.split(".")[0] for name in sources if name} == set(ROOMS)


def test_packages_import_nothing_themselves(sources: dict[str, str]) -> None:
    """So what a module imports is all that is loaded with it."""
    packages = {name for name in sources if any(other.startswith(f"{name}.") for other in sources)}
    assert packages & {one.importer for one in imports(sources)} == set()


def test_rooms_import_only_what_is_below_them(sources: dict[str, str]) -> None:
    assert upward(imports(sources)) - set(UPWARD) == set()


def test_no_module_imports_itself_by_way_of_others(sources: dict[str, str]) -> None:
    assert cycles(imports(sources), CYCLES) == []


def test_decisions_and_http_are_free_of_torch(sources: dict[str, str]) -> None:
    assert torch_users(imports(sources)) == set()


def test_every_exception_is_still_needed(sources: dict[str, str]) -> None:
    found = imports(sources)
    assert set(UPWARD) - upward(found) == set()
    for closing in CYCLES:
        others = {arrow: why for arrow, why in CYCLES.items() if arrow != closing}
        assert cycles(found, others), f"{closing} closes no cycle any more"
    for importer, target in LAZY:
        assert f"from twolane.{target} import" in sources[importer]


FORBIDDEN = {
    "systems.new": "from twolane.lanes.work import Work",
    "engine.new": "if TYPE_CHECKING:\n    from twolane.server.service.service import Service",
    "frontend.new": "def load() -> None:\n    from twolane.engine.engine import Engine",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forbidden_import_is_found(name: str, sources: dict[str, str]) -> None:
    found = imports({**sources, name: FORBIDDEN[name]})
    assert {importer for importer, _ in upward(found) - set(UPWARD)} == {name}


def test_a_cycle_by_way_of_a_function_is_found(sources: dict[str, str]) -> None:
    cyclic = {
        "estimate.here": "from twolane.estimate.there import x",
        "estimate.there": "def late() -> None:\n    from twolane.estimate.here import y",
    }
    assert cycles(imports({**sources, **cyclic}), CYCLES) == [set(cyclic)]


@pytest.mark.parametrize(
    "source",
    [
        "def late() -> None:\n    import torch.cuda",
        "from transformers import AutoTokenizer",
        "from twolane.model.decoder import Decoder",
    ],
)
def test_torch_is_found(source: str, sources: dict[str, str]) -> None:
    assert torch_users(imports({**sources, "server.new": source})) == {"server.new"}
