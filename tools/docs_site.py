"""Hooks of the documentation site (`make docs`): pages outside docs/, and links that leave it."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Pages of the repository's root that the site has, too."""
COMMENT = re.compile(r"^(<!--.*-->\n)(?=\|)", re.MULTILINE)
"""A comment directly before a table, which Markdown for Python takes for a part of it."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not under docs/."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page whose links work in the site.

    A link to a page leads to that page; one to another file of the repository leads to the
    repository, or becomes its text if mkdocs.yml names no `repo_url`.
    """
    uri = page.file.src_uri
    folder = posixpath.dirname(uri if uri in OUTSIDE else f"docs/{uri}")

    def mended(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path, hash, anchor = link.partition("#")
        if not path or ":" in path:
            return match.group()
        target = posixpath.normpath(posixpath.join(folder, path))
        inside = target if target in OUTSIDE else target.removeprefix("docs/")
        if files.get_file_from_path(inside):
            local = posixpath.relpath(inside, posixpath.dirname(uri) or ".")
            return f"{image}[{text}]({local}{hash}{anchor})"
        if not (ROOT / target).exists():
            return match.group()  # strict mode names it
        if repository := config.repo_url:
            kind = "tree" if (ROOT / target).is_dir() else "blob"
            return f"[{text}]({repository.rstrip('/')}/{kind}/main/{target})"
        return f'<span title="{target}">{text}</span>'

    return COMMENT.sub(r"\1\n", LINK.sub(mended, markdown))
