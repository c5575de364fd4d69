"""What README and docs promise about the repository: links lead somewhere, named files exist."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`(?:src/twolane/)?([a-z0-9_]+(?:/[a-z0-9_]+)*\.(?:py|cu|json))`")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    ]
    for page in pages:
        path = str(page.relative_to(ROOT / "docs"))
        assert path == "README.md" or f"]({path})" in index, path
