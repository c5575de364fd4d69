"""`bench report`: figures, a page that holds them all, and a table for a README."""

import base64
import html
import io
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import twolane
from twolane.bench.goodput import file_name
from twolane.bench.report import style, timelines, tracefile
from twolane.bench.report.figures import RESULTS, Lacking, about
from twolane.common.errors import FieldError
from twolane.results.metrics import bounds_words
from twolane.results.saved import Run, Saved

PAGE = Template(Path(__file__).with_name("page.html").read_text())


@dataclass
class Report:
    """A report."""

    figures: list[tuple[str, str, str, bytes]] = field(default_factory=list)
    """File name, title, caption and PNG of each figure."""
    tables: list[tuple[str, timelines.Table]] = field(default_factory=list)
    """Title and content of each table."""
    lacking: list[tuple[str, str]] = field(default_factory=list)
    """Titles of missing figures, and what they need."""

    def draw(self, name: str, title: str, caption: str, figure: Figure) -> None:
        """Add a figure as PNG."""
        file = io.BytesIO()
        figure.savefig(file, format="png")
        plt.close(figure)
        self.figures.append((f"{file_name(name)}.png", title, caption, file.getvalue()))


def make(saved: Saved, begin: float | None, seconds: float | None) -> Report:
    """Return a report of all that the files suffice for.

    Args:
        saved: inputs of the report.
        begin, seconds: of the traces' timeline; None: where most happens.

    Raises:
        FieldError: a trace cannot be read, is missing for `begin` or `seconds`, or has nothing in
            that time; one beside a search that has nothing at all is only said to lack it.
    """
    for name, given in (("trace_from", begin), ("trace_seconds", seconds)):
        if given is not None and not saved.traces:
            raise FieldError(name, "needs a trace")
    report = Report()
    with plt.style.context(style.SHEET):
        for draw in RESULTS:
            shown = about(draw)
            try:
                report.draw(shown.name, shown.title, shown.caption, draw(saved))
            except Lacking as lack:
                report.lacking.append((shown.title, str(lack)))
        for name, path in saved.traces.items():
            try:
                trace = tracefile.read(path, name)
            except tracefile.NoLaunches:
                if name not in saved.beside:
                    raise
                report.lacking.append((f"Lanes: {name}", "nothing was launched"))
            else:
                _draw_trace(report, trace, begin, seconds)
    if not saved.traces:
        how = "needs a trace: `--trace FILE` of serve or simulate, or `bench goodput --trace`"
        report.lacking.append(("Lane timeline, units, queue, KV cache, predictions", how))
    return report


def _draw_trace(
    report: Report, trace: tracefile.TraceFile, begin: float | None, seconds: float | None
) -> None:
    begin, end = timelines.window(trace, begin, seconds)
    if not trace.launches.between(begin, end):
        raise FieldError("trace_from", f"is a time when nothing ran in {trace.name}")
    caption = (
        f"{trace.title}. Each rectangle is a launch, as long as it ran and as high as its share of "
        "the units: prefill's from the top, decode's and the whole device's from the bottom. "
        "White is idle."
    )
    report.tables.append((f"Where the time went: {trace.name}", timelines.spent(trace)))
    name, figure = f"{trace.name}-lanes", timelines.lanes(trace, begin, end)
    report.draw(name, f"Lanes: {trace.name}", caption, figure)
    for draw in timelines.TRACES:
        shown = about(draw)
        title = f"{shown.title}: {trace.name}"
        try:
            figure = draw(trace)
        except Lacking as lack:
            report.lacking.append((title, str(lack)))
        else:
            caption = f"{trace.title}. {shown.caption}"
            report.draw(f"{trace.name}-{shown.name}", title, caption, figure)


def write(report: Report, saved: Saved, out: Path) -> None:
    """Write `index.html`, the PNGs and `report.md` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    for name, _, _, png in report.figures:
        (out / name).write_bytes(png)
    (out / "index.html").write_text(page(report, saved), encoding="utf-8")
    (out / "report.md").write_text(markdown(report, saved), encoding="utf-8")


def markdown(report: Report, saved: Saved) -> str:
    """Return tables for a README: goodput by system, a line for each single run, and where the time
    of each trace went."""
    parts = [_markdown_table(*table) for table in tables(saved)]
    parts += [f"{title}\n\n{_markdown_table(*table)}" for title, table in report.tables]
    return "\n".join([*parts, *(f"{line}  " for line in setting(saved)), ""])


def tables(saved: Saved) -> list[timelines.Table]:
    """Return tables of the searches' results and of single runs."""
    percentile = f"p{100 * saved.attainment:g}"
    columns = [f"{percentile.upper()} TTFT (ms)", f"{percentile.upper()} TBT (ms)"]
    made = []
    if saved.found:
        heads = ["system", "goodput (req/s)", "range", *columns, "output tokens/s"]
        found = {name: one for each in saved.found for name, one in each.goodput.items()}
        made.append((heads, [_found_row(saved, *one, percentile) for one in found.items()]))
    single = [run for run in saved.runs if "trial" not in run.data]
    if single:
        heads = ["run", "rate (req/s)", "answered", *columns, "all SLOs kept", "output tokens/s"]
        made.append((heads, [_run_row(run, percentile) for run in single]))
    return made


