"""float32 on the GPU says what transformers says, whatever the schedule; as `tests/parity`."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.gpu.serving import LEVELS, PAGE, serve
from tests.model.checkpoints import FAMILIES, HYBRIDS, LAYERS, make_checkpoint, reference
from tests.parity.judge import Judge, Tally
from tests.parity.prompts import LENGTHS, MAX_TOKENS, conversation
from tests.parity.schedules import schedules
from tests.parity.test_tiny import REQUESTS, compare
from twolane.devices import DeviceSettings
from twolane.lanes.cuda.machine import CudaMachine
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights

SMALL = -(-(max(LENGTHS) + MAX_TOKENS + PAGE) // PAGE)
Machines = Callable[[str], tuple[CudaMachine, Judge]]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """family → (a GPU with it, the same checkpoint in transformers)."""

    @cache
    def load(family: str) -> tuple[CudaMachine, Judge]:
        path = make_checkpoint(family, tmp_path_factory.mktemp("gpu") / family, seed=1)
        spec, weights = load_weights(resolve(str(path)), dtype="float32", device="cuda")
        return CudaMachine(spec, weights, DeviceSettings(model="", levels=LEVELS)), Judge(
            reference(path)
        )

    return load


@pytest.mark.parametrize("schedule", tuple(schedules(LAYERS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family: str, schedule: str, machines: Machines, tally: Tally) -> None:
    machine, judge = machines(family)
    turn = FAMILIES.index(family) + list(schedules(LAYERS)).index(schedule)
    pages, cached = (2048, SMALL)[turn % 2], turn % 4 > 0
    served = serve(
        machine,
        schedules(LAYERS)[schedule](),
        REQUESTS,
        pages=pages,
        running=(5, 16, 32)[turn % 3],
        prefix_cache=cached,
    )
    compare(REQUESTS, served, judge, tally)
    if not machine.page_layout.window_tables:  # else pages that have left windows are enough
        assert bool(served.preemptions) == (pages == SMALL)
    assert bool(served.prefix_hits) == cached


@pytest.mark.parametrize("family", HYBRIDS)
def test_turns_of_a_conversation(family: str, machines: Machines, tally: Tally) -> None:
    """Each turn begins with the states after the last page of the turn before it."""
    machine, judge = machines(family)
    turns = conversation(judge.model, 64)
    served = serve(
        machine, schedules(LAYERS)["static-split"](), turns, pages=128, running=1, prefix_cache=True
    )
    compare(turns, served, judge, tally)
    assert served.prefix_hits == sum((len(turn.prompt) - 1) // PAGE * PAGE for turn in turns[:-1])
