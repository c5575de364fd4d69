"""A model on one GPU or several with its lanes, driven without the engine."""

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from measured import StartProgress

from twolane.common import garbage
from twolane.devices import DeviceSettings
from twolane.kernels.decode_attention.dispatch import decode_attention
from twolane.lanes.base import Ticket
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.ranks.cuda_machine import RankedCudaMachine, load_rank
from twolane.lanes.settings import LaneSizes
from twolane.lanes.slot_table import PendingSlotUpdates
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
)
from twolane.model.gpu_decoder import layer_matrices
from twolane.parallel.channel import NullChannel
from twolane.parallel.group import CHANNELS
from twolane.sampling import SamplingParams

PAGE = 32
ROOM = 64
"""Tokens for which a decode row has pages beyond its context."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@dataclass
class Rig:
    """A model on the GPU with its lanes, driven without the engine."""

    name: str
    decode_units: Sequence[int] | None = None
    slots: int = 256
    pages: int = 0
    longest: int = 40_960
    """Tokens of the longest request."""
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    router_skew: float = 0.0
    adapter_slots: int = 0
    adapters: int = 0
    """Number of adapters, assigned to slots in rotation."""
    machine: CudaMachine = field(init=False)
    held: dict[int, list[int]] = field(default_factory=dict)
    """Pages by slot."""
    untold: PendingSlotUpdates = field(default_factory=PendingSlotUpdates)

    def __post_init__(self) -> None:
        begun = time.monotonic()
        settings = DeviceSettings(
            model=self.name,
            load_format="dummy",
            quantization=self.quantization,
            router_skew=self.router_skew,
            levels=self.decode_units,
            kv_cache_dtype=self.kv_cache_dtype,
            lora_endpoints=self.adapter_slots > 0,
            max_loras=self.adapter_slots,
        )
        self.machine = CudaMachine(*load_rank(settings, 0, lambda *_: None))
        if not self.pages:
            self.pages = self.machine.kv_bytes(self.longest) // (
                PAGE * self.machine.page_token_bytes
            )
        sizes = LaneSizes(self.pages, PAGE, self.slots, self.longest)
        self.lanes = self.machine.start(sizes, lambda: None, lambda *_: None)
        self.lanes.fill_kv()
        torch.cuda.synchronize()
        self.free = list(range(self.pages))
        random.Random(0).shuffle(self.free)
        self.start_seconds = time.monotonic() - begun

    @property
    def spec(self):
        return self.machine.spec

    def close(self) -> None:
        """Free the rig; may be called again."""
        if not hasattr(self, "lanes"):
            return
        self.lanes.close()
        del self.lanes, self.machine
        gc.collect()
        torch.cuda.empty_cache()

    def take(self, slot: int, tokens: int, prompt: int) -> None:
        """Allocate pages for this many tokens, scattered over the pool; sent with the slot's next
        launch."""
        pages = self.held[slot] = [self.free.pop() for _ in range(-(-tokens // PAGE))]
        sampling = Sampling(GREEDY, 0, prompt, ())
        adapter = slot % self.adapters if self.adapters else -1
        self.untold.add(SlotUpdate(slot, 0, tuple(pages), sampling, adapter))

    def launch(self, lane: str, units: int, work: Work) -> Ticket:
        return self.lanes.launch(lane, units, self.untold.attach(work), ())

    def decode_rows(self, count: int, context: int, steps: int = 1) -> tuple[DecodeRow, ...]:
        """Return requests with this much context and room for more tokens."""
        for slot in range(count):
            self.take(slot, context + ROOM, context)
        if self.spec.moe is not None:
            self.draw_tokens(count, context - 2)
        return tuple(DecodeRow(slot, context - 1, steps) for slot in range(count))

    def holds(self, rows: int, context: int, prompt: int = 0) -> bool:
        """Return whether so many decode rows and a prompt have slots and pages at a time."""
        pages = rows * -(-(context + ROOM) // PAGE) + -(-prompt // PAGE)
        return rows < self.slots and pages <= self.pages

    def draw_tokens(self, count: int, position: int) -> None:
        """Sample the last token of each slot from a random one: equal tokens wake equal experts."""
        rows = tuple(PromptRow(slot, position, 1, samples=True) for slot in range(count))
        chunks, layers = tuple(map(self.chunk, rows)), self.spec.layers
        work = PrefillWork(0, rows, 0, layers, finishes=True, chunks=chunks)
        finished(self.launch("prefill", self.machine.partitions.units, work))

    def prompt(self, new: int, reused: int = 0, slot: int | None = None) -> PromptRow:
        slot = self.slots - 1 if slot is None else slot
        self.take(slot, reused + new, reused + new)
        return PromptRow(slot, reused, new, samples=True)

    def chunk(self, row: PromptRow) -> PromptChunk:
        """Return a chunk of random tokens, different for each slot."""
        tokens = np.random.default_rng(row.slot).integers(3, self.spec.vocab_size, row.count)
        return PromptChunk(tokens.tobytes())

    def prefill(self, row: PromptRow) -> PrefillWork:
        chunks = (self.chunk(row),)
        return PrefillWork(0, (row,), 0, self.spec.layers, finishes=True, chunks=chunks)

    def give_back(self, rows: Sequence[DecodeRow | PromptRow]) -> None:
        for row in rows:
            self.free += self.held.pop(row.slot)


def finished(ticket: Ticket, seconds: float = 60.0) -> Ticket:
    end = time.monotonic() + seconds
    while not ticket.done:
        if time.monotonic() > end:
            raise TimeoutError("a launch does not end")
        time.sleep(0.0002)
    ticket.check()
    return ticket


def repeat(times: int, run: Callable[[], Ticket]) -> float:
    """Return the median seconds of a launch, each queued after another; the first two are not
    counted."""
    tickets = [run()]
    for _ in range(times + 2):
        tickets.append(run())
        finished(tickets[-2])
    finished(tickets[-1])
    return statistics.median([ticket.seconds for ticket in tickets[2:]])


def decode_seconds(rig: Rig, rows: Sequence[DecodeRow], units: int, k: int = 4) -> float:
    """Return the seconds of one of k steps in a launch."""
    work = DecodeWork(tuple(replaced(row, k) for row in rows), k)
    return repeat(5, lambda: rig.launch("decode", units, work)) / k


def replaced(row: DecodeRow, steps: int) -> DecodeRow:
    return DecodeRow(row.slot, row.position, steps)


def step_bytes(rig: Rig, rows: int, context: int) -> float:
    """Return bytes that a decode step must read: weights as they are stored, of experts those that
    its rows wake; the head; keys and values within windows; states, which it also writes."""
    machine, spec, weights = rig.machine, rig.machine.decoder.spec, rig.machine.decoder.weights
    awake = 1.0 if spec.moe is None else spec.moe.active(rows) / spec.moe.rule.stored
    moved = weights.head.nbytes + 2.0 * rows * machine.state_bytes
    for operation, matrix in (each for layer in weights.layers for each in layer_matrices(layer)):
        moved += matrix.nbytes * (awake if operation == "experts" else 1.0)
    for layer, at in enumerate(spec.each):
        seen = 0 if spec.is_linear(layer) else min(context, spec.window(layer) or context)
        moved += rows * seen * 2 * at.kv_size * machine.kv_itemsize
    return moved


def prompt_flops(rig: Rig, tokens: int) -> float:
    """Return the FLOPs of a prompt: products, attention within windows, and the delta rule."""
    spec, weights = rig.machine.decoder.spec, rig.machine.decoder.weights
    chosen = 1.0 if spec.moe is None else spec.moe.rule.entries / spec.moe.rule.stored
    flops = 0.0
    for operation, matrix in (each for layer in weights.layers for each in layer_matrices(layer)):
        share = chosen if operation == "experts" else 1.0
        flops += 2.0 * tokens * math.prod(matrix.shape) * share
    for layer, at in enumerate(spec.each):
        if spec.is_linear(layer):
            flops += 0.0 if spec.delta is None else tokens * spec.delta.prompt_flops
        else:
            seen = min(spec.window(layer) or tokens, tokens)
            flops += 4.0 * at.q_size * (tokens * seen - seen * (seen - 1) / 2)
    return flops


def decode_attention_of(rig: Rig, rows: Sequence[DecodeRow], units: int) -> Callable[[], None]:
    """Return all layers' decode attention of these rows, on the current stream."""
    spec, runner = rig.spec, rig.lanes.runner
    slots = torch.arange(len(rows), dtype=torch.int32, device="cuda")
    lengths = torch.full_like(slots, rows[0].position + 1)
    shape = (len(rows), spec.heads, spec.head_dim)
    q = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    out, tables, scratch = torch.empty_like(q), runner.slots.tables[0], runner.steps.scratch

    def run() -> None:
        for pool in runner.kv.layers:
            decode_attention(q, pool, tables, slots, lengths, out, scratch, units=units)

    return run


