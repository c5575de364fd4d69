"""Whether requests can be served, and why not."""

from twolane.frontend.engine_client import EngineClient
from twolane.server.http.errors import ApiError


class Availability:
    """Tells whether requests can be served.

    Args:
        engine: a running engine.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.draining = False
        """Whether the server is shutting down; set once when it stops."""
        self._engine = engine

    @property
    def problem(self) -> str | None:
        """Reason why no request can be served; None: requests are served."""
        if self._engine.failure is not None:
            return f"the engine is gone: {self._engine.failure}"
        if self._engine.liveness.problem is not None:
            return self._engine.liveness.problem
        return "the server is shutting down" if self.draining else None

    def check(self) -> None:
        """Refuse requests that can no longer be served.

        Raises:
            ApiError: 503.
        """
        if self.problem is not None:
            raise ApiError(503, self.problem, code="unavailable")
