"""The three lines that a server prints when it is ready."""

import shlex

import pytest
from typer.testing import CliRunner

from twolane.cli import profile
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Ready
from twolane.server.announcement import announcement
from twolane.slo import Slo

ADDRESS = "http://127.0.0.1:8000"


def lines(slo: Slo | None = None, found: str | None = None, **settings: object) -> list[str]:
    given = {"slo": slo or Slo(), "profile": found, "max_running": 256}
    ready = Ready("auto", "cpu", 2, [(1, 1)], 512, 4096, 16, 128, [2], **given)
    config = EngineConfig(model="./my model", **settings)
    return announcement(ready, config, "mine", ADDRESS).splitlines()


def test_there_are_three_lines_and_the_second_part_of_the_first_is_the_address() -> None:
    first, _, dashboard = lines()
    assert first.split(" | ")[1] == ADDRESS
    assert first.split(" | ")[4] == "KV 4,096 tokens, context 512, 256 requests at once"
    assert dashboard == f"Dashboard: {ADDRESS}/dashboard"


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        (Slo(), "no SLOs (see --slo-ttft-ms, --slo-tbt-ms)"),
        (
            Slo(ttft=1.0, tbt=0.0125),
            "SLOs TTFT 1000 ms (late requests are refused), TBT 12.5 ms",
        ),
        (
            Slo(ttft=1.0, ttft_per_token=1 / 1024),
            "SLOs TTFT 1000 + 1000 per 1,024 new tokens ms (late requests are refused)",
        ),
        (Slo(tpot=0.02), "SLOs TPOT 20 ms"),
    ],
)
def test_the_first_line_ends_with_the_bounds(slo: Slo, said: str) -> None:
    assert lines(slo)[0].split(" | ")[-1] == said


def test_the_first_line_says_that_late_requests_are_served() -> None:
    ready = Ready("auto", "cpu", 2, [(1, 1)], 512, 4096, 16, 128, [2], Slo(ttft=1.0))
    line = announcement(ready, EngineConfig(model="m"), "m", ADDRESS, refuses=False)
    assert line.splitlines()[0].endswith("SLOs TTFT 1000 ms (no request is refused)")


def test_the_second_line_names_the_profile() -> None:
    assert lines(found="/cache/profile.json")[1] == "Profile: /cache/profile.json"


def test_without_a_profile_the_second_line_has_a_command_that_the_command_line_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"load_format": "dummy", "dtype": "float16", "cores": 1, "prefix_cache": False}
    settings |= {"levels": None, "max_model_len": 512, "system": "chunked"}
    command = shlex.split(lines(**settings)[1].split("to make one: ")[1])
    assert command[:3] == ["twolane", "profile", "./my model"]
    taken = []
    monkeypatch.setattr(profile, "run", lambda config, **more: taken.append(config))
    result = CliRunner().invoke(profile.app, command[2:])
    assert result.exit_code == 0, result.output
    kept = {"load_format": "dummy", "dtype": "float16", "cores": 1, "max_model_len": 512}
    assert taken == [EngineConfig(model="./my model", **kept)]
