"""Everything here needs an NVIDIA GPU: `make test-gpu`."""

from collections.abc import Iterator

import pytest
import torch

from tests.parity.judge import MOST_FORGIVEN, Tally

GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not GPU:
        for item in items:
            if "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    """Of all cases of a module that ran; checked when the last one is through."""
    tally = Tally()
    yield tally
    print(tally)
    assert tally.forgiven < MOST_FORGIVEN * tally.tokens, str(tally)
    assert tally.side_by_side, f"never were two lanes at work at once: {tally}"
