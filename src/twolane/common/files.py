"""Checks of paths, files that are written atomically, and what is kept in caches."""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger("twolane")


def is_folder(path: Path) -> bool:
    """Return whether the path is a folder; False for a name that no file can have."""
    with contextlib.suppress(OSError):
        return path.is_dir()
    return False


def is_file(path: Path) -> bool:
    """Return whether the path is a file; False for a name that no file can have."""
    with contextlib.suppress(OSError):
        return path.is_file()
    return False


def is_plain(path: Path) -> bool:
    """Return whether the path is a file, a folder or nothing: not a pipe, socket or device."""
    with contextlib.suppress(OSError):
        return not path.exists() or path.is_file() or path.is_dir()
    return True


def is_of_kernel(path: Path) -> bool:
    """Return whether the path leads into /proc or /sys, whose files tell of this process and this
    machine."""
    with contextlib.suppress(OSError, RuntimeError):  # a link to itself
        return path.resolve().parts[1:2] in (("proc",), ("sys",))
    return False


def expanded(name: str) -> Path:
    """Return a path with ~ replaced by the home folder, where that is known."""
    with contextlib.suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def user_cache() -> Path:
    """Return the user's cache folder: XDG_CACHE_HOME, else ~/.cache, else /.cache where there is no
    home, as in containers."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    home = expanded("~")
    return (home if home.is_absolute() else Path("/")) / ".cache"


@contextlib.contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Add the file's name to an OSError of the block that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically, creating its folder where there is none.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".keep-", dir=path.parent) as scratch:
        whole = Path(scratch) / path.name
        whole.write_bytes(content)
        whole.replace(path)


def write_cache(path: Path, content: bytes) -> None:
    """Write a file of a cache; do nothing if it cannot be written."""
    with contextlib.suppress(OSError):
        write_atomically(path, content)


def kept(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return what a cache keeps in a file; if there is none, or a damaged one, make it and keep it.

    Args:
        path: file, known by all that its content depends on.
        make: Makes the content.
    """
    data = b""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
    size = hashlib.sha256().digest_size
    digest, content = data[:size], data[size:]
    if hashlib.sha256(content).digest() == digest:
        return content
    if data:
        log.warning("%s is damaged and is made again", path)
    content = make()
    keep(path, content)
    return content


def keep(path: Path, content: bytes) -> None:
    """Keep in a cache what `kept` returns, after its digest."""
    write_cache(path, hashlib.sha256(content).digest() + content)
