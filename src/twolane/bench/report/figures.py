"""Figures of results: goodput, latency and attainment against rate, distributions.

A figure is drawn from what the files hold; one that they do not suffice for raises `Lacking`, which
says what would.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from twolane.bench.report import style
from twolane.common.checked_json import read_tables
from twolane.results.metrics import bound_words, bounded
from twolane.results.saved import Run, Saved

NAMES = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TPOT", "e2el": "E2E", "itl": "TBT"}
Points = list[tuple[float, float, bool]]
"""Tuples of rate, value, and whether the run was complete."""


class About(msgspec.Struct, frozen=True):
    """What a figure shows."""

    name: str
    """The end of its file's name."""
    title: str
    caption: str


_ABOUT = read_tables(Path(__file__).with_name("figures.toml"), About)


def about(draw: Callable[..., Figure]) -> About:
    """Return what the figure of a function shows."""
    return _ABOUT[draw.__name__.replace("_", "-")]


class Lacking(Exception):
    """A figure cannot be drawn; the message says what it needs and how to get that."""


def goodput(saved: Saved) -> Figure:
    """Draw goodput as bars: median, range and values of the seeds."""
    if not saved.found:
        raise Lacking("needs a folder of `twolane bench goodput --out FOLDER`")
    searches = {name: one for each in saved.found for name, one in each.goodput.items()}
    looks = style.looks(saved.labels)
    figure, (axes,) = style.new(height=0.9 + 0.55 * len(searches))
    most = max(one["most"] for one in searches.values()) or 1.0
    for row, (name, one) in enumerate(searches.items()):
        look, middle = looks[name], one["median"]
        axes.barh(row, middle, 0.6, color=look.color, hatch=look.hatch, edgecolor="white")
        axes.hlines(row, one["least"], one["most"], color=style.BLACK, linewidth=1.5)
        axes.plot(one["seeds"], [row] * len(one["seeds"]), "o", color="white", mec="black", ms=4.5)
        text = f"{middle:.2f}" if one["least"] == one["most"] else _with_range(one)
        axes.text(one["most"] + 0.02 * most, row, text, va="center", fontweight="bold")
    axes.set(yticks=range(len(searches)), yticklabels=searches, xlabel="goodput, requests/s")
    search = saved.found[0].search
    bounds = {slo: 1e3 * bound for slo, bound in search["slos"].items()}
    slos = ", ".join(f"{NAMES[slo]} within {bound_words(slo, bounds)}" for slo in bounded(bounds))
    axes.set_title(f"{100 * search['attainment']:g} % of each: {slos}")
    axes.set_xlim(0, most * 1.35)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    return figure


def _with_range(one: dict[str, float]) -> str:
    return f"{one['median']:.2f} ({one['least']:.2f} to {one['most']:.2f})"


def latency_by_rate(saved: Saved) -> Figure:
    """Draw TTFT and TBT at the search's percentile against the request rate."""
    percentile = f"p{100 * saved.attainment:g}"
    figure, panels = style.new(1, 2, width=11)
    for axes, metric in zip(panels, ("ttft", "itl"), strict=True):
        lines = _by_rate(saved, lambda run, m=metric: run.ms(m, percentile))  # type: ignore[misc]
        _lines(axes, saved, lines)
        axes.set(xscale="log", yscale="log", xlabel="requests/s")
        axes.set_title(f"{percentile.upper()} {NAMES[metric]}, ms{_hollow(lines)}")
        style.plain_ticks(axes)
        if (slo := saved.flat.get("tbt" if metric == "itl" else metric)) is not None:
            style.bound(axes, slo, f"SLO {slo:g} ms")
        _label(axes, saved, lines)
    return figure


def attainment_by_rate(saved: Saved) -> Figure:
    """Draw the attainment of each SLO against the rate, in a panel each."""
    names = bounded(saved.slos)
    if not names:
        raise Lacking("needs runs with SLOs, the same for all: `--goodput ttft:1000 tbt:50`")
    figure, panels = style.new(1, len(names), width=5.5 * len(names))
    for axes, name in zip(panels, names, strict=True):
        lines = _by_rate(saved, lambda run, n=name: _percent(run.kept.get(n)))  # type: ignore[misc]
        _lines(axes, saved, lines)
        least = min(value for points in lines.values() for _, value, _ in points)
        axes.set(xscale="log", xlabel="requests/s", ylim=(max(-3.0, least - 5), 101))
        what = "gaps" if name == "tbt" else "requests"
        axes.set_title(
            f"% of {what} with {NAMES[name]} within {bound_words(name, saved.slos)}{_hollow(lines)}"
        )
        style.plain_ticks(axes)
        style.bound(axes, 100 * saved.attainment, f"needed: {saved.attainment:.0%}")
        _label(axes, saved, lines)
    return figure


