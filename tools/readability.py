"""Figures of readability: how easily a stranger finds and reads things, counted in one checkout.

    python tools/readability.py [CHECKOUT]

It reads the files of CHECKOUT (default: this one) without importing them, so that it counts any
commit: `git worktree add ../before COMMIT && python tools/readability.py ../before`. `--names` also
lists what was counted. CI holds figures with a bound: `--check` ends with 1 where one is above its
bound, and lists what is. Import rules are in `tests/test_imports.py`.
"""

import argparse
import ast
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MAX_LINES = 60
"""Lines of the longest function that counts as short."""

FRAGMENTS = (
    "Of ", "Than ", "For which ", "By which ", "From which ", "In which ", "On which ",
    "To which ", "With which ", "Whose ", "Times what ", "So many ", "So much ",
)  # fmt: skip
"""Beginnings of a docstring that lean on the name before it instead of starting a sentence."""

SETTINGS = ("Settings", "Options", "Config", "Search")
"""Endings of the names of classes whose fields are settings."""

LEANING = re.compile(
    r"^\s+\w+: (of|in|that|which|to|by|for|from|with|its|on|at|as|how|whether|what|where|when|so"
    r"|than|into) "
)
"""An entry of `Args:` that leans on the argument's name instead of standing alone."""

MAX = {
    "functions over 60 lines": 0,
    "docstrings that begin in mid-sentence": 0,
    "descriptions of arguments that lean on their name": 0,
    "'behind' in docstrings": 9,
    "names of classes that stand twice": 0,
    "prose lines over 100 columns": 0,
    "README, words": 600,
    "files in the fullest package": 20,
    "lines of functions, P99": 45,
    "public names without a docstring, %": 5.0,
    "lines of benchmarks": 8_000,
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


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a tree, which is walked once."""
    return [*ast.walk(tree)]


def long_functions(modules: Modules, triton: bool) -> list[str]:
    """Functions of more than `MAX_LINES` lines: Triton kernels, or all the others."""
    found = []
    for module, tree in modules.items():
        for node in nodes(tree):
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
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    return [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]


def fragments(modules: Modules) -> list[str]:
    """Docstrings, those of constants and fields among them, that begin in mid-sentence."""
    return [
        f"{module}:{node.lineno}: {text.splitlines()[0]}"
        for module, tree in modules.items()
        for node, text in docstrings(tree)
        if text.startswith(FRAGMENTS)
    ]


def leaning(modules: Modules) -> list[str]:
    """Entries of `Args:` sections that lean on the argument's name."""
    found = []
    for module, tree in modules.items():
        for node, text in docstrings(tree):
            inside = False
            for offset, row in enumerate(text.splitlines()):
                heading = re.fullmatch(r"\s*(\w+):", row)
                inside = heading[1] == "Args" if heading else inside
                if inside and LEANING.match(row):
                    found.append(f"{module}:{node.lineno + offset}: {row.strip()}")
    return found


def behind(modules: Modules) -> list[str]:
    """Docstrings that say "behind", which is for places; "after" is for time."""
    return [
        f"{module}:{node.lineno}"
        for module, tree in modules.items()
        for node, text in docstrings(tree)
        for _ in re.findall(r"\bbehind\b", text)
    ]


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.Expr, str]]:
    """Yield the docstrings of modules, classes and functions, and those of constants and fields."""
    for node in nodes(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node, text


def lines_of_code(path: Path) -> int:
    """Return the lines of a file without docstrings, comments and blank lines."""
    text = path.read_text()
    quiet: set[int] = set()
    for node, _ in docstrings(ast.parse(text)):
        quiet.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    rows = enumerate(text.splitlines(), start=1)
    return sum(
        bool(r.strip()) and not r.lstrip().startswith("#") and i not in quiet for i, r in rows
    )


def lengths(modules: Modules) -> list[int]:
    """Lines of each function, ascending."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in modules.values()
        for node in nodes(tree)
        if isinstance(node, kinds)
    )


def undocumented(modules: Modules) -> tuple[float, list[str]]:
    """Percentage of public modules, classes, functions and methods without a docstring, and they.

    Functions inside functions are nobody's interface.
    """
    total, found = 0, []

    def look(name: str, node: ast.AST) -> None:
        nonlocal total
        total += 1
        if ast.get_docstring(node) is None:  # type: ignore[arg-type]
            found.append(name)
        if isinstance(node, ast.Module | ast.ClassDef):
            for child in node.body:
                kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                if isinstance(child, kinds) and not child.name.startswith("_"):
                    look(f"{name}.{child.name}", child)

    for module, tree in modules.items():
        look(module, tree)
    return 100 * len(found) / total, found


def settings(modules: Modules) -> Counter[str]:
    """Return for each option of a command: the places where it is declared or handed over by its
    name.

    A place is a parameter that carries `Option(...)`, a field of a class of settings, or a keyword
    argument `name=name`.
    """
    options, places = set(), Counter[str]()
    for node in (node for tree in modules.values() for node in nodes(tree)):
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
    """Python files in the fullest single folder, and the folder; a family of models is a file."""
    files = Counter(str(path.parent.relative_to(source)) for path in source.rglob("*.py"))
    del files["model/families"]
    name, count = files.most_common(1)[0]
    return count, name


def figures(checkout: Path) -> Iterator[tuple[str, object, list[str]]]:
    """Yield each figure: what is counted, the count, and what was counted."""
    source = checkout / "src/twolane"
    modules = read(source)
    longest, lines = max(prose(checkout)), prose(checkout)
    for what, names in {
        f"functions over {MAX_LINES} lines": long_functions(modules, triton=False),
        f"Triton kernels over {MAX_LINES} lines": long_functions(modules, triton=True),
        "names of classes that stand twice": repeated_classes(modules),
        "docstrings that begin in mid-sentence": fragments(modules),
        "descriptions of arguments that lean on their name": leaning(modules),
        "'behind' in docstrings": behind(modules),
        "prose lines over 100 columns": [at for width, at in lines if width > 100],
    }.items():
        yield what, len(names), names
    written = settings(modules)
    yield "options of commands", len(written), []
    mean = written.total() / max(1, len(written))
    yield (
        "places an option is written, mean",
        f"{mean:.1f}",
        [f"{name}: {count}" for name, count in written.most_common()],
    )
    yield "longest prose line, columns", f"{longest[0]} ({longest[1]})", []
    yield "README, words", len((checkout / "README.md").read_text().split()), []
    files, fullest = largest_package(source)
    yield "files in the fullest package", files, [fullest]
    found = lengths(modules)
    yield "lines of functions, P99", found[int(0.99 * len(found))], []
    share, missing = undocumented(modules)
    yield "public names without a docstring, %", round(share, 1), missing
    yield "lines of src", sum(p.read_text().count("\n") for p in source.rglob("*.py")), []
    yield "lines of code of src", sum(map(lines_of_code, source.rglob("*.py"))), []
    scripts = (checkout / "benchmarks").rglob("*.py")
    yield "lines of benchmarks", sum(p.read_text().count("\n") for p in scripts), []


def main() -> None:
    """Print the figures; with `--check`, end with 1 if one is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--names", action="store_true", help="also list what was counted")
    parser.add_argument("--check", action="store_true", help="end with 1 above a bound")
    args = parser.parse_args()
    gc.disable()  # half a million nodes are no garbage
    broken = False
    for what, count, names in figures(args.checkout):
        bound = MAX.get(what)
        above = isinstance(count, int | float) and bound is not None and count > bound
        broken |= above
        said = "" if bound is None else f"  at most {bound}{', BROKEN' if above else ''}"
        print(f"{what:50} {count}{said}")
        if args.names or (args.check and above):
            print(*(f"    {name}" for name in names), sep="\n")
    if args.check and broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
