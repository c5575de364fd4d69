"""Figures of a trace: what ran on how many units and when, queue, KV cache, predictions; a table of
where the time went."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from twolane.bench.report import style
from twolane.bench.report.figures import Lacking
from twolane.bench.report.tracefile import Array, TraceFile

Table = tuple[list[str], list[list[str]]]
"""Heads and rows."""
WINDOW_LAUNCHES = 60
"""Number of launches that the timeline shows where no window is asked for."""
BINS = 200
"""Number of time bins in the figure of the whole run."""
MIN_IDLE_SECONDS = 1e-6
"""Seconds between two launches that count as idle: traces tell tenths of a microsecond."""
MAX_POINTS = 4000
"""Largest number of points in the scatter of predictions."""


def window(trace: TraceFile, begin: float | None, seconds: float | None) -> tuple[float, float]:
    """Return the part of the run to show: as asked, else where both phases work most, with
    changes."""
    launches = trace.launches
    first, last = launches.span
    if seconds is None:
        middle = (last - first) / len(launches)
        busy = np.minimum(launches.took, 10 * middle).sum()
        seconds = float(min(last - first, WINDOW_LAUNCHES * busy / len(launches)))
    if begin is None:
        starts = launches.start[:: max(1, len(launches) // 300)]
        begin = float(max(starts, key=lambda at: _interest(trace, at, at + seconds)))
    return begin, begin + seconds


def _interest(trace: TraceFile, begin: float, end: float) -> float:
    """Much of both phases, and some changes of what runs on how many units."""
    inside, launches = trace.launches.between(begin, end), trace.launches
    spent = dict.fromkeys(style.PHASE_LOOKS, 0.0)
    for i in inside:
        spent[launches.phase[i]] += min(launches.end[i], end) - max(launches.start[i], begin)
    both = min(spent["prefill"], spent["decode"]) + spent["hybrid"] / 2
    changes = len(_changes(trace, inside))
    variety = 0.2 * sum(map(bool, spent.values())) + 0.04 * min(changes, 12)
    return float(both / (end - begin) + variety)


def _changes(trace: TraceFile, inside: Sequence[int]) -> list[int]:
    """Return the launches on another number of units than the previous one of their phase."""
    launches, changed = trace.launches, []
    last: dict[str, float] = {}
    for i in inside:
        phase, units = str(launches.phase[i]), float(launches.units[i])
        if last.setdefault(phase, units) != units:
            changed.append(i)
        last[phase] = units
    return changed


def lanes(trace: TraceFile, begin: float, end: float) -> Figure:
    """Draw each launch as a rectangle: time wide, units high.

    The prefill lane's units hang from the top, the decode lane's and the whole device's stand on
    the bottom, as units are dealt.
    """
    figure, (axes,) = style.new(width=11, height=3.4)
    launches, units = trace.launches, trace.units
    inside = launches.between(begin, end)
    for i in inside:
        phase, high = str(launches.phase[i]), float(launches.units[i])
        look = style.PHASE_LOOKS[phase]
        left, right = (float(x[i] - begin) * 1e3 for x in (launches.start, launches.end))
        bottom = units - high if launches.lane[i] == "prefill" else 0.0
        axes.add_patch(
            Rectangle((left, bottom), right - left, high, facecolor=look.color, alpha=0.85,
                      edgecolor="white", linewidth=0.6, hatch=look.hatch)
        )  # fmt: skip
        ink = "white" if phase == "prefill" else "black"
        _name(axes, launches.name[i], (left, right, bottom, high), (end - begin) * 1e3, ink)
    changes = [float(launches.start[i] - begin) * 1e3 for i in _changes(trace, inside)]
    axes.plot(changes, [units * 1.03] * len(changes), "v", color="black", ms=4, clip_on=False)
    if changes:
        axes.text(1.01, 1.03, "▼ other level", transform=axes.transAxes, va="center")
    axes.set(xlim=(0, (end - begin) * 1e3), ylim=(0, units))
    axes.set(xlabel=f"ms since {begin:.3f} s of the trace", ylabel=f"{_kind(trace)} (of {units})")
    axes.set_title(trace.title, pad=12)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    _phase_names(axes, trace, begin, end)
    return figure


def _kind(trace: TraceFile) -> str:
    """Return the name of the units."""
    device = str(trace.about.get("device", ""))
    return "cores" if device.startswith("cpu") else "SMs" if device else "units"


def _name(
    axes: Axes, text: str, box: tuple[float, float, float, float], span: float, ink: str
) -> None:
    """Write a launch's name into its rectangle where there is room."""
    left, right, bottom, high = box
    left, right = max(left, 0.0), min(right, span)
    if (right - left) / span > 0.0085 * len(text):
        x, y = (left + right) / 2, bottom + high / 2
        axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=ink, clip_on=True)