def distributions(saved: Saved) -> Figure:
    """Draw the cumulative distributions of latencies of comparable runs."""
    runs, note = _comparable(saved)
    looks = style.looks(saved.labels)
    figure, panels = style.new(1, 3, width=12, sharey=True)
    for axes, metric in zip(panels, ("ttft", "itl", "e2el"), strict=True):
        for row, run in enumerate(runs):
            values = np.sort(run.latencies(metric))
            if not values.size:
                continue
            shares = np.arange(1, values.size + 1) / values.size * 100
            look = looks[run.label]
            axes.plot(values, shares, color=look.color, linestyle=look.line)
            apart = note == APART and run.rate is not None
            text = f"{run.label}, {run.rate:g}/s" if apart else run.label
            _label_curve(axes, values, row, text, look)
        axes.set(xscale="log", ylim=(0, 101))
        axes.set_title(f"{NAMES[metric]}, ms")
        style.plain_ticks(axes)
        if (slo := saved.flat.get("tbt" if metric == "itl" else metric)) is not None:
            style.bound(axes, slo, f"SLO {slo:g}", upright=True)
    panels[0].set_ylabel("% of requests (TBT: of gaps) within")
    figure.suptitle(note, fontsize=9, x=0.99, ha="right")
    return figure


def _label_curve(
    axes: Axes, values: "np.ndarray[tuple[int], np.dtype[np.float64]]", row: int, text: str,
    look: style.Look,
) -> None:  # fmt: skip
    """Label each curve at a height of its own, with its marker on the curve."""
    share = 85 - 17 * (row % 5)
    at = float(np.percentile(values, share))
    axes.plot([at], [share], color=look.color, marker=look.marker, linestyle="")
    axes.annotate(
        text, (at, share), (7, -3), textcoords="offset points", fontsize=8.5, color=look.ink,
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
    )  # fmt: skip


APART = "each at the highest rate that it was sent to the end, for want of a common one"


def _comparable(saved: Saved) -> tuple[list[Run], str]:
    """Return the runs with lists and their rates: all, or one per system of a search.

    Those of a search are at the highest rate that all ran to the end; without one, `APART`.
    """
    listed = [run for run in saved.runs if run.data.get("ttfts")]
    if not listed:
        raise Lacking(
            "needs runs with single latencies: results of `bench serve`, of `simulate "
            "--result-file` or of a search on servers (a simulated search keeps none)"
        )
    tried = [run for run in listed if "trial" in run.data]
    others = [run for run in listed if "trial" not in run.data]
    if not tried:
        return others, ""
    labels = {run.label for run in tried}
    seed = min(run.data["trial"]["seed"] for run in tried)
    whole = [run for run in tried if run.whole and run.data["trial"]["seed"] == seed]
    rates = {label: {run.rate or 0.0 for run in whole if run.label == label} for label in labels}
    shared = set.intersection(*rates.values())
    best = {label: max(shared or own, default=None) for label, own in rates.items()}
    chosen = [run for run in whole if run.rate == best[run.label]] + others
    return chosen, f"all at {max(shared):g} requests/s" if shared else APART


def _by_rate(saved: Saved, value: Callable[[Run], float | None]) -> dict[str, Points]:
    """Return the points by label in order of rate; seeds of a rate become their median."""
    lines: dict[str, Points] = {}
    for label in saved.labels:
        runs = [run for run in saved.runs if run.label == label and run.rate]
        for rate in sorted({run.rate for run in runs if run.rate}):
            same = [run for run in runs if run.rate == rate]
            values = [found for run in same if (found := value(run)) is not None]
            if values:
                whole = all(run.whole for run in same)
                lines.setdefault(label, []).append((rate, statistics.median(values), whole))
    if not any(len(points) > 1 for points in lines.values()):
        raise Lacking(
            "needs runs of one system at several rates: a folder of `bench goodput`, or results "
            "of `bench serve --request-rate R` given as NAME=FILE with the same name"
        )
    return lines


def _hollow(lines: dict[str, Points]) -> str:
    """Explain hollow markers, if there are any."""
    cut = any(not whole for points in lines.values() for _, _, whole in points)
    return " (hollow: ended early)" if cut else ""


def _lines(axes: Axes, saved: Saved, lines: dict[str, Points]) -> None:
    looks = style.looks(saved.labels)
    for label, points in lines.items():
        look = looks[label]
        rates, values = [p[0] for p in points], [p[1] for p in points]
        axes.plot(rates, values, color=look.color, linestyle=look.line)
        for rate, value, whole in points:
            face = look.color if whole else "white"
            axes.plot(rate, value, marker=look.marker, mfc=face, mec=look.color, linestyle="")


def _label(axes: Axes, saved: Saved, lines: dict[str, Points]) -> None:
    """Label the axes, after limits and scales are set."""
    looks = style.looks(saved.labels)
    ends = [(p[-1][0], p[-1][1], label, looks[label].ink) for label, p in lines.items()]
    style.label_ends(axes, ends)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


RESULTS: Sequence[Callable[[Saved], Figure]] = (
    goodput,
    latency_by_rate,
    attainment_by_rate,
    distributions,
)
"""File names, titles, captions and functions of the figures of results."""
