"""What scripts and tests that most machines do not run take of the package is there.

Tests of GPUs and benchmarks are read and not run where no GPU is, so that a new name in the
package would break them unseen.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests" / "gpu").rglob("*.py")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_names_exist(file: Path) -> None:
    assert list(missing(ast.parse(file.read_text()))) == []


def missing(tree: ast.Module) -> Iterator[str]:
    """Names of the package that a file imports, or takes of a module it imports, and that are not
    there."""
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("twolane"):
            continue
        for alias in node.names:
            found = taken(str(node.module), alias.name)
            if found is None:
                yield f"{node.module}.{alias.name}"
            elif isinstance(found, ModuleType):
                modules[alias.asname or alias.name] = found
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and stored(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            module = None if name in bound else modules.get(name)
            if module is not None and not hasattr(module, node.attr) and not stored(node):
                yield f"{module.__name__}.{node.attr}"


def stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def taken(module: str, name: str) -> object | None:
    """What `from module import name` gives; None: nothing."""
    if (found := getattr(importlib.import_module(module), name, None)) is not None:
        return found
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return None