def _phase_names(axes: Axes, trace: TraceFile, begin: float, end: float) -> None:
    """Write the phases' names to the right of the axes."""
    heights = {"prefill": 0.9, "hybrid": 0.5, "decode": 0.1}
    inside = trace.launches.between(begin, end)
    for phase in {str(trace.launches.phase[i]) for i in inside}:
        color = style.PHASE_LOOKS[phase].color
        place = {"transform": axes.transAxes, "va": "center"}
        axes.text(1.01, heights[phase], "■", color=color, fontsize=13, **place)  # type: ignore[arg-type]
        axes.text(1.035, heights[phase], phase, color="black", **place)  # type: ignore[arg-type]


def split(trace: TraceFile) -> Figure:
    """Draw the mean units at work in each phase over the run, prefill from the top."""
    figure, (axes,) = style.new(width=11, height=2.8)
    edges = np.linspace(*trace.launches.span, BINS + 1)
    used = {phase: _mean_units(trace, phase, edges) for phase in style.PHASE_LOOKS}
    units, floor = trace.units, used["decode"] + used["hybrid"]
    seconds = edges - edges[0]
    bands = {
        "decode": (np.zeros(BINS), used["decode"]),
        "hybrid": (used["decode"], floor),
        "prefill": (units - used["prefill"], np.full(BINS, float(units))),
    }
    ends = {"decode": 0.1, "hybrid": 0.4, "prefill": 0.9}
    for phase, (low, high) in bands.items():
        if not used[phase].any():
            continue
        look = style.PHASE_LOOKS[phase]
        axes.stairs(high, seconds, baseline=low, fill=True, color=look.color, hatch=look.hatch)
        mean = f"■ {phase}\n   mean {used[phase].mean():.3g}"
        axes.text(1.01, ends[phase], mean, transform=axes.transAxes, va="center", color=look.ink)
    axes.set(xlim=(0, seconds[-1]), ylim=(0, units))
    axes.set(xlabel="seconds", ylabel=f"{_kind(trace)} at work (of {units})")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(trace.title)
    return figure


def _mean_units(trace: TraceFile, phase: str, edges: Array) -> Array:
    """Return mean units of one phase in each bin: Σ units x seconds within the bin / width of the
    bin."""
    launches = trace.launches
    mine = launches.phase == phase
    rises = _integral(launches.start[mine], launches.units[mine], edges)
    falls = _integral(launches.end[mine], launches.units[mine], edges)
    means: Array = np.diff(rises - falls) / np.diff(edges)
    return means


def _integral(times: Array, units: Array, at: Array) -> Array:
    """Σ units x (t - time) over the times before t, for each t of `at`."""
    order = np.argsort(times)
    count = np.searchsorted(times[order], at)
    weight = np.concatenate([[0.0], np.cumsum(units[order])])[count]
    moment = np.concatenate([[0.0], np.cumsum((units * times)[order])])[count]
    sums: Array = weight * at - moment
    return sums


def queue_and_kv(trace: TraceFile) -> Figure:
    """Draw the requests waiting and in decode, and the KV pool's use, over the run."""
    if not {"waiting", "decoding", "pages_used"} <= trace.gauges.keys():
        raise Lacking("needs gauges in the trace, which a system writes when tokens come")
    figure, (above, below) = style.new(2, 1, width=11, height=4.4, sharex=True)
    begin = float(trace.launches.start[0])
    _gauges(above, trace, {"decoding": style.PHASE_LOOKS["decode"], "waiting": _WAITING}, begin)
    above.set_ylabel("requests")
    above.set_title(trace.title)
    pages = trace.about.get("kv_pages")
    scale = 100.0 / pages if pages else 1.0
    _gauges(below, trace, {"pages_used": _USED, "pages_cached": _CACHED}, begin, scale)
    below.set(xlabel="seconds", ylabel="% of the KV pool" if pages else "KV pages")
    if trace.preempted.size:
        at = trace.preempted - begin
        below.plot(at, np.zeros_like(at), "x", color=style.VERMILION, clip_on=False)
        below.set_title(f"x: {at.size} preemptions", color=style.VERMILION)
    return figure


_WAITING = style.Look(style.VERMILION, "s", "-", "")
_USED = style.Look(style.BLUE, "o", "-", "")
_CACHED = style.Look(style.GREY, "o", "--", "")


