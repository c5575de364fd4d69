"""What a simulation was of, and what its lanes did: for the result's JSON and for a terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from twolane.common.printable import printable
from twolane.engine.build import Built
from twolane.engine.messages import Launched
from twolane.results.metrics import bounds_words
from twolane.results.result import Result
from twolane.results.summary import summary
from twolane.sim.config import SimulateConfig
from twolane.systems.registry import defaults, system_class

KINDS = ("decode steps", "prefill slices", "hybrid passes")
"""Kinds of launches whose predictions are compared with their time."""


class LaunchCounts:
    """Counts launches by lane and SMs, changes of SMs, and errors of predictions."""

    def __init__(self) -> None:
        self._launches: Counter[tuple[str, int]] = Counter()
        self._units: dict[str, int] = {}
        """Units of the latest launch of each lane."""
        self._ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
        """Time of each launch over its prediction, by kind."""
        self.switches: Counter[str] = Counter()
        """Number of launches on other SMs than the lane's launch before, by lane."""

    def add(self, launches: Iterable[Launched]) -> None:
        """Count launches that have ended, in the order of their ends."""
        for one in launches:
            self._launches[one.lane, one.units] += 1
            self.switches[one.lane] += self._units.get(one.lane, one.units) != one.units
            self._units[one.lane] = one.units
            if one.predicted:
                kind = KINDS[0 if not one.prompts else 2 if one.decoding else 1]
                self._ratios[kind].append((one.end - one.start) / one.predicted)

    def lanes(self, spent: Iterable[tuple[str, int, float]]) -> list[dict[str, object]]:
        """Return seconds and launches by lane and SMs.

        Args:
            spent: Lane, units and the seconds of work that was done on them.
        """
        names = "lane", "units", "seconds", "launches"
        rows = [(*one, self._launches[one[:2]]) for one in sorted(spent)]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def predictions(self) -> dict[str, dict[str, float]]:
        """Return the number of predicted launches, the mean and the P99 of |time / prediction - 1|,
        and the mean of time / prediction, by kind."""
        return {
            kind: {
                "launches": len(ratios),
                "mean_error": float(np.abs(np.array(ratios) - 1.0).mean()),
                "p99_error": float(np.percentile(np.abs(np.array(ratios) - 1.0), 99)),
                "mean_ratio": float(np.mean(ratios)),
            }
            for kind, ratios in self._ratios.items()
            if ratios
        }


def engine_figures(
    config: SimulateConfig, built: Built, launches: LaunchCounts
) -> dict[str, object]:
    """Return what was simulated, and what its lanes did."""
    engine, ready, stats = config.engine, built.ready, built.engine.stats()
    queries = stats.prefix_queries
    settings = {k: v for k, v in defaults(ready.system).items() if v is not msgspec.NODEFAULT}
    return {
        "device": ready.device,
        "gpu": config.gpu,
        "gpu_model": _gpu_model(config),
        "tp": config.tp,
        "disaggregated": engine.disaggregated,
        "system": ready.system,
        "options": engine.options,
        "settings": {**msgspec.to_builtins(settings), **engine.options},
        "slo": engine.slo,
        "estimator": engine.estimator or system_class(ready.system).estimator,
        "profile": engine.profile,
        "seed": engine.seed,
        "tbt_buffer_ms": engine.tbt_buffer * 1e3,
        "tbt_buffer_at": engine.tbt_buffer_at,
        "transport_ms": engine.transport * 1e3,
        "levels": ready.levels,
        "kv_tokens": ready.kv_tokens,
        "max_model_len": ready.max_model_len,
        "prefix_hit_rate": stats.prefix_hits / queries if queries else None,
        "preemptions": stats.preemptions,
        "state_bytes": ready.state_bytes,
        "snapshots": stats.snapshots,
        "snapshots_held": stats.snapshots_held,
        "snapshot_hits": stats.snapshot_hits,
        "lane_seconds": {f"{lane} {units}": spent for lane, units, spent in stats.seconds},
        "lanes": launches.lanes(stats.seconds),
        "switches": launches.switches,
        "predictions": launches.predictions(),
    }


