"""What is launched on a GPU says what the CPU's decoder says: slices of prompts, hybrid passes.

What graphs would replay runs here as it is, with FlashInfer's kernel in PyTorch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest
import torch

from tests.kernels.test_gpu_decoder import on_cpu
from tests.kernels.test_prefill_attention import Fa3
from tests.model.adapters import make_adapter
from tests.model.checkpoints import make_checkpoint
from twolane.devices import LaneName
from twolane.kernels.prefill_attention import flashinfer_kernels as fa3
from twolane.lanes.cuda import hybrid_graphs as module
from twolane.lanes.cuda import layer_graphs
from twolane.lanes.cuda import runner as runner_module
from twolane.lanes.cuda.decode_graphs import DecodeGraphs
from twolane.lanes.cuda.hybrid_graphs import served
from twolane.lanes.cuda.layer_graphs import PassGraphs, _Layer
from twolane.lanes.cuda.runner import CudaRunner, PendingStep
from twolane.lanes.cuda.slots import Slots
from twolane.lanes.sampling_points import SamplingPoints
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Sampling,
    SlotUpdate,
    TokenMask,
    Work,
    pack,
)
from twolane.model.decoder import Decoder
from twolane.model.gpu_decoder import GpuDecoder, GpuKVCache, GpuStatePool
from twolane.model.gpu_lora import GpuAdapterPool
from twolane.model.load.hub import resolve
from twolane.model.load.peft import read_adapter
from twolane.model.load.weights import load_weights
from twolane.model.lora import MAX_RANK, AdapterPool
from twolane.model.page_layout import PageLayout
from twolane.parallel.channel import Channel
from twolane.sampling import SamplingParams

PAGE, UNITS, SLOTS = 16, 3, 5
SIZES = 16, 32, 64, 128, 192
"""Rows of passes here, of which the interpreter computes each."""
LARGEST = SIZES[-1]


class Lazily(dict):
    """Graphs that are not captured: each is what it would replay."""

    def __init__(self, run: Callable[..., None]) -> None:
        super().__init__()
        self._run = run

    def __missing__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        return graph(self._run, *key)


def graph(run: Callable[..., None], *arguments: object) -> Any:
    """What is not captured."""
    return SimpleNamespace(replay=partial(run, *arguments))


@dataclass
class Asked:
    """One request: its tokens, of which so many are in the pool, and where."""

    slot: int
    tokens: list[int]
    pages: list[int]
    written: int = 0
    told: bool = False
    embeds: bool = False
    windows: tuple[tuple[int, ...], ...] = ()
    """Pages of the tables of layers with a window."""
    adapters: ClassVar[Mapping[int, int]] = {}
    """Adapter slots by slot of those that have one."""

    @property
    def adapter(self) -> int:
        """Its adapter slot; -1: none."""
        return self.adapters.get(self.slot, -1)

    def updates(self) -> list[SlotUpdate]:
        """What the runner was not told."""
        if self.told:
            return []
        self.told = True
        params = SamplingParams(temperature=0.0, embeds=self.embeds)
        greedy = Sampling(params, 0, len(self.tokens), ())
        pages = tuple(self.pages)
        return [SlotUpdate(self.slot, 0, pages, greedy, self.adapter, self.windows)]


class World:
    """A model twice: on the CPU, and as it is launched on a GPU, or on one of several.

    With adapters, slots 0 and up have these.
    """

    def __init__(
        self,
        path: Path,
        channels: Sequence[Channel] = (),
        adapters: Sequence[Path] = (),
        *,
        windows: bool = False,
    ) -> None:
        device = torch.device("cpu")
        self.spec, weights = load_weights(resolve(str(path)))
        self.right = Decoder(self.spec, weights)
        rank, ranks = (channels[0].rank, channels[0].size) if channels else (0, 1)
        _, there = load_weights(resolve(str(path)), rank=rank, ranks=ranks)
        self.decoder = GpuDecoder(self.spec, there, rank, ranks)
        self.follows = rank > 0
        states = GpuStatePool(self.decoder.spec, SLOTS, torch.float32, device)
        if windows:
            self.decoder.layout = PageLayout.of(self.spec)
        shape, layout = (self.decoder.spec, 40, PAGE, torch.float32, device), self.decoder.layout
        self.kv = GpuKVCache(*shape, states=states, layout=layout)
        for layer in (*self.kv.layers, *(part for each in states.layers.values() for part in each)):
            layer.fill_(float("nan"))  # what nobody wrote must not be read: it would show
        self.slots = Slots(SLOTS, 20, device, 1 + layout.window_tables)
        lanes: dict[LaneName, Channel | None] = dict(zip(("prefill", "decode"), channels))  # noqa: B905
        common = self.decoder, self.kv, self.slots
        shard, count = self.decoder.shard, len(adapters)
        pool = GpuAdapterPool(shard, there, count, MAX_RANK) if adapters else None
        steps = DecodeGraphs(*common, SLOTS, UNITS, lanes.get("decode"), pool)
        self.runner = CudaRunner(*common, steps, LARGEST, UNITS, lanes)
        self.adapters = AdapterPool(weights, count)
        for slot, adapter in enumerate(adapters):
            self.runner.load_adapter(slot, str(adapter))
            self.adapters.put(slot, read_adapter(adapter, self.right.shard, self.right.dtype))
        self.split: list[bool] = []
        self.masks: tuple[TokenMask, ...] = ()
        """Those of the passes."""
        self.passes = self.runner.passes
        self.passes.sizes, self.passes.ready = SIZES, [*SIZES]
        if self.runner.whole is None:
            return
        self.whole = self.runner.whole
        self.whole._logits.fill_(float("nan"))
        self.whole._passed = Lazily(self._noted)
        self.whole._ended = Lazily(self.whole._end)

    def _noted(self, size: int, split: bool, adapted: bool) -> None:
        self.split.append(split)
        self.whole._pass(size, split, adapted)
        rows = int(self.whole._counts[1])
        assert not self.passes.residual[:rows].isnan().any()

    def capture_slices(self, size: int) -> None:
        """Have the layers of slices in graphs, of one size."""
        passes, layers = self.passes, range(self.spec.layers)
        passes.sizes, passes.ready = (size,), [size]
        parts = passes._before, passes.after
        made = {
            (size, kind): [
                _Layer(*(graph(part, UNITS, size, kind, i) for part in parts)) for i in layers
            ]
            for kind in passes.kinds
        }
        passes.levels[UNITS] = PassGraphs(made, 0, 0.0, 0.0)

    def slice(
        self,
        batch: int,
        chunks: Sequence[tuple[Asked, PromptRow]],
        first: int = 0,
        last: int | None = None,
        lane: LaneName = "prefill",
    ) -> None:
        """Some layers of a batch; see `check`."""
        last = self.spec.layers if last is None else last
        rows, finishes = tuple(row for _, row in chunks), last == self.spec.layers
        opens, slots = (tokens(chunks), updates(chunks)) if first == 0 else ((), ())
        work = PrefillWork(batch, rows, first, last, finishes, opens, slots)
        self.turns = 0
        steps = self.runner.run(work, lane, UNITS, self._turn).steps
        assert len(steps) == (finishes and not self.follows)
        if finishes:
            self.check(steps, [each for each, row in chunks if row.samples])

    def _turn(self) -> None:
        self.turns += 1

    def prefill(self, sequence: Asked, count: int, lane: LaneName = "prefill") -> None:
        """Write its first tokens to the pool."""
        self.slice(99, [(sequence, self.chunk(sequence, count))], lane=lane)

    def chunk(self, sequence: Asked, count: int) -> PromptRow:
        """Its next tokens."""
        start, end = sequence.written, sequence.written + count
        sequence.written = end
        return PromptRow(sequence.slot, start, count, samples=end == len(sequence.tokens))

    def step(self, sequence: Asked) -> DecodeRow:
        """Its last token, which the device has sampled."""
        sequence.written = len(sequence.tokens)
        position = sequence.written - 1
        return DecodeRow(sequence.slot, position, 1)

    def run(
        self,
        decode: Sequence[Asked],
        chunks: Sequence[tuple[Asked, int]],
        lane: LaneName = "device",
    ) -> None:
        """One hybrid pass; see `check`."""
        rows = [(sequence, self.chunk(sequence, count)) for sequence, count in chunks]
        work = HybridWork(
            tuple(self.step(each) for each in decode),
            tuple(row for _, row in rows),
            tokens(rows),
            (*updates(rows), *(news for each in decode for news in each.updates())),
            self.masks,
        )
        steps = self.runner.run(work, lane, UNITS).steps
        ended = [each for each, _ in chunks if each.written == len(each.tokens)]
        self.check(steps, [*decode, *ended])

    def decode(self, sequences: Sequence[Asked], k: int, lane: LaneName = "decode") -> None:
        """Some steps at once; see `check`."""
        rows = tuple(msgspec.structs.replace(self.step(each), steps=k) for each in sequences)
        slots = tuple(news for each in sequences for news in each.updates())
        steps = self.runner.run(DecodeWork(rows, k, slots), lane, UNITS).steps
        for i in range(k):
            self.check(steps[i : i + 1], sequences, later=i + 1 < k)

    def check(
        self, steps: Sequence[PendingStep], sampled: Sequence[Asked], *, later: bool = False
    ) -> None:
        """See that rank 0's tokens are the CPU's, one for each of these, and go on with them;
        `later`: more steps have been run since."""
        right = [self._right(each) for each in sampled]
        tokens = [int(logits.argmax()) for logits in right]
        for sequence, token in zip(sampled, tokens, strict=True):
            sequence.tokens.append(token)
        if self.follows:
            assert not steps
            return
        [step] = steps
        assert step.collect() == tokens
        assert self.slots.last_token[[each.slot for each in sampled]].tolist() == tokens or later

    def _right(self, sequence: Asked) -> torch.Tensor:
        """The logits behind its last token, on the CPU."""
        slots = np.full(len(sequence.tokens), sequence.adapter)
        products = self.adapters.products(self.right.products, slots)
        return on_cpu(self.right, torch.tensor(sequence.tokens), products)[-1]


def tokens(chunks: Sequence[tuple[Asked, PromptRow]]) -> tuple[PromptChunk, ...]:
    parts = [each.tokens[row.start : row.start + row.count] for each, row in chunks]
    return tuple(PromptChunk(pack(part)) for part in parts)


def updates(chunks: Sequence[tuple[Asked, PromptRow]]) -> tuple[SlotUpdate, ...]:
    return tuple(news for each, _ in chunks for news in each.updates())


def at_once(tokens: torch.Tensor, *_: object, **__: object) -> PendingStep:
    """What was sampled, without memory that only a GPU has."""
    return PendingStep(SimpleNamespace(), tokens.tolist)


def fakes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a CPU stand for a GPU, with few and small sizes."""
    if device != "cpu":
        pytest.skip("tests/gpu/test_logits.py replays graphs")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: torch.Stream("cpu"))
    monkeypatch.setattr(fa3, "_load", lambda dtype, dim: (Fa3(132), None))
    monkeypatch.setattr(module, "WHOLE", LARGEST)
    monkeypatch.setattr(runner_module, "served", lambda decoder: True)
    monkeypatch.setattr(runner_module, "_read", at_once)


