"""What happens to fields of bodies that the server does not know."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from twolane.frontend.body import IGNORED

log = logging.getLogger("twolane.server")
MOST_TOLD = 1000
"""The log tells of at most this many names: clients can invent more."""


class UnknownFields:
    """Refuses unknown fields, or ignores them and tells the log of each name once.

    Args:
        ignore: whether they are ignored.
    """

    def __init__(self, *, ignore: bool) -> None:
        self._ignore = ignore
        self._told: set[tuple[str, str]] = set()

    @contextmanager
    def during(self, path: str) -> Iterator[None]:
        """Treat the fields of the bodies that are read meanwhile.

        Args:
            path: of the request.
        """
        if not self._ignore:
            yield
            return
        ignored: list[str] = []
        before = IGNORED.set(ignored)
        try:
            yield
        finally:
            IGNORED.reset(before)
            self._tell(path, ignored)

    def _tell(self, path: str, names: list[str]) -> None:
        for name in dict.fromkeys(names):
            if (path, name) not in self._told and len(self._told) < MOST_TOLD:
                self._told.add((path, name))
                log.warning("%s: the unknown field %r has no effect", path, name)
