"""The report: what the files hold is what is drawn, and what they lack is said."""

import base64
import json
import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle
from typer.testing import CliRunner

from twolane.bench.report import figures, timelines, tracefile
from twolane.bench.report import page as report
from twolane.bench.report.style import LABEL_GAP, _apart
from twolane.cli.main import app
from twolane.common.errors import FieldError
from twolane.results import saved

MODEL, SYSTEMS = "llama-3.1-8b", ("chunked", "static-split")


def invoke(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A search over two systems, and a run of one of them with its trace, all simulated."""
    folder = tmp_path_factory.mktemp("made")
    load = ["--dataset", "azure-conv", "--goodput", "ttft:40", "tbt:30", "--scale-lengths", "0.2"]
    chosen = [word for system in SYSTEMS for word in ("--system", system)]
    search = [
        "--brief",
        "--num-prompts",
        "12",
        "--start-rate",
        "64",
        "--tolerance",
        "0.9",
        "--seeds",
        "2",
    ]
    invoke("bench", "goodput", "--simulate", "h200", "--model", MODEL, *load, *chosen, *search,
           "--out", folder / "found")  # fmt: skip
    invoke("simulate", MODEL, "--system", "static-split", *load, "--num-prompts", "25",
           "--request-rate", "90", "--result-file", folder / "run.json",
           "--trace", folder / "trace.json")  # fmt: skip
    yield folder
    plt.close("all")


def test_the_command(made, tmp_path):
    """One page with every figure in it, the figures beside it, and a table for a README."""
    out = tmp_path / "report"
    words = [made / "found", f"mine={made / 'run.json'}", "--out", out]
    output = invoke("bench", "report", *words, "--trace-file", f"lanes={made / 'trace.json'}")
    names = {"goodput", "latency-by-rate", "attainment-by-rate", "distributions"}
    names |= {f"lanes-{part}" for part in ("lanes", "split", "queue-and-kv", "predictions")}
    assert {path.stem for path in out.glob("*.png")} == names
    page = (out / "index.html").read_text()
    inlined = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    pngs = {path.read_bytes() for path in out.glob("*.png")}
    assert {base64.b64decode(one) for one in inlined} == pngs
    assert not re.search(r'(src|href)="(?!data:)', page)  # it needs no other file
    table = (out / "report.md").read_text()
    assert table in output
    found = json.loads((made / "found" / "summary.json").read_text())["goodput"]
    for system in SYSTEMS:
        assert re.search(rf"^\| {system} \| {found[system]['median']:.2f} \|", table, re.M)
    assert re.search(r"^\| mine \| 90 \| 25 of 25 \|", table, re.M)
    assert f"simulation: {MODEL} on simulated h200" in table
    about = json.loads((made / "run.json").read_text())["provenance"]
    assert f"Measured: {about['date']} from a client on {about['cpu']}" in table
    assert f"Command: {about['command']}" in table
    assert "Where the time went: lanes\n\n| work |" in table
    assert "<h2>Where the time went: lanes</h2>" in page


def test_what_is_missing_is_said_and_how_to_get_it(made):
    lacking = dict(report.make(saved.Saved(), None, None).lacking)
    assert "`twolane bench goodput --out FOLDER`" in lacking["Goodput"]
    assert "bench goodput --trace" in lacking["Lane timeline, units, queue, KV cache, predictions"]
    with pytest.raises(figures.Lacking, match="a simulated search keeps none"):
        figures.distributions(saved.read([str(made / "found")], []))


def test_bars_and_lines_are_the_search(made):
    given = saved.read([str(made / "found")], [])
    found = given.found[0].goodput
    (axes,) = figures.goodput(given).axes
    assert [bar.get_width() for bar in axes.patches] == [found[s]["median"] for s in SYSTEMS]
    ttft = figures.latency_by_rate(given).axes[0]
    told = [run for run in given.runs if run.ms("ttft", "p99") is not None]
    lines = [
        line for line in ttft.lines if len(line.get_xdata()) > 1 and line.get_marker() == "None"
    ]
    for line, system in zip(lines, SYSTEMS, strict=False):
        runs = [run for run in told if run.label == system]
        assert list(line.get_xdata()) == sorted({run.rate for run in runs})
        for rate, value in zip(*line.get_data(), strict=True):
            same = [run.data["p99_ttft_ms"] for run in runs if run.rate == rate]
            assert value == np.median(same)
    hollow = sum(line.get_markerfacecolor() == "white" for line in ttft.lines)
    rates = {(run.label, run.rate) for run in told if not run.whole}
    assert hollow == len(rates) > 0


def test_distributions_are_of_the_requests_that_were_answered(made):
    given = saved.read([str(made / "run.json")], [])
    ttft, tbt, _ = figures.distributions(given).axes
    data = given.runs[0].data
    assert list(ttft.lines[0].get_xdata()) == pytest.approx(sorted(1e3 * t for t in data["ttfts"]))
    gaps = sorted(1e3 * gap for gaps in data["itls"] for gap in gaps)
    assert list(tbt.lines[0].get_xdata()) == pytest.approx(gaps)
    data["output_lens"][0] = 0  # as a request that failed
    assert len(given.runs[0].latencies("ttft")) == len(data["ttfts"]) - 1


def run(label, rate, seed=0, whole=True):
    trial = {"seed": seed, "system": label, "holds": True}
    data = {"request_rate": rate, "ttfts": [0.1], "interrupted": not whole, "trial": trial}
    return saved.Run(label, data)


def test_a_search_is_compared_at_the_highest_rate_that_all_ran_to_the_end():
    runs = [run("a", 1.0), run("a", 2.0), run("a", 4.0), run("b", 1.0), run("b", 2.0)]
    runs += [run("b", 4.0, whole=False), run("b", 2.0, seed=1)]
    assert figures._comparable(saved.Saved(runs)) == ([runs[1], runs[4]], "all at 2 requests/s")
    runs = [run("a", 1.0), run("b", 2.0), run("b", 0.5), run("a", 2.0, whole=False)]
    assert figures._comparable(saved.Saved(runs)) == (runs[:2], figures.APART)


@pytest.mark.parametrize("rate", [2.0, "inf", "trace"])
def test_single_results_stand_beside_a_search_whatever_their_rate_and_name(rate):
    """Also those called as a searched system; a curve without a rate has its name alone."""
    data = {"request_rate": rate, "ttfts": [0.1], "output_lens": [1], "p99_ttft_ms": 7.0}
    single = saved.Run("a", data)
    runs = [run("a", 1.0), run("b", 2.0), single]
    runs[0].data["p99_ttft_ms"] = 5.0
    found = {"seeds": [1.0], "median": 1.0, "least": 1.0, "most": 1.0}
    given = saved.Saved(runs, [saved.SearchResult({"attainment": 0.99}, {"a": found, "b": found})])
    (_, (searched, _)), (_, (alone,)) = report.tables(given)
    assert searched[:4] == ["a", "1.00", "1.00 to 1.00", "5.0"]
    assert alone[0] == "a"
    texts = [text.get_text() for text in figures.distributions(given).axes[0].texts]
    assert texts == [f"a, {rate:g}/s" if rate == 2.0 else "a"]


def test_lanes_are_the_launches_of_the_trace(made):
    trace = tracefile.read(made / "trace.json", "t")
    begin, end = timelines.window(trace, None, None)
    assert trace.launches.start[0] <= begin < end <= trace.launches.end.max() + 1e-9
    inside = trace.launches.between(begin, end)
    assert {"prefill", "decode"} <= set(trace.launches.phase[inside])
    boxes = timelines.lanes(trace, begin, end).axes[0].patches
    assert all(isinstance(box, Rectangle) for box in boxes)
    for box, i in zip(boxes, inside, strict=True):
        seconds = trace.launches.end[i] - trace.launches.start[i]
        assert box.get_width() == pytest.approx(1e3 * seconds)
        assert box.get_height() == trace.launches.units[i]
        top = box.get_y() + box.get_height()
        assert top == 132 if trace.launches.lane[i] == "prefill" else box.get_y() == 0


def test_mean_units_against_a_sum_by_hand(made):
    trace = tracefile.read(made / "trace.json", "t")
    edges = np.linspace(trace.launches.start[0], trace.launches.end.max(), 14)
    for phase in ("prefill", "decode", "hybrid"):
        means = timelines._mean_units(trace, phase, edges)
        for k, (low, high) in enumerate(pairwise(edges)):
            spent = sum(
                units * max(0.0, min(end, high) - max(start, low))
                for start, end, units, its in zip(
                    trace.launches.start, trace.launches.end, trace.launches.units,
                    trace.launches.phase, strict=True,
                )
                if its == phase
            )  # fmt: skip
            assert means[k] == pytest.approx(spent / (high - low), abs=1e-6)


def test_where_the_time_went_against_the_events_by_hand(made):
    heads, rows = timelines.spent(tracefile.read(made / "trace.json", "t"))
    assert all(len(row) == len(heads) for row in rows)
    ran = [event for event in json.loads((made / "trace.json").read_text()) if event["ph"] == "X"]
    begin = min(event["ts"] for event in ran)
    end = max(event["ts"] + event["dur"] for event in ran)
    by_kind: dict[str, list] = {}
    for event in ran:
        phase = tracefile.PHASES[event["args"]["work"]]
        by_kind.setdefault(f"{phase}, {event['args']['units']} units", []).append(event)
    busy, until = 0.0, begin
    for event in sorted(ran, key=lambda event: event["ts"]):
        done = event["ts"] + event["dur"]
        busy += max(0.0, done - max(until, event["ts"]))
        until = max(until, done)
    by_name = {row[0]: row[1:] for row in rows}
    idle = by_name.pop("idle")
    assert float(idle[1][:-1]) == pytest.approx(100 - 100 * busy / (end - begin), abs=0.06)
    assert by_name.keys() == by_kind.keys()
    for kind, events in by_kind.items():
        took = [event["dur"] for event in events]
        off = [e["dur"] / e["args"]["predicted"] / 1e6 for e in events if e["args"]["predicted"]]
        count, share, tokens, p50, _, off_p50, _, host_p50, _ = by_name[kind]
        assert int(count) == len(events)
        assert float(share[:-1]) == pytest.approx(100 * sum(took) / (end - begin), abs=0.06)
        assert float(tokens) == np.median([event["args"]["tokens"] for event in events])
        assert float(p50) == pytest.approx(np.median(took) / 1e3, abs=0.006)
        host = np.median([event["args"]["launching"] for event in events]) * 1e3
        assert float(host_p50) == pytest.approx(host, abs=0.006)
        assert float(off_p50) == pytest.approx(np.median(off), abs=0.006)
    shares = [float(row[2][:-1]) for row in rows]
    assert shares == sorted(shares, reverse=True)


def test_the_trace_of_a_killed_run_is_read(made, tmp_path):
    text = (made / "trace.json").read_text()
    cut = tmp_path / "cut.json"
    cut.write_text(text[: text.rindex(",\n") + 2])
    whole, part = tracefile.read(made / "trace.json", "t"), tracefile.read(cut, "t")
    assert len(whole.launches) - len(part.launches) in (0, 1)
    assert part.about == whole.about


def test_a_trace_without_launches_is_refused_only_if_it_is_asked_for(made, tmp_path):
    """Beside a search, whose server may have been ended before it served, it is not drawn."""
    folder = shutil.copytree(made / "found", tmp_path / "found")
    idle = folder / "idle.trace.json"
    idle.write_text('[\n{"ph": "M", "name": "process_name", "args": {"name": "twolane"}},\n')
    shutil.copy(made / "trace.json", folder / "busy.trace.json")
    drawn = report.make(saved.read([f"mine={folder}"], []), None, None)
    assert ("Lanes: mine: idle", "nothing was launched") in drawn.lacking
    assert "Lanes: mine: busy" in [title for _, title, _, _ in drawn.figures]
    with pytest.raises(FieldError, match=r"trace_file .*idle\.trace\.json has no launches"):
        report.make(saved.read([], [str(idle)]), None, None)


def test_labels_keep_apart_and_below_the_top():
    places = _apart([0.1, 0.11, 0.5, 0.98, 0.99, 1.0])
    assert all(b - a >= LABEL_GAP - 1e-9 for a, b in pairwise(places))
    assert max(places) <= 1.0 + 1e-9


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[]", "is a trace"),
        ('[\n{"pid": 1},\n', "is a trace"),
        ("{}", "no result"),
        ("not json", "malformed"),
        (None, "No such file"),
    ],
)
def test_what_is_no_result_is_refused_by_name(tmp_path, content, complaint):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FieldError, match=complaint):
        saved.read([str(path)], [])
    with pytest.raises(FieldError, match="trace_file"):
        tracefile.read(path, "x") if content else saved.read([], [str(path)])


def test_searches_side_by_side_have_names_and_the_same_slos(made, tmp_path):
    found, trace = str(made / "found"), str(made / "trace.json")
    given = saved.read([found, f"again={found}"], [trace, f"again={trace}"])
    assert set(given.labels) == {*SYSTEMS, *(f"again: {system}" for system in SYSTEMS)}
    assert [list(one.goodput) for one in given.found] == [given.labels[:2], given.labels[2:]]
    with pytest.raises(FieldError, match=f"name it: NAME={found}"):
        saved.read([found, found], [])
    with pytest.raises(FieldError, match="two traces called trace"):
        saved.read([], [trace, trace])
    other = shutil.copytree(found, tmp_path / "other")
    summary = (other / "summary.json").read_text()
    (other / "summary.json").write_text(summary.replace('"attainment": 0.99', '"attainment": 0.9'))
    with pytest.raises(FieldError, match="other attainment"):
        saved.read([found, f"other={other}"], [])


def test_an_slo_is_shown_where_all_runs_have_it():
    runs = [saved.Run("a", {"slos_ms": {"ttft": 100, "tbt": 20}}), saved.Run("b", {})]
    assert saved.Saved(runs).slos == {"ttft": 100, "tbt": 20}
    runs.append(saved.Run("c", {"slos_ms": {"ttft": 100, "tbt": 30}}))
    assert saved.Saved(runs).slos == {"ttft": 100}


def test_a_time_at_which_nothing_ran_is_refused(made):
    with pytest.raises(FieldError, match="trace_from is a time when nothing ran in t"):
        report.make(saved.Saved(traces={"t": made / "trace.json"}), 1e6, 1.0)


def test_a_time_without_a_trace_is_refused():
    with pytest.raises(FieldError, match="trace_seconds needs a trace"):
        report.make(saved.Saved([saved.Run("a", {})]), None, 1.0)


def test_a_folder_must_be_a_search(tmp_path):
    with pytest.raises(FieldError, match="not a folder of `twolane bench goodput`"):
        saved.read([str(tmp_path)], [])
