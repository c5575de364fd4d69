"""Handling of unknown fields in bodies."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from twolane.frontend.body import IGNORED

log = logging.getLogger("twolane.server")


class UnknownFields:
    """Refuses unknown fields, or ignores them and logs each name once.

    Args:
        ignore: true if unknown fields are ignored.
    """

    def __init__(self, *, ignore: bool) -> None:
        self._ignore = ignore
        self._logged: set[tuple[str, str]] = set()

    @contextmanager
    def during(self, path: str) -> Iterator[None]:
        """Handle unknown fields of bodies parsed within the block.

        Args:
            path: the request's path.
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
            self._log(path, ignored)

    def _log(self, path: str, names: list[str]) -> None:
        for name in dict.fromkeys(names):
            # Most field names that are logged, since clients can invent any number.
            if (path, name) not in self._logged and len(self._logged) < 1000:
                self._logged.add((path, name))
                log.warning("%s: the unknown field %r has no effect", path, name)
