"""Models and their references, and the tally over a whole matrix."""

from collections.abc import Iterator

import pytest
import torch

from tests.parity.judge import MOST_FORGIVEN, Tally

_TALLIES = pytest.StashKey[dict[str, Tally]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLIES] = {}


@pytest.fixture(scope="session", autouse=True)
def threads() -> Iterator[None]:
    """Of the references: tiny models gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Of all cases of a module that ran; checked when the last one is through."""
    tally = Tally()
    yield tally
    request.config.stash[_TALLIES][request.module.__name__] = tally
    assert tally.forgiven < MOST_FORGIVEN * tally.tokens, str(tally)
    assert tally.side_by_side, f"never were two lanes at work at once: {tally}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, tally in terminalreporter.config.stash[_TALLIES].items():
        terminalreporter.write_line(f"{name}: {tally}")
