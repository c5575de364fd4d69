"""Files that are there whole or not at all, whoever else writes them."""

import contextlib
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder where there is none; nothing else is left if that fails.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".keep-", dir=path.parent) as scratch:
        whole = Path(scratch) / path.name
        whole.write_bytes(content)
        whole.replace(path)


def keep(path: Path, content: bytes) -> None:
    """Write a file of a cache; a cache that cannot be written is none."""
    with contextlib.suppress(OSError):
        write_whole(path, content)
