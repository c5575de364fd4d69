"""What a server measures of itself."""

from typing import NamedTuple, Self

from twolane.frontend.engine_client import EngineClient
from twolane.server.ops.dashboard.data import Dashboard
from twolane.server.ops.metrics import ServerMetrics
from twolane.server.options import MetricsPrefix


class Monitoring(NamedTuple):
    """The metrics of a server, and the data of its dashboard."""

    metrics: ServerMetrics
    dashboard: Dashboard

    @classmethod
    def of(cls, engine: EngineClient, model_name: str, prefix: MetricsPrefix = "twolane") -> Self:
        """Return the monitoring of a running engine's server.

        Args:
            engine: a running engine.
            model_name: the label of every figure that is about the model.
            prefix: the names of the metrics.
        """
        metrics = ServerMetrics(
            lambda: engine.stats,
            engine.liveness,
            model_name,
            engine.ready.slo,
            engine.ready.page_size,
            prefix,
            engine.ready.kv_cache_dtype,
            prefix_cache=engine.ready.prefix_cache,
            state_bytes=engine.ready.state_bytes,
            lateness=engine.lateness,
        )
        return cls(metrics, Dashboard(engine, metrics))
