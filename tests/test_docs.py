"""What README and docs promise of the repository is there: links, files, names, commands."""

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from twolane.cli.lazy import LazyCommands
from twolane.cli.main import app
from twolane.model.load.hub import ALIASES
from twolane.model.shapes import SHAPES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
WORD = re.compile(r"\w+")
NAME = re.compile(r"`([A-Za-z_]\w*\.[A-Za-z_]\w*)(?:\(\))?`")
"""A name with its owner, such as `KVCacheManager.match`."""
BLOCK = re.compile(r"^```(?:console|bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`(?:src/twolane/)?([a-z0-9_]+(?:/[a-z0-9_]+)*\.(?:py|cu|json))`")
THEIRS = ("batch_prefill_sm90.cu", "vllm/v1/sample/sampler.py")
"""Source files of FlashInfer and vLLM that docstrings cite."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_quickstart_lists_every_built_in_shape() -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    [paragraph] = (part for part in page.split("\n\n") if part.startswith("A built-in *shape*"))
    assert set(re.findall(r"`([\w.-]+)`", paragraph)) == SHAPES.keys() - ALIASES.keys()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    roots = (ROOT, ROOT / "src/twolane", ROOT / "benchmarks/results")
    for path in FILE.findall(page.read_text()):
        if "/" in path:
            assert any((root / path).exists() for root in roots), f"{name(page)} names {path}"


def test_every_source_file_that_a_docstring_names_exists() -> None:
    files = [
        file
        for top in ("src", "benchmarks", "tests", "tools")
        for file in (ROOT / top).rglob("*.*")
    ]
    code = [file for file in files if file.suffix in (".py", ".cu", ".cuh")]
    endings = {"/".join(file.parts[-n:]) for file in code for n in range(1, len(file.parts))}
    for file in code:
        for path in FILE.findall(file.read_text()):
            ours = not path.endswith(".json") and path not in THEIRS
            assert not ours or path in endings, f"{name(file)} names {path}"


def test_pages_have_what_is_looked_for_in_them() -> None:
    """Else the other tests would look at nothing."""
    text = "".join(page.read_text() for page in PAGES)
    for pattern in (LINK, FILE, BLOCK, NAME):
        assert len(pattern.findall(text)) > 10, pattern


def test_every_name_of_a_design_page_is_one_of_the_source() -> None:
    files = [*(ROOT / "src").rglob("*.py")]
    words = {path.stem for path in files}.union(*(WORD.findall(path.read_text()) for path in files))
    for page in ROOT.glob("docs/design/*.md"):
        for found in NAME.findall(page.read_text()):
            assert words.issuperset(found.split(".")), f"{name(page)} names {found}"


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `twolane` of each command in a page's blocks."""
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if line.removeprefix("$ ").startswith("twolane "):
                yield shlex.split(line.removeprefix("$ "), comments=True)[1:]


def options(words: list[str]) -> set[str]:
    """The options of the command that these words name."""
    command: Any = get_command(app)
    for word in words:
        command = command.load(word) if isinstance(command, LazyCommands) else command
    return {one for param in command.params for one in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_option_of_a_command_that_a_page_shows_is_one_of_it(page: Path) -> None:
    for words in commands(page):
        known = options(words) | (options(["serve"]) if "fleet" in words else set())
        used = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert used <= known | {"--help"}, words


def test_the_tables_of_the_results_pages_are_those_of_the_files() -> None:
    tables = runpy.run_path(str(ROOT / "benchmarks/tables.py"))
    texts = [path.read_text() for path in tables["PAGES"]]
    try:
        made = [tables["page"](text) for text in texts]
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("the dates of the rows need the repository's history")
    assert texts == made, "run `python benchmarks/tables.py`"


def test_the_architecture_page_lists_every_package() -> None:
    page = (ROOT / "docs/design/architecture.md").read_text()
    rows = re.findall(r"^\| (`[a-z`, ]+`) \|", page, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"[a-z]+", row)}
    packages = {path.parent.name for path in (ROOT / "src/twolane").glob("*/__init__.py")}
    assert packages <= listed


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/guides/*.md"),
        *ROOT.glob("docs/design/*.md"),
        *ROOT.glob("docs/contributing/*.md"),
    ]
    for page in pages:
        path = str(page.relative_to(ROOT / "docs"))
        assert path == "README.md" or f"]({path})" in index, path


def test_the_navigation_of_the_site_lists_every_page() -> None:
    """As strict mode would say; `make docs` needs packages of its own."""
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages | {"CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"} == listed


def test_the_reference_names_what_the_source_has() -> None:
    """As mkdocstrings would say; a class is defined in the module that a page names."""
    named = [
        name
        for page in ROOT.glob("docs/reference/*.md")
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(named) > 10
    for name in named:
        module, _, last = name.rpartition(".")
        file = ROOT / "src" / module.replace(".", "/")
        if last[0].isupper():
            assert f"class {last}" in file.with_suffix(".py").read_text(), name
        else:
            assert (file / f"{last}.py").exists(), name
