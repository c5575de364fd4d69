"""Folders for the sockets between two processes, each removed with its owner."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX, OWNER = "twolane-", "owner"
"""Prefix of folder names, and the file in a folder that its owner keeps locked."""


class SocketFolder:
    """A new folder that only this user can enter, in use as long as this process lives."""

    def __init__(self) -> None:
        self.path = _private_folder()
        making = self.path / "making"
        self._held = os.open(making, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_EX)
        making.rename(self.path / OWNER)  # with the lock on it: nobody takes it for a dead one's

    def remove(self) -> None:
        """Remove the folder; once only."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def remove_dead_folders() -> None:
    """Remove the folders of dead processes of this user."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        for owner in Path(place).glob(f"{PREFIX}*/{OWNER}"):
            with contextlib.suppress(OSError):  # it is not ours, or in use, or gone meanwhile
                _remove_if_dead(owner)


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    # Most characters of a folder's path: Unix socket paths end at 107 bytes.
    if len(str(folder)) <= 90:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))


def _remove_if_dead(owner: Path) -> None:
    """Remove the folder of an owner's file if it is this user's and its owner is dead.

    Raises:
        OSError: the file is gone, cannot be opened, or is locked: the owner lives.
    """
    file = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_uid == os.getuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
    finally:
        os.close(file)