@pytest.fixture
def world(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> World:
    fakes(device, monkeypatch)
    return World(make_checkpoint("qwen3", tmp_path / "model", seed=1, layers=2))


@pytest.fixture
def deep(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> World:
    """One of whose layers is neither the first nor the last."""
    fakes(device, monkeypatch)
    return World(make_checkpoint("qwen3", tmp_path / "model", seed=1, layers=3))


@pytest.fixture
def adapted(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> World:
    """Two slots have one adapter, two others one each, and one has none."""
    fakes(device, monkeypatch)
    base = make_checkpoint("qwen3", tmp_path / "model", seed=1, layers=2)
    some = {"modules": ["self_attn.k_proj", "mlp.up_proj"], "layers": [1]}
    adapters = [
        make_adapter(base, tmp_path / "whole", rank=16),
        make_adapter(base, tmp_path / "some", rank=1, seed=1, **some),
        make_adapter(base, tmp_path / "large", rank=64, seed=2),
    ]
    monkeypatch.setattr(Asked, "adapters", {0: 0, 1: 2, 2: 1, 4: 0})
    return World(base, (), adapters)


def test_sizes_are_timed_by_layers_of_random_rows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many rows as the size has; nothing of them is left."""
    rows: list[int] = []

    def seconds(run: Callable[[], None], repeats: int) -> float:
        run()
        residual = world.passes.residual
        rows.append(int(residual.abs().sum(dim=1).count_nonzero()))
        assert residual.isfinite().all()
        residual.zero_()
        return {16: 1.0, 32: 0.9}[rows[-1]]

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(layer_graphs, "SIZES", (16, 32))
    monkeypatch.setattr(layer_graphs, "graph_seconds", seconds)
    world.passes._whole = UNITS
    world.passes._choose_sizes(torch.Stream("cpu"))
    assert rows == [16, 32] and tuple(world.passes.sizes) == (32,)
    assert not world.passes.residual.any()


@pytest.mark.full
@pytest.mark.parametrize("graphs", [False, True])
def test_slices_of_requests_with_adapters(adapted: World, graphs: bool) -> None:
    slices(adapted, graphs=graphs)


@pytest.mark.full
def test_passes_of_requests_with_adapters(adapted: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "_PAGED", replace(fa3._PAGED, split=10**9))
    monkeypatch.setattr(fa3, "FILLED", 0.0)
    passes(adapted, split=False)


def test_steps_of_requests_with_adapters(adapted: World) -> None:
    """Also of one that has none, beside others and alone, when the steps are those of no adapter;
    and of one that takes over a slot whose request had one."""
    kinds: list[bool] = []
    forward = adapted.runner.steps._forward

    def noted(bucket: int, units: int, adapted: bool) -> None:
        kinds.append(adapted)
        forward(bucket, units, adapted)

    adapted.runner.steps._forward = noted
    requests = [Asked(slot, [*range(slot + 3, slot + 12)], [2 * slot]) for slot in range(4)]
    for each in requests:
        adapted.prefill(each, 8)
        adapted.slots.last_token[each.slot] = each.tokens[-1]
    adapted.decode(requests, 2)
    adapted.decode(requests[3:], 1)
    Asked.adapters = {}
    later = Asked(0, [*range(50, 60)], [30])
    adapted.prefill(later, 10)
    adapted.decode([later, requests[3]], 1)
    assert kinds == [True, True, False, False]


@pytest.mark.parametrize("graphs", [pytest.param(False, marks=pytest.mark.full), True])
def test_slices_take_up_where_the_last_one_ended(deep: World, graphs: bool) -> None:
    """A request leaves between two slices of its batch, and another batch has the lane then."""
    slices(deep, graphs=graphs)


def slices(world: World, *, graphs: bool) -> None:
    if graphs:
        world.capture_slices(64)
    stays, leaves = Asked(0, [*range(3, 40)], [7, 2, 11]), Asked(1, [9, 4, 6], [5])
    other = Asked(2, [*range(60, 80)], [30, 9])
    world.prefill(other, 18)
    chunks = [(leaves, world.chunk(leaves, 3)), (stays, world.chunk(stays, 37))]
    world.slice(1, chunks, 0, 1)
    world.slice(2, [(other, world.chunk(other, 2))])
    world.slice(1, chunks[1:], 1)
    assert world.turns == (world.spec.layers - 1 if graphs else 0)
    assert len(stays.tokens) == 38 and len(other.tokens) == 21


@pytest.mark.full
@pytest.mark.parametrize("graphs", [False, True])
def test_layers_have_inputs_of_their_tokens(
    graphs: bool, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a request has left between two slices, in steps, and in hybrid passes."""
    fakes(device, monkeypatch)
    world = World(make_checkpoint("gemma4-inputs", tmp_path / "model", seed=1, layers=4))
    world.runner._memory["device"].whole = None  # as for all models whose layers differ
    slices(world, graphs=graphs)
    running, new = Asked(4, [*range(90, 99)], [20]), Asked(3, [*range(30, 36)], [21])
    world.prefill(running, 8)
    world.slots.last_token[4] = running.tokens[-1]
    world.decode([running], 2)
    world.run([running], [(new, 6)])
    world.decode([running, new], 1)


@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.full), True])
def test_passes_follow_each_other(
    world: World, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests decode beside chunks of others' prompts, which decode when they are through."""
    costs = {"item": 0, "split": 0} if split else {"split": 10**9}
    monkeypatch.setattr(fa3, "_PAGED", replace(fa3._PAGED, **costs))
    monkeypatch.setattr(fa3, "FILLED", 0.0)  # Triton's kernel would be as right, but is no graph

    passes(world, split=split)


@pytest.mark.parametrize("graphs", [pytest.param(False, marks=pytest.mark.full), True])
def test_states_move_on_once_for_each_token(
    graphs: bool, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices, steps and passes of both; a slot is taken over by another request."""
    fakes(device, monkeypatch)
    monkeypatch.setattr(runner_module, "served", served)
    sizes = {"layer_types": ["linear_attention", "full_attention"]}
    sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    path = make_checkpoint("qwen3.5", tmp_path / "model", seed=1, layers=2, sizes=sizes)
    world = World(path)
    if graphs:
        world.capture_slices(64)
    stays, leaves = Asked(0, [*range(3, 40)], [7, 2, 11]), Asked(1, [9, 4, 6], [5])
    running = Asked(4, [*range(60, 80)], [30, 9])
    world.prefill(running, 19)
    world.slots.last_token[4] = running.tokens[-1]
    chunks = [(leaves, world.chunk(leaves, 3)), (stays, world.chunk(stays, 20))]
    world.slice(1, chunks, 0, 1)
    world.decode([running], 2)
    world.slice(1, chunks[1:], 1)
    world.run([running], [(stays, 16)])
    later = Asked(1, [*range(90, 92)], [14])
    world.run([running], [(later, 1), (stays, 1)], lane="decode")
    world.prefill(later, 1)
    world.decode([later, running, stays], 3)


def passes(world: World, *, split: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    pages = iter(torch.randperm(40, generator=draw).tolist())

    def request(slot: int, length: int) -> Asked:
        tokens = torch.randint(3, 250, (length,), generator=draw).tolist()
        return Asked(slot, tokens, [next(pages) for _ in range(-(-(length + 8) // PAGE))])

    running = request(4, 20)
    world.prefill(running, 19)
    world.slots.last_token[4] = running.tokens[-1]
    long, short = request(1, 205 if split else 90), request(0, 5)
    prefix = 192 if split else 33
    world.prefill(long, prefix)
    world.run([running], [(long, 3), (short, 5)])
    world.run([short, running], [(long, len(long.tokens) - prefix - 3)])
    last = request(3, 17)
    world.run([long, running, short], [(last, 17)])
    assert len(world.split) == 3 and any(world.split) == split


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.full)])
def test_pages_that_left_a_window_are_another_requests(
    tmp_path: Path, graphs: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window of 24 tokens have tables of their own, in slices, hybrid passes and
    decode steps; pages of all tables lie in one pool."""
    fakes(device, monkeypatch)
    monkeypatch.setattr(runner_module, "served", lambda decoder: False)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    path = make_checkpoint("gemma3", tmp_path / "model", layers=3, sizes={"layer_types": types})
    world = World(path, windows=True)
    assert world.decoder.layout.tables == (1, 0, 2)
    if graphs:
        world.capture_slices(64)
    first = Asked(0, [*range(3, 73)], [0, 1, 2, 3, 4])
    first.windows = (5, 6, 7, 8, 9), (10, 11, 12, 13, 14)
    world.prefill(first, 30)
    world.prefill(first, 40)
    world.decode([first], 2)
    for pool in world.kv.layers:  # the token at 71 sees those from 48 on
        pool[[5, 6, 10, 11]] = float("nan")
    second = Asked(1, [*range(80, 100)], [15, 16])
    second.windows = (6, 10), (5, 11)
    world.run([first], [(second, 17)])
    world.run([first], [(second, 3)])
    world.decode([first, second], 1)
    assert len(first.tokens) == 76 and len(second.tokens) == 22


def test_steps_are_padded_to_a_bucket_that_has_graphs(world: World) -> None:
    """Buckets whose graphs are captured while nothing runs are padded to the next one."""
    steps = world.runner.steps
    assert [steps.bucket(rows) for rows in (1, SLOTS)] == [1, SLOTS]
    steps.ready = [SLOTS]
    try:
        asked = Asked(0, [5, 3, 8, 2], [0, 1])
        world.prefill(asked, 4)
        assert steps.bucket(1) == SLOTS
        world.decode([asked], 2)
    finally:
        steps.ready = [*steps.buckets]


def test_sizes_are_kept_for_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    assert layer_graphs.read_sizes(file) == ()
    for text, known in (("[1024, 2048]", (1024, 2048)), ("[2048]", ()), ("[7, 1024, 2048]", ())):
        file.write_text(text)
        assert layer_graphs.read_sizes(file) == known, text
    file.write_text("{")
    assert layer_graphs.read_sizes(file) == ()


def test_a_pass_of_the_decode_lane_has_buffers_of_its_own(world: World) -> None:
    """The prefill lane's slices may be running; a system's passes are the whole device's."""
    running, other = Asked(4, [5] * 20, [0, 1]), Asked(1, [7] * 6, [2])
    world.prefill(running, 19)
    world.slots.last_token[4] = running.tokens[-1]
    passes = world.passes
    before = [t.clone() for t in (passes.residual, passes.positions, passes.write_slots)]
    world.run([running], [(other, 6)], lane="decode")
    after = passes.residual, passes.positions, passes.write_slots
    assert all(map(torch.equal, before, after)) and not world.split


def test_masks_may_follow_the_forward_pass(world: World) -> None:
    """Of a step, of a pass of steps and prompts, and of a prompt's last slice."""
    running, other, last = (Asked(s, [5 + s] * 20, [2 * s, 2 * s + 1]) for s in range(3))
    world.prefill(running, 19)

    def chosen(work: Work, lane: LaneName, **masks: int) -> Sequence[int]:
        queued = world.runner.run(work, lane, UNITS)
        assert not queued.steps and queued.end is not None
        slots = world.slots.last_token.clone()
        bits = {int(name[1:]): (1 << token).to_bytes(32, "little") for name, token in masks.items()}
        world.runner.constrain([TokenMask(slot, allowed) for slot, allowed in bits.items()])
        [step] = queued.end()
        assert world.slots.last_token[list(bits)].tolist() == list(masks.values())
        assert not torch.equal(slots, world.slots.last_token)
        return cast("Sequence[int]", step.collect())

    step = DecodeWork((DecodeRow(0, 19, 1),), 1, late=(0,))
    assert chosen(step, "decode", s0=30) == [30]
    chunk = (other, PromptRow(1, 0, 20, samples=True))
    both = HybridWork((DecodeRow(0, 20, 1),), chunk[1:], tokens([chunk]), updates([chunk]))
    assert chosen(msgspec.structs.replace(both, late=(0, 1)), "device", s0=31, s1=32) == [31, 32]
    prompt = (last, PromptRow(2, 0, 20, samples=True))
    opens = tokens([prompt]), updates([prompt])
    slices = PrefillWork(7, prompt[1:], 0, world.spec.layers, True, *opens, late=(2,))
    assert chosen(slices, "prefill", s2=33) == [33]


def test_hidden_states_that_are_asked_for_come_with_the_first_token(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the classifier makes the logits of, of a slice and of a pass with a step."""
    read: list[Mapping[int, torch.Tensor]] = []

    def noted(tokens: torch.Tensor, *_: object, **more: Any) -> PendingStep:
        read.append(more.get("embeddings", {}))
        return at_once(tokens)

    monkeypatch.setattr(runner_module, "_read", noted)
    monkeypatch.setattr(runner_module, "fetch", torch.clone)
    plain = Asked(0, [9] * 12, [0])
    first, other = (Asked(s, [5 + s] * 20, [2 * s, 2 * s + 1], embeds=True) for s in (1, 2))
    right = [world._right(each) for each in (first, other)]
    slices = [(each, world.chunk(each, len(each.tokens))) for each in (plain, first)]
    world.slice(7, slices)
    world.run([plain], [(other, 20)])
    assert [[*each] for each in read] == [[1], [1]]
    for states, logits in zip(read, right, strict=True):
        made = world.right.products.linear(states[1], world.right.weights.head)
        torch.testing.assert_close(made[0], logits, atol=1e-3, rtol=1e-3)


def test_steps_tell_how_many_experts_they_have_read(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row reads as many in a layer as a token goes to; each step begins to count anew."""
    fakes(device, monkeypatch)
    read: list[tuple[int, int]] = []

    def noted(tokens: torch.Tensor, *_: object, layers: int) -> PendingStep:
        read.append((int(tokens[-1]), layers))
        return at_once(tokens[:1])

    world = World(make_checkpoint("qwen3-moe", tmp_path / "model", seed=1, layers=3))
    request = Asked(1, [*range(3, 8)], [2])
    world.prefill(request, 4)
    world.slots.last_token[request.slot] = request.tokens[-1]
    monkeypatch.setattr(runner_module, "_read", noted)
    world.decode([request], 2)
    moe = world.spec.moe
    assert moe is not None
    layers = world.spec.expert_layers
    assert layers == 2 and read == [(layers * moe.per_token, layers)] * 2


def test_what_has_no_graph_is_not_sent(world: World) -> None:
    running, other = (Asked(slot, [3] * 200, [*range(13)]) for slot in range(2))
    chunk, step = PromptRow(0, 0, 191), world.step(running)
    world.slots.take([*running.updates(), *other.updates()])
    world.whole._passed = Lazily(lambda *_: None)

    def sent(decode: Sequence[DecodeRow], prompts: Sequence[PromptRow], units: int = UNITS) -> bool:
        chunks = tuple(PromptChunk(pack([3] * row.count)) for row in prompts)
        asked = HybridWork(tuple(decode), tuple(prompts), chunks)
        ends = SamplingPoints.of(asked.decode, asked.prompts, chunks)
        return world.whole.send(asked, ends, units) is not None

    assert sent((step,), (chunk,))
    assert not sent((step,), (PromptRow(0, 0, 192),))
    assert not sent((), (chunk,))
    assert not sent((step,), (chunk,), units=UNITS - 1)
