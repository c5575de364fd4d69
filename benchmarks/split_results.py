"""Splits the files of results that hold many runs into one file a run: run once, then deleted.

    python benchmarks/split_results.py

Every file gets its record (`twolane.results.provenance`) from what the old one says; what that does
not say is null. No figure is changed.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twolane.results.provenance import Provenance, save

RESULTS = Path(__file__).parent / "results"
HEADER = (
    *("command", "server", "client", "date", "commit", "gpu", "hardware", "host", "versions"),
    *("model", "note", "what", "name", "dtype", "workload"),
)
"""Keys that go into the record."""
ONE = (
    *("cpu", "delivery", "device-h200", "engine-h200", "engine-h200-card-1"),
    *("engine-h200-card-2", "engine-h200-cublas", "panels", "papers", "decode-attention-h200"),
    *("prefill-attention-h200", "products-h200", "products-beside-h200"),
)
"""Files of one run of one script."""
SEVERAL: dict[str, tuple[tuple[str, ...], tuple[str, ...], str | None]] = {
    "card": (("runs",), (), None),
    "serving-h200": (("runs",), (), None),
    "delivery-h200": (("stand_in",), (), None),
    "clocks-h200": (("cards",), (), None),
    "even-gaps-h200": (("runs",), (), None),
    "late-gaps-h200": ((), ("at_9_and_12_ms",), "at-21-and-12-ms"),
    "whole-passes-h200": ((), ("later, 9 ms",), None),
    "traces-h200": (("runs",), (), None),
    "playout-h200": (("variants",), (), None),
    "mooncake-long-simulated": (("found",), (), None),
    "replay-h200": (("replays",), (), None),
}
"""Files of several runs, with the arguments of `parts`."""
CARD = re.compile(r"NVIDIA \w+")
DRIVER = re.compile(r"\d{3}\.\d+\.\d+")
LETTERS = re.compile(r"cards? ([A-Z]{1,2}(?:(?:, | and )[A-Z]{1,2})*)")


def record(said: dict[str, Any], workload: Any = None) -> Provenance:
    """The record, from an old header."""
    where = str(said.get("gpu") or said.get("hardware") or "")
    card, driver = CARD.search(where), DRIVER.search(where)
    rest = where.replace("\n", "; ") if where != (card and card.group()) else ""
    commands = [said[key] for key in ("command", "serve", "server", "load", "bench", "client")
                if isinstance(said.get(key), str)]  # fmt: skip
    named = {key: said[key] for key in ("model", "dtype") if key in said}
    notes = [said.get("note"), said.get("what"), rest, said.get("host")]
    hardware = said.get("hardware")
    return Provenance(
        command="; ".join(commands) or None,
        date=said.get("date"),
        commit=said.get("commit"),
        card=card.group() if card else None,
        driver=driver.group() if driver else None,
        cpu=f"{hardware['cpu']}, {hardware['cores']} cores" if isinstance(hardware, dict) else None,
        versions=said.get("versions", {}),
        workload=workload or said.get("workload") or named or None,
        notes=". ".join(str(note).rstrip(".") for note in notes if note) or None,
    )


def slug(text: str) -> str:
    """A name for a file."""
    return re.sub(r"[^a-z0-9.=]+", "-", text.lower()).strip("-.")[:80]


def parts(
    data: dict[str, Any], lists: tuple[str, ...], opened: tuple[str, ...], rest: str | None
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, header and figures of each part of a file: entries of lists, then whole sections.

    Args:
        data: the file.
        lists: keys whose entries are runs.
        opened: sections whose own sections are runs.
        rest: name of one file for all else that is not a section of its own; None: a file each.
    """
    header = {key: data[key] for key in HEADER if key in data}
    body = {key: value for key, value in data.items() if key not in HEADER}
    for key in lists:
        entries = body.pop(key)
        if isinstance(entries, list):
            entries = {f"{i:02d}-{titled(entry)}": entry for i, entry in enumerate(entries, 1)}
        for label, entry in entries.items():
            yield from _part(label, header, entry)
    for key in opened:
        section = body.pop(key)
        own = {**header, **{k: section[k] for k in HEADER if k in section}}
        for label, entry in section.items():
            if isinstance(entry, dict):
                yield from _part(f"{key}-{label}", own, entry)
    together = {}
    for key, value in body.items():
        if rest is not None and not (isinstance(value, dict) and {*HEADER} & value.keys()):
            together[key] = value
        else:
            yield from _part(key, header, value)
    if together:
        yield str(rest), header, together


