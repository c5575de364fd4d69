"""Rows that a grammar constrains say the likeliest of what it allows; free ones, as ever."""

import pytest

from tests.model.checkpoints import LAYERS, load_decoder, make_checkpoint, reference
from tests.parity.constrained import compare, constrained, judges_of
from tests.parity.judge import Judge, Tally
from tests.parity.schedules import schedules
from tests.parity.serving import serve
from tests.parity.test_tiny import PAGE, POOLS
from twolane.model.load.hub import resolve

from ..engine.test_constraints import vocabulary


@pytest.mark.parametrize(
    ("schedule", "pool"),
    [
        ("static-split-k3", "small"),
        pytest.param("chunked-48", "ample", marks=pytest.mark.full),
    ],
)
def test_tokens(
    schedule: str, pool: str, tmp_path_factory: pytest.TempPathFactory, tally: Tally
) -> None:
    path = make_checkpoint("llama31", tmp_path_factory.mktemp("constrained") / "model", seed=1)
    submits = constrained()
    served = serve(
        load_decoder(resolve(str(path))),
        schedules(LAYERS)[schedule](),
        submits,
        pages=POOLS[pool],
        page_size=PAGE,
        running=16,
        prefix_cache=True,
        vocabulary=vocabulary(),
    )
    compare(submits, served, judges_of(Judge(reference(path))), tally)
    assert bool(served.preemptions) == (pool == "small")
