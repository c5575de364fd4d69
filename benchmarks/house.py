"""Figures of readability: how easily a stranger finds and reads things, counted in one checkout.

    python benchmarks/house.py [CHECKOUT]

It reads the files of CHECKOUT (default: this one) without importing them, so that it counts any
commit: `git worktree add ../before COMMIT && python benchmarks/house.py ../before`. `--names` also
lists what was counted. Figures with a bound are held by CI: `--check` ends with 1 where one is
above its bound, and lists what is.
"""

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 60
"""Lines of the longest function that counts as short."""

FRAGMENTS = (
    "Of ", "Than ", "For which ", "By which ", "From which ", "In which ", "On which ",
    "To which ", "With which ", "Whose ", "Times what ", "So many ", "So much ",
)  # fmt: skip
"""Beginnings of a docstring that lean on the name before it instead of starting a sentence."""

ARROWS = {
    "cli": ["server", "bench", "profile", "sim"],
    "bench": ["server", "sim", "results", "workload"],
    "server": ["frontend"],
    "frontend": ["engine"],
    "sim": ["engine"],
    "engine": ["systems", "lanes"],
    "systems": ["estimate"],
    "lanes": ["model"],
    "model": ["kernels"],
    "kernels": ["common"],
    "estimate": ["common"],
}
"""The packages that each package stands on; an import against an arrow is an upward import."""

FORMER = {
    "api": "server", "configfile": "cli", "doctor": "cli", "simulate": "sim", "files": "common",
    "garbage": "common", "resources": "common", "sizes": "common", "vocabulary": "common",
}  # fmt: skip
"""Packages under the names that they had in earlier layouts."""

SETTINGS = ("Settings", "Options", "Config", "Search")
"""Endings of the names of classes whose fields are settings."""

HELD = {
    "functions over 60 lines": 0,
    "docstrings that begin in mid-sentence": 0,
    "names of classes that stand twice": 0,
    "upward imports": 0,
    "cycles of modules": 0,
    "prose lines over 100 columns": 0,
    "README, words": 900,
    "files in the fullest package": 20,
}
"""Largest value that CI lets each of these figures have."""

Modules = dict[str, ast.Module]
"""Syntax trees by dotted name without the leading `twolane`."""


def read(source: Path) -> Modules:
    """Parse every module below `source`."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[dotted] = ast.parse(path.read_text())
    return found


def long_functions(modules: Modules, triton: bool) -> list[str]:
    """Functions of more than `MAX_LINES` lines: Triton kernels, or all the others."""
    found = []
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            kernel = any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
            if lines > MAX_LINES and kernel == triton:
                found.append(f"{module}.{node.name} ({lines} lines)")
    return found


def repeated_classes(modules: Modules) -> list[str]:
    """Return names of classes that stand in more than one place."""
    places = defaultdict(list)
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    return [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]


def fragments(modules: Modules) -> list[str]:
    """Docstrings, those of constants and fields among them, that begin in mid-sentence."""
    found = []
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str) and text.startswith(FRAGMENTS):
                    found.append(f"{module}:{node.lineno}: {text.splitlines()[0]}")
    return found


def imports(module: str, tree: ast.Module, known: Modules) -> Iterator[str]:
    """Yield the modules of this project that `module` imports anywhere, for types alone too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if not name.startswith("twolane."):
                continue
            target = name.removeprefix("twolane.")
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != module:
                yield target


def package(module: str) -> str:
    """Return the package of a module, under its present name."""
    first = module.split(".")[0]
    return FORMER.get(first, first)


