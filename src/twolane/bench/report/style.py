"""Style of figures: colours for the colour-blind, shapes besides colours, labels at the lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008), without the yellow, which is faint in print.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#777777"
INKS = {ORANGE: "#8A5F00", SKY: "#20719F", PURPLE: "#94466F", GREY: "#555555"}
"""Colours of text for the paler ones: the same hue, dark enough to read on white."""

SHEET = Path(__file__).with_name("report.mplstyle")
LABEL_GAP = 0.07
"""Least distance between two labels at the ends of lines, as a share of the axes' height."""


@dataclass(frozen=True)
class Look:
    """Style of one system: colour, marker, line and hatch, distinguishable without colour."""

    color: str
    marker: str
    line: Any
    hatch: str

    @property
    def ink(self) -> str:
        """Colour of text about it."""
        return INKS.get(self.color, self.color)


_LOOKS = (
    Look(BLUE, "o", "-", ""),
    Look(VERMILION, "s", "--", "///"),
    Look(GREEN, "^", "-.", "..."),
    Look(PURPLE, "D", ":", "xxx"),
    Look(BLACK, "v", (0, (5, 1, 1, 1, 1, 1)), "\\\\\\"),
    Look(ORANGE, "P", (0, (1, 1)), "ooo"),
    Look(SKY, "X", (0, (7, 2)), "++"),
    Look(GREY, "*", (0, (3, 1)), "---"),
)
PHASE_LOOKS = {
    "prefill": Look(BLUE, "o", "-", ""),
    "decode": Look(ORANGE, "s", "--", ""),
    "hybrid": Look(GREEN, "^", "-.", "//"),
}


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """Return the style of each label; they repeat after eight."""
    return {label: _LOOKS[i % len(_LOOKS)] for i, label in enumerate(labels)}


def new(
    rows: int = 1, columns: int = 1, *, width: float = 9.0, height: float = 3.6, **more: Any
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure, its size in inches, and its axes by row."""
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **more)
    return figure, list(axes.flat)


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) to the right of the axes at the height of y, moved apart."""
    points = [axes.transData.transform((x, y)) for x, y, _, _ in ends]
    heights = [float(axes.transAxes.inverted().transform(point)[1]) for point in points]
    order = sorted(range(len(ends)), key=heights.__getitem__)
    places = _apart([heights[i] for i in order])
    for i, place in zip(order, places, strict=True):
        x, y, text, color = ends[i]
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.02, place),
            textcoords="axes fraction",
            color=color,
            va="center",
            fontsize=9,
            annotation_clip=False,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 1.0},
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5, "alpha": 0.6, "shrinkB": 4},
        )


def _apart(heights: Sequence[float]) -> list[float]:
    """Return ascending heights moved apart, then down again below the top."""
    places: list[float] = []
    for height in heights:
        least = places[-1] + LABEL_GAP if places else 0.02
        places.append(max(height, least))
    over = max(0.0, places[-1] - 1.0) if places else 0.0
    return [place - over for place in places]


def plain_ticks(axes: Axes) -> None:
    """Use numbers instead of powers of ten on logarithmic axes; also 2 and 5 where there is
    room."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            few = high / low < 100
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(_two_and_five if few else (lambda value, _: ""))


def _two_and_five(value: float, _: object) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def bound(axes: Axes, value: float, text: str, *, upright: bool = False) -> None:
    """Draw a labelled line for an SLO."""
    draw = axes.axvline if upright else axes.axhline
    draw(value, color=BLACK, linewidth=1.0, linestyle=(0, (2, 2)))
    place: dict[str, Any] = {"xy": (value, 0.03), "xycoords": ("data", "axes fraction")}
    if not upright:
        place = {"xy": (0.01, value), "xycoords": ("axes fraction", "data")}
    offset = (3, 0) if upright else (0, 3)
    axes.annotate(
        text, **place, xytext=offset, textcoords="offset points", fontsize=8.5, color=BLACK
    )
