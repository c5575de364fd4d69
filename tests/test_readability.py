"""The figures that `tools/readability.py` counts and CI holds."""

import ast
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tools/readability.py"
SOURCE = f'''"""A module."""


def long(a, b, c):
    """Do something.

    Args:
        a: The first letter, which
            in most alphabets stands first.
        b: of the letters, the second.

    Raises:
        ValueError: in no case.
    """
{chr(10).join(f"    x{i} = {i}  # after the one before" for i in range(70))}
    # A comment.
    x: str = "behind no name"
    """Said behind the others."""


class Undocumented:
    def _private(self): ...
'''


def counted(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_above_a_bound_is_named(tmp_path: Path) -> None:
    (tmp_path / "src/twolane").mkdir(parents=True)
    (tmp_path / "src/twolane/module.py").write_text(SOURCE)
    (tmp_path / "README.md").write_text("word " * 19 + "\n")
    found = counted(str(tmp_path), "--check", "--names")
    assert found.returncode == 1, found.stderr
    assert found.stdout.count("BROKEN") == 4
    assert "module.long (84 lines)" in found.stdout
    assert "module:10: b: of the letters" in found.stdout
    figures = dict(re.findall(r"(?m)^(\S.*?) {2,}(\d+)", found.stdout))
    assert figures["lines of code of src"] == "74"
    assert figures["'behind' in docstrings"] == "1"
    assert figures["descriptions of arguments that lean on their name"] == "1"
    assert "    module.Undocumented" in found.stdout


def test_what_triton_does_not_compile_has_types() -> None:
    kernels = Path(__file__).parents[1] / "src/twolane/kernels"
    for path in sorted(kernels.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
            if isinstance(node, ast.FunctionDef) and not "".join(decorators).startswith("triton"):
                untyped = {a.arg for a in node.args.args if a.annotation is None}
                assert untyped <= {"self", "cls"}, f"{path.name}:{node.lineno} {node.name}"