def _gpu_model(config: SimulateConfig) -> str:
    if config.uneven is not None:
        return "emulated by the profile of a card"
    if config.device().fitted:
        return "fitted to measurements of such a card"
    return "by its data sheet; no such card was measured"


def report(config: SimulateConfig, result: Result) -> RenderableType:
    """Return tables of what was simulated, its results and its lanes, for a terminal."""
    figures: Mapping[str, Any] = result.simulated or {}
    return Group(
        _what(config, figures),
        summary(result),
        _lanes(figures, result.duration),
        _predictions(figures["predictions"]),
    )


def _what(config: SimulateConfig, figures: Mapping[str, Any]) -> Table:
    table = Table(title="Simulated", title_justify="left", show_header=False)
    options = ", ".join(f"{name}={value}" for name, value in figures["options"].items())
    gpus = f"{config.tp} x {figures['gpu']}"
    if config.engine.disaggregated:
        gpus = f"{gpus} for prefill, as many for decode"
    hits = figures["prefix_hit_rate"]
    cached = "" if hits is None else f", {hits:.1%} of the prompt tokens in the prefix cache"
    rows = {
        "System": f"{figures['system']} ({options or 'default settings'})",
        "Bounds that it plans for": _bounds(config),
        "Playout buffer": _buffer(config),
        "GPUs": f"{gpus}, {figures['gpu_model']}",
        "Estimator": f"{figures['estimator']}, fitted on "
        + (figures["profile"] or "a profile of the simulated GPU"),
        "Seed": str(figures["seed"]),
        "KV pool": f"{figures['kv_tokens']:,} tokens{cached}; {figures['preemptions']} preemptions",
    }
    if figures["snapshots"]:
        size = f"{figures['snapshots']} snapshots of {figures['state_bytes'] / 2**20:.1f} MiB"
        began = f"{figures['snapshot_hits']} requests began with one"
        rows["States"] = f"{size}, {figures['snapshots_held']} held at the end; {began}"
    for name, value in rows.items():
        table.add_row(name, escape(printable(value)))
    return table


def _bounds(config: SimulateConfig) -> str:
    slo = config.engine.slo
    slos = {name: getattr(slo, name) for name in slo.bounds}
    if slo.ttft_per_token:
        slos["ttft_per_1k"] = slo.ttft_per_token * 1024
    return bounds_words(slos) or "none"


def _buffer(config: SimulateConfig) -> str:
    engine, client = config.engine, config.bench.playout * 1e3
    if engine.slo.tbt is None or not engine.tbt_buffer:
        return f"{client:g} ms at the client" if client else "none"
    buffer = f"{min(engine.tbt_buffer, engine.slo.tbt) * 1e3:g} ms"
    if engine.tbt_buffer_at == "server":
        return f"{buffer} in the server"
    shown = f"the client's of {client:g} ms is computed" if client else "the client has none"
    return f"{buffer} planned for, tokens are sent at once; {shown}"


def _lanes(figures: Mapping[str, Any], duration: float) -> Table:
    table = _table("SMs by lane", "Lane", "SMs", "Launches", "Busy (s)", "Of the run")
    for one in figures["lanes"]:
        name = "whole device" if one["lane"] == "device" else one["lane"]
        counts = str(one["units"]), str(one["launches"])
        table.add_row(
            name, *counts, f"{one['seconds']:.2f}", f"{one['seconds'] / (duration or 1.0):.1%}"
        )
    switches = ", ".join(f"{lane} {count}" for lane, count in sorted(figures["switches"].items()))
    table.caption = f"Changes of SMs: {switches or 'none'}"
    return table


def _predictions(found: Mapping[str, Mapping[str, float]]) -> Table:
    heads = "Launches", "Number", "Mean error", "P99 error", "Time / prediction"
    table = _table("Predictions of launches", *heads)
    for kind, one in found.items():
        errors = f"{one['mean_error']:.1%}", f"{one['p99_error']:.1%}"
        table.add_row(kind, f"{one['launches']:.0f}", *errors, f"{one['mean_ratio']:.3f}")
    return table


def _table(title: str, first: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for head in heads:
        table.add_column(head, justify="right")
    return table
