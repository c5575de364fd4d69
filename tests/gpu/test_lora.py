"""Adapters on a GPU: tokens are those of merged weights, and without one nothing changes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.serving import PAGE, serve
from tests.kernels.test_gpu_decoder import PROMPT, OnGpu, ints, on_cpu
from tests.model.adapters import make_adapter, merge
from tests.model.checkpoints import LAYERS, make_checkpoint, reference
from tests.parity.judge import MAX_FORGIVEN, Judge, Tally
from tests.parity.prompts import LENGTHS, MAX_TOKENS
from tests.parity.ranks import Ranks, load_where_files_differ
from tests.parity.schedules import schedules
from tests.parity.serving import Served
from tests.parity.test_tiny import REQUESTS
from twolane.devices import DeviceSettings
from twolane.engine.messages import Submit
from twolane.kernels.products.dispatch import GpuProducts
from twolane.lanes.cuda.layer_graphs import LayerGraphs
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.ranks.cuda_machine import RankedCudaMachine
from twolane.lanes.settings import LaneSizes
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Sampling,
    SlotUpdate,
    Work,
    pack,
)
from twolane.model.decoder import Decoder
from twolane.model.gpu_decoder import GpuDecoder
from twolane.model.gpu_lora import GpuAdaptedProducts, GpuAdapterPool
from twolane.model.load.hub import resolve
from twolane.model.load.peft import read_adapter
from twolane.model.load.weights import load_weights
from twolane.model.lora import MAX_RANK, Adapter, AdapterPool
from twolane.sampling import SamplingParams

LEVELS = (48,)
RANKS = (1, 16, 64, 2, 8, 32, 33, 5)
SMALL = -(-(max(LENGTHS) + MAX_TOKENS + PAGE) // PAGE)
"""Pages that make requests be preempted."""
SCHEDULES = ("static-split-k3", "chunked-48", "every-layer")


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> dict[str, Path]:
    return {
        f"rank-{rank}": make_adapter(
            checkpoint, checkpoint.parent / f"rank-{rank}", rank=rank, seed=rank, strength=0.5
        )
        for rank in RANKS
    }


@pytest.fixture(scope="module")
def judges(checkpoint: Path, adapters: dict[str, Path]) -> dict[str | None, Judge]:
    """What transformers says of the base, and of each adapter merged into it."""
    merged = {
        name: merge(checkpoint, path, checkpoint.parent / f"merged-{name}")
        for name, path in adapters.items()
    }
    return {name: Judge(reference(path)) for name, path in {None: checkpoint, **merged}.items()}


def machine_with(base: Path, slots: int) -> CudaMachine:
    spec, weights = load_weights(resolve(str(base)), dtype="float32", device="cuda")
    return CudaMachine(
        spec,
        weights,
        DeviceSettings(
            model="",
            levels=LEVELS,
            lora_endpoints=slots > 0,
            max_loras=slots,
            max_lora_rank=MAX_RANK,
        ),
    )


def asked() -> list[Submit]:
    """The requests of parity tests, each third without an adapter."""
    given = []
    for i, submit in enumerate(REQUESTS):
        name = None if i % 3 == 2 else f"rank-{RANKS[i % len(RANKS)]}"
        given.append(Submit(submit.id, submit.prompt, submit.params, lora=name))
    return given


def check(submits: list[Submit], served: Served, judges: dict[str | None, Judge]) -> None:
    """Every token is that of the request's adapter."""
    tally = Tally()
    for submit, output in zip(submits, served.outputs, strict=True):
        assert len(output) == submit.params.max_tokens
        tally.forgiven += judges[submit.lora].forgiven(submit.prompt, output)
        tally.tokens += len(output)
    print(tally)
    assert tally.forgiven < MAX_FORGIVEN * tally.tokens


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_are_those_of_merged_weights(
    schedule: str,
    checkpoint: Path,
    adapters: dict[str, Path],
    judges: dict[str | None, Judge],
) -> None:
    """Eight adapters and none in one batch, in slices, passes and steps, and after preemption."""
    pages = SMALL if schedule == "static-split-k3" else 2048
    submits = asked()
    served = serve(
        machine_with(checkpoint, len(adapters)),
        schedules(LAYERS)[schedule](),
        submits,
        pages=pages,
        running=16,
        prefix_cache=True,
        adapters=adapters,
    )
    check(submits, served, judges)
    assert bool(served.preemptions) == (pages == SMALL)