def _gauges(
    axes: Axes, trace: TraceFile, which: dict[str, style.Look], begin: float, scale: float = 1.0
) -> None:
    for name in [name for name in which if name in trace.gauges]:
        look, (times, values) = which[name], trace.gauges[name]
        line = {"color": look.color, "linestyle": look.line, "linewidth": 1.3}
        axes.step(times - begin, values * scale, where="post", **line)
        at = int(values.argmax())
        top = (float(times[at] - begin), float(values[at] * scale))
        text = f"{name.replace('pages_', '')}, at most {top[1]:.3g}"
        side = "right" if at > len(times) // 2 else "left"
        axes.annotate(
            text, top, (0, 4), textcoords="offset points", color=look.ink, ha=side, fontsize=9
        )
    axes.set_ylim(0, 1.18 * axes.dataLim.y1 or 1.0)


_SIGNS = {"o": "●", "s": "■", "^": "▲", "-": "——", "--": "- -", "-.": "-·-"}
"""Characters for markers and lines in text."""


def predictions(trace: TraceFile) -> Figure:
    """Draw each launch's time against its prediction, and the distribution of errors."""
    launches = trace.launches
    known = np.isfinite(launches.predicted) & (launches.took > 0.0)
    if not known.any():
        raise Lacking("needs predictions in the trace: this system's estimator made none")
    figure, (left, right) = style.new(1, 2, width=11, height=4.0)
    real, told = launches.took * 1e3, launches.predicted * 1e3
    step = max(1, int(known.sum()) // MAX_POINTS)
    for row, (phase, look) in enumerate(style.PHASE_LOOKS.items()):
        mine = np.flatnonzero(known & (launches.phase == phase))
        if not mine.size:
            continue
        some = mine[::step]
        left.plot(told[some], real[some], look.marker, color=look.color, ms=3, alpha=0.4, mew=0)
        errors = np.sort((told[mine] - real[mine]) / real[mine] * 100)
        shares = np.arange(1, errors.size + 1) / errors.size * 100
        right.plot(errors, shares, color=look.color, linestyle=look.line)
        mean = f"{_SIGNS[look.line]} {phase}: mean |error| {np.abs(errors).mean():.1f} %"
        for axes, text in ((left, f"{_SIGNS[look.marker]} {phase}"), (right, mean)):
            axes.text(0.03, 0.94 - 0.08 * row, text, transform=axes.transAxes, color=look.ink)
    ends = [min(real[known].min(), told[known].min()), max(real[known].max(), told[known].max())]
    left.plot(ends, ends, color=style.BLACK, lw=1)
    left.annotate("exact", (ends[0], ends[0]), (10, 2), textcoords="offset points", fontsize=8)
    left.set(xscale="log", yscale="log", xlabel="predicted, ms", ylabel="took, ms")
    left.set_title(trace.title)
    style.plain_ticks(left)
    right.set(xlim=(-60, 60), ylim=(0, 100), xlabel="(predicted - took) / took, %")
    right.set_ylabel("% of launches with at most this")
    right.axvline(0, color=style.BLACK, lw=1)
    return figure


def spent(trace: TraceFile) -> Table:
    """Return the time by phase and units, largest first, with durations of launches."""
    launches = trace.launches
    took, (first, last) = launches.took, launches.span
    whole, rows = last - first, []
    for phase, units in set(zip(launches.phase.tolist(), launches.units.tolist(), strict=True)):
        mine = (launches.phase == phase) & (launches.units == units)
        share = float(took[mine].sum()) / whole
        cells = [f"{phase}, {units:g} units", f"{mine.sum()}", f"{share:.1%}"]
        cells += [f"{np.median(launches.tokens[mine]):g}", *_spread(took[mine] * 1e3)]
        known = mine & (launches.predicted > 0.0)
        cells += _spread(took[known] / launches.predicted[known])
        cells += _spread(launches.launching[mine] * 1e3)
        rows.append((share, cells))
    waits = launches.start[1:] - np.maximum.accumulate(launches.end)[:-1]
    waits = waits[waits > MIN_IDLE_SECONDS]
    idle = float(waits.sum()) / whole
    rows.append((idle, ["idle", f"{waits.size}", f"{idle:.1%}", *["-"] * 7]))
    heads = ["work", "launches", "of the time", "tokens (P50)", "took, ms (P50)", "(P99)"]
    heads += ["took / predicted (P50)", "(P99)", "host, ms (P50)", "(P99)"]
    return heads, [cells for _, cells in sorted(rows, reverse=True)]


def _spread(values: Array) -> list[str]:
    """Return P50 and P99 as text."""
    return [f"{one:.2f}" for one in np.percentile(values, (50, 99))] if values.size else ["-", "-"]


TRACES: Sequence[Callable[[TraceFile], Figure]] = (split, queue_and_kv, predictions)
"""Parts of file names, titles, captions and functions of the figures of a trace, besides lanes."""
