"""Masks on a GPU: constrained rows and those beside them say what they should, in every way."""

from pathlib import Path

import pytest
import torch

from tests.engine.test_constraints import vocabulary
from tests.gpu.serving import LEVELS, PAGE, serve
from tests.model.checkpoints import LAYERS
from tests.parity.constrained import compare, constrained, judges_of
from tests.parity.judge import Judge, Tally
from tests.parity.prompts import LENGTHS, MAX_TOKENS
from tests.parity.ranks import Ranks
from tests.parity.schedules import schedules
from twolane.devices import DeviceSettings
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.ranks.cuda_machine import RankedCudaMachine
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights

SMALL = -(-(max(LENGTHS) + MAX_TOKENS + PAGE) // PAGE)


@pytest.fixture(scope="module")
def machine(checkpoint: Path) -> CudaMachine:
    spec, weights = load_weights(resolve(str(checkpoint)), dtype="float32", device="cuda")
    return CudaMachine(spec, weights, DeviceSettings(model="", levels=LEVELS[1:2]))


@pytest.mark.parametrize("schedule", tuple(schedules(LAYERS)))
def test_tokens(schedule: str, machine: CudaMachine, judge: Judge, tally: Tally) -> None:
    """In slices, passes and steps of one lane and of two, also of requests computed again."""
    turn, submits = list(schedules(LAYERS)).index(schedule), constrained()
    served = serve(
        machine,
        schedules(LAYERS)[schedule](),
        submits,
        pages=(SMALL, 2048)[turn % 2],
        running=(16, 32)[turn % 2],
        prefix_cache=turn % 4 > 0,
        vocabulary=vocabulary(),
    )
    compare(submits, served, judges_of(judge), tally)
    assert bool(served.preemptions) == (turn % 2 == 0)


def test_tokens_on_two_ranks(checkpoint: Path, judge: Judge) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings = DeviceSettings(
        model=str(checkpoint),
        dtype="float32",
        device="cuda",
        levels=LEVELS[1:2],
        tensor_parallel_size=2,
        all_reduce="nccl",  # a process maps other GPUs' memory once, and other tests do
        gpu_memory_utilization=0.5,
    )
    ranks = Ranks(RankedCudaMachine(settings, lambda *_: None), 2048, PAGE, 16)
    submits = constrained()
    try:
        served = ranks.serve(
            schedules(LAYERS)["static-split-k3"](), submits, vocabulary=vocabulary()
        )
    finally:
        ranks.close()
    compare(submits, served, judges_of(judge), Tally())