def _found_row(saved: Saved, name: str, one: dict[str, float], percentile: str) -> list[str]:
    """Return a system's row; latencies are of the run at the highest rate that held."""
    tried = [run for run in saved.runs if run.label == name and "trial" in run.data]
    held = [run for run in tried if run.data["trial"]["holds"]]
    best = max(held, key=lambda run: run.rate or 0.0, default=None)
    rates = f"{one['least']:.2f} to {one['most']:.2f}"
    row = [name, f"{one['median']:.2f}", rates]
    return row + (["-"] * 3 if best is None else _speeds(best, percentile))


def _run_row(run: Run, percentile: str) -> list[str]:
    rate = "-" if run.rate is None else f"{run.rate:g}"
    ttft, tbt, tokens = _speeds(run, percentile)
    kept = run.data.get("attainment_all")
    share = "-" if kept is None else f"{kept:.1%}"
    answered = f"{run.data.get('completed')} of {run.data.get('sent', run.data.get('num_prompts'))}"
    return [run.label, rate, answered, ttft, tbt, share, tokens]


def _speeds(run: Run, percentile: str) -> list[str]:
    values = (run.ms("ttft", percentile), run.ms("itl", percentile))
    speed = run.data.get("output_throughput")
    return [
        *("-" if value is None else f"{value:.1f}" for value in values),
        "-" if speed is None else f"{speed:.0f}",
    ]


def setting(saved: Saved) -> list[str]:
    """Return the setting of the runs in lines, without which figures mean nothing."""
    lines = list(dict.fromkeys(run.where for run in saved.runs))
    for search in saved.found:
        work = search.search["workload"]
        workload = ", ".join(f"{k} {v}" for k, v in work.items() if v is not None and k != "seed")
        slos = bounds_words(search.search["slos"])
        share = f"{search.search['attainment']:.1%} keep each of {slos}"
        lines.append(f"Workload: {workload}; {search.search['seeds']} seeds; {share}")
    runs = [run for run in saved.runs if "trial" not in run.data]
    abouts = [*(search.about for search in saved.found), *(run.about for run in runs)]
    lines += dict.fromkeys(line for about in abouts if about for line in _made(about))
    sent = {f"{run.data.get('num_prompts')} requests of {run.data.get('dataset')}" for run in runs}
    return lines + [f"Workload: {one}" for one in sorted(sent)]


def _made(about: dict[str, Any]) -> list[str]:
    """Return time, machine and flags of a measurement."""
    card = f"{about['card']}, driver {about['driver']}, " if about.get("card") else ""
    versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    commit = f" at {about['commit'][:7]}" if about.get("commit") else ""
    return [
        f"Measured: {about['date']} from a client on {card}{about['cpu']}; {versions}{commit}",
        f"Command: {about['command']}",
    ]


def _markdown_table(heads: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "".join("| " + " | ".join(row) + " |\n" for row in [heads, rule, *rows])


def page(report: Report, saved: Saved) -> str:
    """Return the report as one HTML page that needs no other file."""
    title = f"Twolane {twolane.__version__}: {', '.join(saved.labels or saved.traces)}"
    parts = [f"<p>{html.escape(line)}</p>" for line in setting(saved)]
    parts += [_html_table(*table) for table in tables(saved)]
    for head, table in report.tables:
        parts += [f"<h2>{html.escape(head)}</h2>", _html_table(*table)]
    for name, head, caption, png in report.figures:
        source = base64.b64encode(png).decode()
        caption, head = html.escape(caption), html.escape(head)
        parts.append(
            f'<h2>{head}</h2><figure><img src="data:image/png;base64,{source}" '
            f'alt="{html.escape(name)}: {caption}"><figcaption>{caption}</figcaption></figure>'
        )
    lacking = [f"<b>{html.escape(head)}</b> {_code(why)}" for head, why in report.lacking]
    parts += _list("Not drawn", lacking)
    parts += _list("Warnings of the runs", _warnings(saved))
    return PAGE.substitute(title=html.escape(title), body="\n".join(parts))


def _warnings(saved: Saved) -> list[str]:
    """Return each warning once per system, with its count and the first one's numbers."""
    seen: dict[tuple[str, str], list[str]] = {}
    for run in saved.runs:
        for text in run.data.get("warnings", ()):
            kind = "".join(c for c in text if not c.isdigit())
            seen.setdefault((run.label, kind), []).append(text)
    counted = [(label, texts[0], len(texts)) for (label, _), texts in seen.items()]
    return [html.escape(f"{label}, {count} runs: {text}") for label, text, count in counted]


def _list(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    return [f"<h2>{title}</h2><ul>", *(f"<li>{item}</li>" for item in items), "</ul>"]


def _code(text: str) -> str:
    """Return text as HTML, with text in backticks as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))


def _html_table(heads: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(c)}</{kind}>" for c in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<div><table><thead>{line(heads, 'th')}</thead><tbody>{body}</tbody></table></div>"
