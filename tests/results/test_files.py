"""The results on file: no goodput is above what its run could serve for ever."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twolane.bench.goodput import FINISHED_SHARE

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def claims(content: Any) -> Iterator[tuple[float, float | None]]:
    """Yield each goodput of a file with the requests per second that its run sustained."""
    if isinstance(content, list):
        for one in content:
            yield from claims(one)
    if not isinstance(content, dict):
        return
    trial = content.get("trial")
    if isinstance(trial, dict) and trial.get("lasting") is not None and trial["holds"]:
        yield trial["rate"], trial["sustained"]
    if "sustained" in content and (rates := content.get("seeds", content.get("goodput"))):
        for rate, sustained in zip(rates, content["sustained"], strict=True):
            if sustained is not None:
                yield rate, sustained
    for one in content.values():
        yield from claims(one)


def broken(content: Any) -> list[tuple[float, float | None]]:
    """Return the claims that no long run bears out."""
    return [
        (rate, sustained)
        for rate, sustained in claims(content)
        if sustained is None or FINISHED_SHARE * rate > sustained
    ]


def test_no_goodput_on_file_is_above_what_was_sustained() -> None:
    found = {
        str(path.relative_to(RESULTS)): wrong
        for path in RESULTS.rglob("*.json")
        if b'"sustained"' in (text := path.read_bytes()) and (wrong := broken(json.loads(text)))
    }
    assert not found


@pytest.mark.parametrize(
    "content",
    [
        {"found": [{"system": "a", "goodput": [20.0, 65.3], "sustained": [19.8, 10.0]}]},
        {"goodput": {"a": {"seeds": [65.3], "sustained": [10.0]}}},
        {"trial": {"rate": 65.3, "holds": True, "lasting": True, "sustained": 10.0}},
        {"trial": {"rate": 65.3, "holds": True, "lasting": True, "sustained": None}},
    ],
)
def test_one_that_is_would_be_found(content: Any) -> None:
    assert [rate for rate, _ in broken(content)] == [65.3]
