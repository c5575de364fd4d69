"""How the engine's costs grow with the requests, within one run."""

from tests.engine.scaling import cost


def test_costs_grow_slower_than_the_requests() -> None:
    """With eight times the requests in decode and waiting, a row costs much less, and a plan of
    `auto`, which orders all that wait, less than three times as much: nine when it walked them."""
    few, many = (cost("auto", count, longest=200) for count in (64, 512))
    assert many.launch + many.reap < 0.7 * (few.launch + few.reap)
    assert many.plan < 3 * few.plan