def test_two_ranks_say_what_merged_weights_say(
    checkpoint: Path, adapters: dict[str, Path], judges: dict[str | None, Judge], tmp_path: Path
) -> None:
    """Each rank has its part of A or of B, which is cut as the base's matrix is; an adapter whose
    files are others when rank 1 reads them is refused, and the next one is read."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings = DeviceSettings(
        model=str(checkpoint),
        dtype="float32",
        device="cuda",
        levels=LEVELS,
        tensor_parallel_size=2,
        all_reduce="nccl",  # a process maps other GPUs' memory once, and other tests do
        gpu_memory_utilization=0.5,
        lora_endpoints=True,
        max_loras=len(adapters),
        max_lora_rank=MAX_RANK,
    )
    ranks, submits = Ranks(RankedCudaMachine(settings, lambda *_: None), 2048, PAGE, 16), asked()
    try:
        served = ranks.serve(schedules(LAYERS)["static-split-k3"](), submits, adapters)
        assert "rank 1" in load_where_files_differ(ranks, checkpoint, tmp_path)
    finally:
        ranks.close()
    check(submits, served, judges)


def test_adapters_over_fp8_weights(tmp_path: Path) -> None:
    """They are as near to the numbers that are meant as on a CPU."""
    path = make_checkpoint("qwen3", tmp_path / "base", seed=1, layers=2)
    adapter = make_adapter(path, tmp_path / "adapter", rank=16, strength=0.5)
    tokens = torch.randint(3, 250, (PROMPT,), generator=torch.Generator().manual_seed(0))
    slots = np.arange(PROMPT) % 3 - 1  # the second adapter adds nothing

    def on_a_cpu(scheme: str | None, dtype: str) -> Tensor:
        spec, weights = load_weights(resolve(str(path)), dtype=dtype, quantization=scheme)
        decoder, pool = Decoder(spec, weights), AdapterPool(weights, 2)
        pool.put(0, read_adapter(adapter, decoder.shard, decoder.dtype))
        pool.put(1, Adapter([{}] * spec.layers, 0))
        return on_cpu(decoder, tokens, pool.products(decoder.products, slots)).float()

    spec, there = load_weights(
        resolve(str(path)), dtype="bfloat16", quantization="fp8", device="cuda"
    )
    with torch.inference_mode():
        meant, cpu = on_a_cpu(None, "float32"), on_a_cpu("fp8", "bfloat16")
        gpu = OnGpu(GpuDecoder(spec, there), torch.bfloat16)
        shard = gpu.decoder.shard
        pool = GpuAdapterPool(shard, there, 2, 16)
        pool.put(0, read_adapter(adapter, shard, torch.bfloat16))
        tiles = pool.tiles(PROMPT).of_first(PROMPT)
        tiles.arrange(ints(*range(PROMPT)), ints(*slots.tolist()))
        hidden = there.embedding[tokens.cuda()]
        products = GpuAdaptedProducts(GpuProducts(132), pool, tiles)
        gpu.layers(0, spec.layers, hidden, gpu.prompt(), products)
        logits = gpu.logits(hidden).cpu()
    cost = (cpu - meant).norm() / meant.norm()
    apart = (logits - meant).norm() / meant.norm()
    print(f"CPU {cost:.4f}, GPU {apart:.4f} from float32")
    assert apart < 1.6 * cost + 0.01


class Noted(dict):
    """Graphs by kind, and which kinds were taken."""

    def __init__(self, graphs: dict, taken: set) -> None:
        super().__init__(graphs)
        self._taken = taken

    def __getitem__(self, kind: object) -> object:
        self._taken.add(kind)
        return super().__getitem__(kind)


def bits(machine: CudaMachine) -> tuple[list[Tensor], set]:
    """Hidden states and logits of fixed work without adapters, and the kinds of graphs taken.

    Only of rows that are no padding: attention leaves the others as it finds them.
    """
    lanes = machine.start(LaneSizes(64, PAGE, 8, 512), lambda: None, lambda *_: None)
    runner, units, taken = lanes.runner, lanes.units, set()
    for graphs in runner.steps.levels.values():
        object.__setattr__(graphs, "forward", Noted(graphs.forward, taken))
    for passes in runner.passes.levels.values():
        object.__setattr__(passes, "layers", Noted(passes.layers, taken))
    if runner.whole is not None:
        runner.whole._passed = Noted(runner.whole._passed, taken)
    params, seen = SamplingParams(temperature=0.0), []

    def prompt(slot: int, count: int) -> tuple[PromptRow, PromptChunk, SlotUpdate]:
        pages = tuple(range(8 * slot, 8 * slot + 8))
        row = PromptRow(slot, 0, count, samples=True)
        chunk = PromptChunk(pack([(7 * i + slot) % 250 + 3 for i in range(count)]))
        return row, chunk, SlotUpdate(slot, 0, pages, Sampling(params, 0, count, ()))

    def launch(lane: str, work: Work, count: int, out: Tensor) -> None:
        ticket = lanes.launch(lane, units, work, ())
        lanes.synchronize()
        ticket.check()
        seen.append(out[:count].clone())

    prompts = [prompt(slot, 20 + slot) for slot in range(5)]
    rows, chunks, slots = (tuple(part) for part in zip(*prompts, strict=True))
    hidden, logits = runner.passes.residual, runner.steps.logits
    hidden.zero_(), logits.zero_()
    work = PrefillWork(1, rows, 0, machine.spec.layers, True, chunks, slots)
    launch("prefill", work, sum(row.count for row in rows), hidden)
    steps = tuple(DecodeRow(slot, 20 + slot, 2) for slot in range(5))
    launch("decode", DecodeWork(steps, 2), len(steps), logits)
    row, chunk, slot = prompt(6, 50)
    step = tuple(DecodeRow(slot, 22 + slot, 1) for slot in range(5))
    launch("device", HybridWork(step, (row,), (chunk,), (slot,)), len(step) + row.count, hidden)
    seen.append(runner.slots.last_token[:7].clone())
    lanes.close()
    return seen, taken


def test_without_adapters_bits_and_graphs_are_those_of_a_server_that_has_none(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both pad passes to the same sizes, which each start chooses by its own times."""
    monkeypatch.setattr(LayerGraphs, "_choose_sizes", lambda *_: None)
    with torch.inference_mode():
        alone, kinds = bits(machine_with(checkpoint, 0))
        beside, others = bits(machine_with(checkpoint, 2))
    assert kinds == others and all(not kind[-1] for kind in kinds)
    for one, other in zip(alone, beside, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
