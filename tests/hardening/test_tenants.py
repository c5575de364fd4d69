"""What one tenant may take from another on a real server."""

import pytest

from .tenants import FIELDS, SYSTEMS, fields, shares

MOST = 3.0
"""Times the wait for a first token beside one request of the other key."""
MOST_OF_A_FIELD = 1.2
"""Times the engine's CPU time for a token of a stream beside the same request without the field."""


@pytest.mark.full
@pytest.mark.parametrize("case", ["queue", "slots", "pages"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_waits_about_as_long_beside_300_requests_as_beside_one(
    system: str, case: str
) -> None:
    assert shares(system, case)["ratio"] <= MOST


@pytest.mark.full
@pytest.mark.parametrize("field", FIELDS)
def test_a_full_field_takes_little_from_other_streams(field: str) -> None:
    [row] = fields([field])
    assert row["cpu"] <= MOST_OF_A_FIELD
