"""A server of two ranks that dies under load: nobody outlives it, nobody is told a lie."""

import pytest

from .kills import CALLS, STREAMS, rounds


@pytest.mark.parametrize(
    ("count", "seed"), [(1, 218), pytest.param(200, 2, marks=pytest.mark.full, id="full")]
)
@pytest.mark.timeout(7200)
def test_no_orphans_and_no_short_answer_called_whole(count: int, seed: int) -> None:
    seen = rounds(count, seed)
    assert seen["whole"] + seen["told of an error"] + seen["broken off"] == count * (
        STREAMS + CALLS
    )
