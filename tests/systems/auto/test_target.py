"""The time between two tokens that is planned for, by itself."""

from tests.estimate import synthetic
from tests.systems.handmade import UNITS, decoding, view
from twolane.estimate.query import Load, decode_step
from twolane.slo import Slo
from twolane.systems.auto.target import DEFAULT_TBT_SECONDS, DEFAULT_TBT_STEPS, target_tbt

KNOWN = synthetic.calibrated()


def step_over(*contexts: int) -> float:
    seconds = KNOWN.predict(decode_step(Load.decode(contexts)), UNITS, bound=True)
    assert seconds is not None
    return seconds


def test_a_bound_that_the_shortest_request_alone_could_keep_binds() -> None:
    """One that nobody could keep does not: then a few steps are planned for."""
    contexts = (100, 200_000)
    step = step_over(*contexts)
    kept, hopeless = (step_over(100) + step_over(200_000)) / 2, step_over(100) / 2
    for bound, wanted in (
        (kept, kept),
        (hopeless, max(DEFAULT_TBT_SECONDS, DEFAULT_TBT_STEPS * step)),
    ):
        rows = [decoding(f"{n}", n, slo=Slo(tbt=bound)) for n in contexts]
        assert target_tbt(view(KNOWN, decoding=rows), rows, step, 1.0).bound == wanted