@dataclass
class Both:
    """Result of keeping both lanes busy."""

    tokens_s: float
    gaps: list[float]
    decode_idle: float
    prefill_idle: float
    launch_seconds: list[float]


def both_lanes(
    rig: Rig, level: tuple[int, int], rows: Sequence[DecodeRow], row: PromptRow,
    slice_layers: int, seconds: float,
) -> Both:  # fmt: skip
    """Queue steps and slices so that neither lane ever waits for the host."""
    layers, ahead = rig.spec.layers, 2
    decode, slices = [], []
    at, chunks = 0, (rig.chunk(row),)
    work = DecodeWork(tuple(rows), 1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        idle = True
        if sum(not t.done for t in decode[-ahead - 1 :]) < ahead:
            decode.append(rig.launch("decode", level[1], work))
            idle = False
        if sum(not t.done for t in slices[-ahead - 1 :]) < ahead:
            last = min(at + slice_layers, layers)
            opens = () if at else chunks
            part = PrefillWork(0, (row,), at, last, finishes=last == layers, chunks=opens)
            slices.append(rig.launch("prefill", level[0], part))
            at = last % layers
            idle = False
        if idle:
            time.sleep(0.0001)
    for ticket in (decode[-1], slices[-1]):
        finished(ticket)
    skip = 0.15
    decode, slices = decode[int(skip * len(decode)) :], slices[int(skip * len(slices)) :]
    per_prompt = -(-layers // slice_layers)
    span = slices[-1].end - slices[0].end
    tokens = row.count * (len(slices) - 1) / per_prompt
    gaps = [b.end - a.end for a, b in itertools.pairwise(decode)]
    launching = [ticket.host_seconds for ticket in decode]
    return Both(tokens / span, gaps, idle_share(decode), idle_share(slices), launching)


def idle_share(tickets: Sequence[Ticket]) -> float:
    """Return the share of the time between the first start and the last end that nothing ran."""
    busy = sum(t.seconds for t in tickets)
    return max(0.0, 1 - busy / (tickets[-1].end - tickets[0].start))


POOL_TOKENS = 262_144
"""Tokens of the KV pool: 64 requests of 2K and a prompt of 8K have room."""
SLOTS = 80
"""Most concurrent requests."""
SHARE = 48
"""SMs of the decode lane beside prefill."""


class RankedRig(Rig):
    """A model on several GPUs with its lanes, driven without the engine.

    Args:
        name: of the model.
        ranks: number of GPUs.
        all_reduce: how decode steps sum.
        alone: whether this process has one rank's part, and sums nothing.
        quantization: see `DeviceSettings`.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        all_reduce: str,
        *,
        alone: bool = False,
        quantization: str | None = None,
    ) -> None:
        self.name, self.slots, self.pages = name, SLOTS, POOL_TOKENS // PAGE
        settings = DeviceSettings(
            model=name,
            load_format="dummy",
            device="cuda",
            levels=(SHARE,),
            tensor_parallel_size=ranks,
            all_reduce=all_reduce,
            quantization=quantization,
        )
        progress = StartProgress()
        if alone or ranks == 1:
            self.machine = CudaMachine(*load_rank(settings, 0, progress))
            if ranks > 1:
                self.machine.channels = dict.fromkeys(CHANNELS, NullChannel(0, ranks))
        else:
            self.machine = RankedCudaMachine(settings, progress)
        self.load_seconds = progress.seconds
        print(f"room for {self.machine.kv_bytes(40_960) / 2**30:.1f} GiB of KV", flush=True)
        sizes = LaneSizes(self.pages, PAGE, self.slots, 40_960)
        self.lanes = self.machine.start(sizes, lambda: None, progress)
        self.lanes.fill_kv()
        self.held, self.untold, self.free = {}, PendingSlotUpdates(), list(range(self.pages))
        self.start_seconds = progress.seconds
        garbage.freeze()  # as the engine does


def pass_seconds(rig: Rig, rows: Sequence[DecodeRow], new: int, reused: int = 0) -> float:
    """Return the seconds of a pass of decode rows and of a prompt, on the whole device."""
    row, units = rig.prompt(new, reused), rig.machine.partitions.units
    work = HybridWork(tuple(rows), (row,), (rig.chunk(row),))
    took = repeat(7, lambda: rig.launch("device", units, work))
    rig.give_back([row])
    return took


def prompt_seconds(
    rig: Rig, new: int, units: int | None = None, reused: int = 0, times: int = 3
) -> float:
    """Return the seconds of a prompt's prefill by itself; by default on the whole device."""
    row, units = rig.prompt(new, reused), units or rig.machine.partitions.units
    took = repeat(times, lambda: rig.launch("prefill", units, rig.prefill(row)))
    rig.give_back([row])
    return took


def prompt_rates(rig: Rig, new: int) -> dict[int, float]:
    """Return the tokens per second of a prompt on each share of the SMs that prefill has."""
    parts = rig.machine.partitions
    shares = dict.fromkeys([*(p for p, _ in parts.levels), parts.units])
    return {units: new / prompt_seconds(rig, new, units) for units in shares}


def quantiles(values: Sequence[float] | np.ndarray) -> dict[int, float]:
    """Return percentiles of seconds, in milliseconds."""
    return {q: float(np.percentile(values, q)) * 1e3 for q in (50, 90, 99, 100)}
