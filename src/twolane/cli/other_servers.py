"""What to use here for an option of another server, read from the guides' tables."""

import re
from collections.abc import Iterator
from pathlib import Path

INSTALLED, SOURCE = Path(__file__).parent / "guides", Path(__file__).parents[3] / "docs" / "guides"
"""Folders of the guides: of a wheel, which has a copy of them, and of a clone."""
SERVERS = ("vllm", "sglang", "llama-cpp")
"""Those whose options a page `from-SERVER.md` of the guides lists."""


def instead_of(option: str) -> str | None:
    """Return in plain text what the guides say of another server's option; None: nothing."""
    return next((here for name, here in _rows() if name == option), None)


def _rows() -> Iterator[tuple[str, str]]:
    for server in SERVERS:
        page = (INSTALLED if INSTALLED.is_dir() else SOURCE) / f"from-{server}.md"
        text = page.read_text() if page.is_file() else ""
        _, _, text = text.partition("\n## Options with another name, or none\n")
        for options, here in re.findall(r"^\| (`-.+?) \| (.+) \|$", text, re.MULTILINE):
            words = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", here).replace("`", "")
            yield from ((name, words) for name in re.findall(r"`(-.+?)`", options))
