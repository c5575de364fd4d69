"""Import rules: which package and layer may import which, and what never loads torch.

`[tool.importlinter]` in pyproject.toml has the layers, between packages and inside them. Here is
what import-linter cannot say: that a package may import single modules of another one alone, and
that torch is not loaded at once (it does not tell an import inside a function from one that runs
when its module is loaded). Every other rule counts both, and imports for types, too.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1]
SHARED = ("common", "devices", "playout", "sampling", "slo")
"""Packages and modules that all others may import."""
MESSAGES = (
    *("engine.messages", "engine.config", "engine.settings", "engine.prompt_work"),
    "engine.lateness",
    *("engine.kv.page_hash", "engine.kv.prefix_digest", "engine.constrained.matching"),
)
"""What the API process and routers know of the engine: messages, settings, and how prefixes are
named."""
FACTS = (
    *("model.spec", "model.page_layout", "model.shapes", "model.families"),
    *("model.load.hub", "model.load.configs", "model.load.facts"),
    *("model.load.gguf_file", "model.load.adapter_files"),
)
"""What is known of a model without its weights, and without torch."""
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "kernels": (),
    "parallel": (),
    "workload": (),
    "model": ("kernels", "parallel"),
    "lanes": ("model", "kernels", "parallel"),
    "estimate": (*FACTS, "kernels.sizes"),
    "systems": ("estimate",),
    "engine": ("systems", "estimate", "lanes", *FACTS, "kernels.sizes"),
    "frontend": (*MESSAGES, *FACTS),
    "server": (
        *("frontend", "router.correction", "router.replica_queue", "router.state"),
        *(*MESSAGES, *FACTS),
    ),
    "fleet": ("server", "router", *MESSAGES),
    "llm": ("frontend", "params", *MESSAGES),
    "params": (),
    "router": MESSAGES,
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
        *("model.load.opened", "model.load.mtp"),  # `doctor` reads what tensors there are
    ),
    "__main__": ("cli",),
}
"""Packages and modules that each package may import, besides itself and `SHARED`."""
WITHOUT_TORCH = ("systems", "estimate", "frontend", "server", "router")
"""Packages that never import torch, nor anything of the project that loads it at once."""
TORCH = ("torch", "triton", "flashinfer", "transformers")
"""Libraries that load torch when they are imported."""


@pytest.fixture
def graph() -> grimp.ImportGraph:
    """Every import of the project: for types and inside functions, too."""
    return grimp.build_graph("twolane", cache_dir=None)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def forbidden(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """(importer, imported) that `ALLOWED` does not have."""
    found = set()
    for importer in graph.modules - {"twolane"}:
        for target in graph.find_modules_directly_imported_by(importer) - {"twolane"}:
            one, other = importer.removeprefix("twolane."), target.removeprefix("twolane.")
            package = one.split(".")[0]
            if package not in SHARED and not within(
                other, (package, *SHARED, *ALLOWED.get(package, ()))
            ):
                found.add((one, other))
    return found


def at_once(tree: ast.AST) -> Iterator[str]:
    """Full names that a module imports when it is loaded: not in functions, nor for types."""
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    typing = isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test)
    if not typing and not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in ast.iter_child_nodes(tree):
            yield from at_once(child)


@cache
def loaded_by(source: str) -> frozenset[str]:
    """Full names that a module imports when it is loaded, by its source, which is parsed once."""
    return frozenset(at_once(ast.parse(source)))


def torch_users(sources: Mapping[str, str]) -> set[str]:
    """Modules of `WITHOUT_TORCH` that name torch, or load it by what they import at once."""
    loaded = {name: loaded_by(source) for name, source in sources.items()}
    users = {name for name, names in loaded.items() if any(within(n, TORCH) for n in names)}
    before = 0
    while before < len(users):
        before = len(users)
        users |= {
            name
            for name, names in loaded.items()
            if any(each in users or each.rpartition(".")[0] in users for each in names)
        }
    users |= {
        name for name, source in sources.items() if re.search(r"\b(import|from) torch", source)
    }
    return {name for name in users if within(name.removeprefix("twolane."), WITHOUT_TORCH)}


def sources() -> dict[str, str]:
    """Every module of the project, by its full name."""
    found = {}
    for path in (PROJECT / "src").rglob("*.py"):
        parts = path.relative_to(PROJECT / "src").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def test_layers_hold() -> None:
    """In a process of its own: the program switches off all loggers that there are."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports("
    program += f"{str(PROJECT / 'pyproject.toml')!r}, cache_dir=None))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_packages_import_what_they_may(graph: grimp.ImportGraph) -> None:
    assert forbidden(graph) == set()


