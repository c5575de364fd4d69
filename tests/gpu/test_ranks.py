"""Ranks on as many GPUs say what transformers says, whatever the schedule; as `tests.parity`."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from tests.gpu.serving import LEVELS, PAGE, needs_to_map_memory
from tests.model.checkpoints import LAYERS, make_checkpoint, reference
from tests.parity.judge import Judge, Tally
from tests.parity.ranks import Ranks
from tests.parity.schedules import schedules
from tests.parity.test_tiny import REQUESTS, compare
from twolane.devices import DeviceSettings
from twolane.engine.messages import Submit
from twolane.lanes.ranks.cuda_machine import RankedCudaMachine
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system

PAGES, RUNNING = 2048, 16
SEEDED = [
    Submit(
        f"s{i}",
        [3 + i, 9, 27, 81],
        SamplingParams(temperature=1.0, seed=i, max_tokens=16, repetition_penalty=1.2, logprobs=2),
    )
    for i in range(8)
]
THIRDS = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
}
"""The shape of SmolLM2-135M, which three ranks can share."""
JOINED = {"hidden_size": 128}
"""Rows of float32 that the kernel of joined sums serves."""
Load = Callable[..., tuple[Ranks, Judge]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """size, how steps sum, family → (so many GPUs with a model, the same checkpoint in
    transformers)."""
    open_ranks: list[Ranks] = []

    @cache
    def load(size: int, all_reduce: str, family: str = "qwen3") -> tuple[Ranks, Judge]:
        folder = tmp_path_factory.mktemp("gpu") / "model"
        family, sizes = ("llama31", THIRDS) if size == 3 else (family, None)
        sizes = sizes if all_reduce == "nccl" else JOINED
        path = make_checkpoint(family, folder, seed=1, sizes=sizes)
        settings = DeviceSettings(
            model=str(path),
            dtype="float32",
            device="cuda",
            levels=LEVELS,
            tensor_parallel_size=size,
            all_reduce=all_reduce,
            gpu_memory_utilization=0.5,
        )
        machine = RankedCudaMachine(settings, lambda *_: None)
        open_ranks.append(Ranks(machine, PAGES, PAGE, RUNNING))
        return open_ranks[-1], Judge(reference(path))

    yield load
    for each in open_ranks:
        assert set(each.close()) == {0}


def needs(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")


@pytest.mark.parametrize("schedule", tuple(schedules(LAYERS)))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens(size: int, schedule: str, ranks: Load, tally: Tally) -> None:
    needs(size)
    served, judge = ranks(size, "nccl")
    compare(REQUESTS, served.serve(schedules(LAYERS)[schedule](), REQUESTS), judge, tally)


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_of_experts(size: int, ranks: Load, tally: Tally) -> None:
    """Every rank routes the rows that all of them have summed and normalised."""
    needs(size)
    served, judge = ranks(size, "nccl", "qwen3-moe")
    for schedule in ("static-split", "chunked-48"):
        outputs = served.serve(schedules(LAYERS)[schedule](), REQUESTS)
        compare(REQUESTS, outputs, judge, tally)


@pytest.mark.parametrize("all_reduce", ["joined", "auto"])
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_where_sums_go_over_mapped_memory(
    size: int, all_reduce: str, ranks: Load, tally: Tally
) -> None:
    """Joined with the norms behind them, or as was fastest at the start."""
    needs(size)
    needs_to_map_memory()
    served, judge = ranks(size, all_reduce)
    for schedule in ("static-split", "chunked-48"):
        outputs = served.serve(schedules(LAYERS)[schedule](), REQUESTS)
        compare(REQUESTS, outputs, judge, tally)


@pytest.mark.parametrize("size", [2, 4])
def test_every_system_lets_them_sample_the_same(size: int, ranks: Load) -> None:
    needs(size)
    served, _ = ranks(size, "nccl")
    names = ("static-split", "chunked", "temporal")
    said = [served.serve(make_system(name, {}), SEEDED).outputs for name in names]
    assert said[0] == said[1] == said[2]
