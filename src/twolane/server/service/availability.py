"""Whether requests can be served, and why not."""

from collections.abc import Callable

from twolane.frontend.engine_client import EngineClient
from twolane.server.http.errors import ApiError


class Availability:
    """Tells whether requests can be served.

    Args:
        engine: a running engine.
        reading: returns why some requests cannot be read for the moment; None: all can.
    """

    def __init__(
        self, engine: EngineClient, reading: Callable[[], str | None] = lambda: None
    ) -> None:
        self.draining = False
        """Whether the server is shutting down; set once when it stops."""
        self._engine, self._reading = engine, reading

    @property
    def problem(self) -> str | None:
        """Reason why no request can be served; None: requests are served."""
        if self._engine.failure is not None:
            return f"the engine is gone: {self._engine.failure}"
        if self._engine.liveness.problem is not None:
            return self._engine.liveness.problem
        return "the server is shutting down" if self.draining else None

    def check_ready(self) -> None:
        """Tell a probe what `check` tells, or that some requests cannot be read.

        Raises:
            ApiError: 503.
        """
        self.check()
        if (problem := self._reading()) is not None:
            raise ApiError(503, problem, code="unavailable")

    def check(self) -> None:
        """Refuse requests that can no longer be served.

        Raises:
            ApiError: 503.
        """
        if self.problem is not None:
            raise ApiError(503, self.problem, code="unavailable")
