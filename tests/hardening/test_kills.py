"""A server of two ranks that dies under load: nobody outlives it, nobody is told a lie."""

import pytest

from .kills import CALLS, STREAMS, rounds


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_no_orphans_and_no_short_answer_called_whole() -> None:
    count = 200
    seen = rounds(count, seed=2)
    assert seen["whole"] + seen["told of an error"] + seen["broken off"] == count * (
        STREAMS + CALLS
    )