def _part(
    label: str, header: dict[str, Any], entry: Any
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    if not isinstance(entry, dict):
        entry = {"runs": entry}
    own = {k: entry[k] for k in HEADER if k in entry and k != "name"}
    yield slug(label), {**header, **own}, {k: v for k, v in entry.items() if k not in own}


def titled(entry: dict[str, Any]) -> str:
    """What a run calls itself."""
    found = entry.get("found")
    if found:
        return str(found[0]["panel"])
    keys = ("run", "name", "panel", "commit", "system")
    return next(str(entry[key])[:40] for key in keys if key in entry)


def split(name: str, *how: Any) -> None:
    """One file of several runs into a folder."""
    folder, written = RESULTS / name, set[str]()
    for title, header, figures in parts(read(name), *how):
        assert title not in written, (name, title)
        written.add(title)
        save(folder / f"{title}.json", record({**header, **figures}), figures)
    (RESULTS / f"{name}.json").unlink()


def convert(name: str) -> None:
    """The header of a file of one run into a record."""
    data = read(name)
    figures = {key: value for key, value in data.items() if key not in HEADER and key != "searches"}
    save(RESULTS / f"{name}.json", record(data, data.get("searches")), figures)


def split_goodput() -> None:
    """The searches on GPUs: the latest of each system, those before, those on other cards."""
    data = read("goodput-h200")
    panels = {panel_name(panel): panel for panel in data["panels"]}
    groups = {"found": "", "found_before": "earlier", "found_on_another_card": "other-cards"}
    for key, group in groups.items():
        for found in data[key]:
            text, panel = found["measured"], panels[found["panel"]]
            header = {**data, "command": found["command"], "note": text, "date": None}
            header["commit"] = re.match(r"[0-9a-f]{7}", text).group()
            letters = LETTERS.search(text)
            names = sorted(set(re.split(r", | and ", letters.group(1)))) if letters else None
            figures = {k: found[k] for k in ("panel", "system", "goodput", "runs")}
            place = RESULTS / "goodput-h200" / group / found["panel"]
            path = free(place / file_name(found["system"]))
            save(path, record(header, panel), {"cards": names, **figures})
    (RESULTS / "goodput-h200.json").unlink()


def split_simulated() -> None:
    """The searches on simulated GPUs."""
    data = read("goodput-simulated")
    panels = {panel_name(panel): panel for panel in data["panels"]}
    for found in data["found"]:
        header = {**data, "command": found["command"]}
        figures = {k: found[k] for k in ("panel", "system", "goodput", "runs")}
        path = RESULTS / "goodput-simulated" / found["panel"] / f"{file_name(found['system'])}.json"
        save(path, record(header, panels[found["panel"]]), figures)
    (RESULTS / "goodput-simulated.json").unlink()


def panel_name(panel: dict[str, Any]) -> str:
    flat = "" if panel["per_1k_ms"] else "-flat"
    return f"{panel['model']}-{panel['dataset']}-{panel['tbt_ms']:g}ms{flat}"


def file_name(system: str) -> str:
    return "".join(c if c.isalnum() or c in "=._-" else "_" for c in system)


def free(path: Path) -> Path:
    """A file of that name, or with a number behind it where the name is taken."""
    tries = [path.with_name(f"{path.name}{n}.json") for n in ("", *(f"-{i}" for i in range(2, 30)))]
    return next(each for each in tries if not each.exists())


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def main() -> None:
    """Split everything."""
    for name in ONE:
        convert(name)
    for name, how in SEVERAL.items():
        split(name, *how)
    split_goodput()
    split_simulated()
    subprocess.run(["git", "-C", str(RESULTS), "status", "--short"], check=True)


if __name__ == "__main__":
    main()
