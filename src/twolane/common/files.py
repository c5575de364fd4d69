"""Whether files are there, and files that are written whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def is_folder(path: Path) -> bool:
    """Whether this is a folder; a name that no file can have is none."""
    with contextlib.suppress(OSError):
        return path.is_dir()
    return False


def is_file(path: Path) -> bool:
    """Whether this is a file; a name that no file can have is none."""
    with contextlib.suppress(OSError):
        return path.is_file()
    return False


def is_plain(path: Path) -> bool:
    """Whether this is a file, a folder, or nothing: no pipe, socket or device."""
    with contextlib.suppress(OSError):
        return not path.exists() or path.is_file() or path.is_dir()
    return True


def expanded(name: str) -> Path:
    """Return a path with the home folder in the place of ~, if anyone says what that is."""
    with contextlib.suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def user_cache() -> Path:
    """Return the folder of this user's caches: XDG_CACHE_HOME, else ~/.cache. The home of
    a user without a name and without HOME, as containers have, is /."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    home = expanded("~")
    return (home if home.is_absolute() else Path("/")) / ".cache"


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an error of what is done meanwhile the name of the file, if it has none: that of a write
    to a full disk does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


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