def test_every_package_has_a_rule(graph: grimp.ImportGraph) -> None:
    packages = {name.removeprefix("twolane.") for name in graph.find_children("twolane")}
    assert packages == {*ALLOWED, *SHARED}


def test_packages_import_nothing_themselves(graph: grimp.ImportGraph) -> None:
    """So what a module imports is all that is loaded with it."""
    packages = {name for name in graph.modules if graph.find_children(name)} - {"twolane"}
    assert {name for name in packages if graph.find_modules_directly_imported_by(name)} == set()


def test_decisions_and_http_are_free_of_torch() -> None:
    assert torch_users(sources()) == set()


def test_imports_inside_functions_and_for_types_count(graph: grimp.ImportGraph) -> None:
    assert graph.direct_import_exists(
        importer="twolane.lanes.load", imported="twolane.lanes.cuda.machine"
    )
    assert graph.direct_import_exists(importer="twolane", imported="twolane.llm")


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("systems.plan", "lanes.work"),
        ("engine.loop", "server.options"),
        ("frontend.body", "engine.engine"),
        ("router.state", "engine.kv.manager"),
    ],
)
def test_a_forbidden_import_is_found(
    importer: str, imported: str, graph: grimp.ImportGraph
) -> None:
    graph.add_import(importer=f"twolane.{importer}", imported=f"twolane.{imported}")
    assert forbidden(graph) == {(importer, imported)}


@pytest.mark.parametrize(
    "source",
    [
        "def late() -> None:\n    import torch.cuda",
        "from transformers import AutoTokenizer",
        "from twolane.model.decoder import Decoder",
    ],
)
def test_torch_is_found(source: str) -> None:
    assert torch_users({**sources(), "twolane.server.new": source}) == {"twolane.server.new"}


DISTRIBUTIONS = {
    "cuda": "cuda-bindings",
    "flashinfer": "flashinfer-python",
    "pynvml": "nvidia-ml-py",
}
"""Distributions of modules by names that do not say so and are not installed everywhere."""


def imported_modules(sources: Mapping[str, str]) -> set[str]:
    """Return the modules of other projects that are imported, those named in a text too."""
    found = set[str]()
    for source in sources.values():
        found |= set(re.findall(r'import_module\("([\w.]+)"\)', source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    own = {"twolane", "__future__", *sys.stdlib_module_names}
    return {name for name in found if name.partition(".")[0] not in own}


def test_what_is_imported_is_declared() -> None:
    """Also with an upper bound where a private module is imported."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [project["dependencies"], *(extras[name] for name in extras.keys() - {"dev"})]
    listed = [Requirement(each) for some in used for each in some]
    declared = {canonicalize_name(each.name): each for each in listed}
    installed = packages_distributions()
    for module in sorted(imported_modules(sources())):
        top, *rest = module.split(".")
        names = [DISTRIBUTIONS[top]] if top in DISTRIBUTIONS else installed.get(top, [top])
        known = [declared[name] for name in map(canonicalize_name, names) if name in declared]
        assert known, f"{module} is imported and {names} is not declared"
        private = any(re.match("_[^_]", name) for name in rest)
        if private or module.startswith("uvicorn.protocols."):
            assert "<" in str(known[0].specifier), f"{module} is private: {known[0]} has no bound"
