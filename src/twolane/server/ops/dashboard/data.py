"""Data of the dashboard, in bounded memory."""

import asyncio
import time
from collections import deque
from itertools import islice
from typing import Any

import msgspec

from twolane.engine.messages import Launched
from twolane.frontend.engine_client import EngineClient
from twolane.server.ops.dashboard.history import FINE_SECONDS, History, Reader, Window
from twolane.server.ops.metrics import ServerMetrics

WATCH_SECONDS = 5.0
"""Seconds for which the engine reports launches after the last query."""
LAUNCHES_KEPT = 4096
"""Most launches that are kept."""


class Dashboard:
    """Figures of a server over time, and its latest launches.

    While nobody looks it costs a reading of the counters every second.

    Args:
        engine: the engine, which reports launches after a query.
        metrics: source of the figures.
    """

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._history = History(Reader(metrics, lambda: engine.stats, time.monotonic))
        self._launches: deque[Launched] = deque(maxlen=LAUNCHES_KEPT)
        self._seen = 0
        self._asked = -WATCH_SECONDS
        engine.watchers.append(self._note)

    async def keep(self) -> None:
        """Record a reading every second, forever."""
        while True:
            await asyncio.sleep(FINE_SECONDS)
            await self._engine.wait_for_gap()
            self._history.tick()

    def data(self, window: Window, after: int) -> dict[str, Any]:
        """Return the data that the page shows.

        Args:
            window: span of the charts.
            after: the launches that it knows already, as `seen` said.
        """
        now, stats = time.monotonic(), self._engine.stats
        if now - self._asked > FINE_SECONDS:
            self._asked = now
            self._engine.watch(WATCH_SECONDS)
        new = min(max(self._seen - after, 0), len(self._launches))
        launches = list(islice(reversed(self._launches), new))[::-1]
        return {
            "now": now,
            "epoch": time.time() - now,
            "slo": self._metrics.slo,
            "windows": self._history.windows(),
            "points": self._history.points(window),
            "requests": {
                "decoding": stats.running,
                "prefilling": stats.prefilling,
                "waiting": stats.waiting,
            },
            "kv": {
                "pages": stats.kv_pages,
                "free": stats.kv_pages_free,
                "cached": stats.kv_pages_cached,
            },
            "states": {
                "bytes": self._engine.ready.state_bytes,
                "requests": [stats.states - stats.states_free, stats.states],
                "snapshots": [stats.snapshots_held, stats.snapshots],
                "hits": stats.snapshot_hits,
            },
            "ranks": list(self._engine.liveness.silences),
            "refusals": list(self._metrics.refusals),
            "launches": [shown(launched) for launched in launches],
            "seen": self._seen,
        }

    def attainment(self, slo: str) -> float | None:
        """Return the share of the last minute's requests that met a bound; None: there were none
        that had one."""
        return self._history.attainment(slo)

    def _note(self, launches: list[Launched]) -> None:
        self._launches.extend(launches)
        self._seen += len(launches)


def shown(launched: Launched) -> dict[str, Any]:
    """Return a launch without the names of requests."""
    fields = msgspec.structs.asdict(launched)
    return {**fields, "prompts": len(launched.prompts)}
