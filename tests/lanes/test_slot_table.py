"""What lanes know of slots."""

import pytest

from twolane.lanes.slot_table import SlotTable
from twolane.lanes.work import SlotUpdate


def test_pages_follow_those_that_were_told_before() -> None:
    table = SlotTable(2)
    table.take([SlotUpdate(0, 0, (5, 6), adapter=1), SlotUpdate(0, 2, (7,))])
    assert (table.pages, table.adapters) == ([[5, 6, 7], []], [1, -1])
    for first in (1, 2, 4):
        with pytest.raises(ValueError, match=f"slot 0 has 3 pages, and is told those from {first}"):
            table.take([SlotUpdate(0, first, (8,))])
    table.take([SlotUpdate(0, 0, (8,))])
    assert (table.pages, table.adapters) == ([[8], []], [-1, -1]), "another request has the slot"