def below(name: str) -> set[str]:
    """Return every package that `name` stands on, directly or through others."""
    direct = ARROWS.get(name, [])
    return set(direct).union(*(below(each) for each in direct))


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a module in a package that stands on the importer's own."""
    return [
        f"{module} -> {target}"
        for module, targets in graph.items()
        for target in sorted(targets)
        if package(module) in below(package(target))
    ]


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Groups of nodes each of which reaches every other one."""
    reached = {node: _reachable(node, graph) for node in graph}
    groups = {
        frozenset(other for other in reached[node] if node in reached.get(other, ()))
        for node in graph
        if node in reached[node]
    }
    return sorted(" <-> ".join(sorted(group)) for group in groups)


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def settings(modules: Modules) -> Counter[str]:
    """Return for each option of a command: the places where it is declared or handed over by its
    name.

    A place is a parameter that carries `Option(...)`, a field of a class of settings, or a keyword
    argument `name=name`.
    """
    options, places = set(), Counter[str]()
    for node in (node for tree in modules.values() for node in ast.walk(tree)):
        if isinstance(node, ast.arg) and "Option(" in _source(node.annotation):
            options.add(node.arg)
            places[node.arg] += 1
        elif isinstance(node, ast.ClassDef) and node.name.endswith(SETTINGS):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    if {"Option(", "Meta("} & set(re.findall(r"\w+\(", _source(field.annotation))):
                        options.add(field.target.id)
                    places[field.target.id] += 1
        elif isinstance(node, ast.keyword) and _source(node.value) == node.arg:
            places[node.arg] += 1
    return Counter({name: places[name] for name in options})


def _source(node: ast.expr | None) -> str:
    return ast.unparse(node) if node else ""


def prose(checkout: Path) -> list[tuple[int, str]]:
    """Length and place of each line of prose in README and docs: no tables, no code."""
    found = []
    for page in sorted([*checkout.glob("*.md"), *checkout.glob("docs/**/*.md")]):
        fenced = False
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            fenced ^= line.lstrip().startswith("```")
            if not fenced and not line.startswith(("|", "    ")):
                found.append((len(line), f"{page.relative_to(checkout)}:{number}"))
    return found


def largest_package(source: Path) -> tuple[int, str]:
    """Python files in the fullest single folder, and the folder."""
    files = Counter(str(path.parent.relative_to(source)) for path in source.rglob("*.py"))
    name, count = files.most_common(1)[0]
    return count, name


def figures(checkout: Path) -> Iterator[tuple[str, object, list[str]]]:
    """Yield each figure: what is counted, the count, and what was counted."""
    source = checkout / "src/twolane"
    modules = read(source)
    graph = {name: set(imports(name, tree, modules)) for name, tree in modules.items() if name}
    packages: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        packages[package(module)] |= {package(each) for each in targets} - {package(module)}
    longest, lines = max(prose(checkout)), prose(checkout)
    for what, names in {
        f"functions over {MAX_LINES} lines": long_functions(modules, triton=False),
        f"Triton kernels over {MAX_LINES} lines": long_functions(modules, triton=True),
        "names of classes that stand twice": repeated_classes(modules),
        "docstrings that begin in mid-sentence": fragments(modules),
        "upward imports": upward(graph),
        "cycles of modules": cycles(graph),
        "cycles of packages": cycles(dict(packages)),
        "prose lines over 100 columns": [at for width, at in lines if width > 100],
    }.items():
        yield what, len(names), names
    written = settings(modules)
    yield "options of commands", len(written), []
    mean = written.total() / len(written)
    yield (
        "places an option is written, mean",
        f"{mean:.1f}",
        [f"{name}: {count}" for name, count in written.most_common()],
    )
    yield "longest prose line, columns", f"{longest[0]} ({longest[1]})", []
    yield "README, words", len((checkout / "README.md").read_text().split()), []
    files, fullest = largest_package(source)
    yield "files in the fullest package", files, [fullest]
    yield "lines of src", sum(p.read_text().count("\n") for p in source.rglob("*.py")), []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--names", action="store_true", help="also list what was counted")
    parser.add_argument("--check", action="store_true", help="end with 1 above a bound")
    args = parser.parse_args()
    broken = False
    for what, count, names in figures(args.checkout):
        bound = HELD.get(what)
        above = isinstance(count, int) and bound is not None and count > bound
        broken |= above
        said = "" if bound is None else f"  at most {bound}{', BROKEN' if above else ''}"
        print(f"{what:42} {count}{said}")
        if args.names or (args.check and above):
            print(*(f"    {name}" for name in names), sep="\n")
    if args.check and broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
