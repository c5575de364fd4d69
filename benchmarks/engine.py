"""Figures of the GPU lanes: `python benchmarks/engine.py [--out results/engine-h200.json]`.

On one GPU that does nothing else, with dummy weights (random, never zeros) in the true shapes and
a KV pool of random numbers. Times are the lanes' own: from the event before a launch to the event
behind it. Values are medians; every ratio is of two things measured in this run. `--only` names
parts; what a part needs is measured with it.
"""

import argparse
import gc
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from kernels.common import seconds
from measured import Figure, at_least, at_most, show

from twolane.kernels.decode_attention.dispatch import decode_attention
from twolane.kernels.prefill_attention.dispatch import (
    PrefillPlan,
    PrefillWorkspace,
    prefill_attention,
)
from twolane.lanes.base import Ticket
from twolane.lanes.cuda.machine import CudaMachine
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
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights
from twolane.results.provenance import provenance, save
from twolane.sampling import SamplingParams

PAGE = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@dataclass
class Rig:
    """A model on the GPU with its lanes, driven without the engine."""

    name: str
    decode_units: Sequence[int] | None = None
    slots: int = 256
    pages: int = 0
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
        source = resolve(self.name, "dummy")
        options = {"quantization": self.quantization, "router_skew": self.router_skew}
        spec, weights = load_weights(source, load_format="dummy", device="cuda", **options)
        self.machine = CudaMachine(
            spec,
            weights,
            self.decode_units,
            kv_cache_dtype=self.kv_cache_dtype,
            adapter_slots=self.adapter_slots,
            max_lora_rank=16,
        )
        if not self.pages:
            self.pages = self.machine.kv_bytes(40_960) // (PAGE * self.machine.page_token_bytes)
        sizes = LaneSizes(self.pages, PAGE, self.slots, 40_960)
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
        """Return requests with this much context and room for many more tokens."""
        for slot in range(count):
            self.take(slot, context + 512, context)
        if self.spec.moe is not None:
            self.draw_tokens(count, context - 2)
        return tuple(DecodeRow(slot, context - 1, steps) for slot in range(count))

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
    """Return the median seconds of a launch, each queued behind another; the first two are not
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


def copy_bandwidth() -> float:
    """Return bytes a second, read and written, of a large copy on the whole device."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    seconds = timed(lambda: y.copy_(x), 12)
    return 2 * x.nbytes / seconds


def timed(run: Callable[[], object], times: int = 7) -> float:
    """Return the median seconds on the current stream."""
    samples = []
    for _ in range(times + 2):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        run()
        b.record()
        b.synchronize()
        samples.append(a.elapsed_time(b) * 1e-3)
    return statistics.median(samples[2:])


def gemms(rig: Rig, tokens: int) -> tuple[Callable[[], object], float]:
    """Return the matrix products of a pass with this many tokens, without the head, and their
    FLOPs."""
    spec, weights = rig.spec, rig.machine.decoder.weights

    def wide(width: int) -> torch.Tensor:
        return torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

    x, a, m = wide(spec.hidden_size), wide(spec.q_size), wide(spec.intermediate_size)
    qkv = wide(spec.q_size + 2 * spec.kv_size)
    gate_up, out = wide(2 * spec.intermediate_size), wide(spec.hidden_size)

    def run() -> None:
        for w in weights.layers:
            torch.mm(x, w.qkv.values.t(), out=qkv)
            torch.mm(a, w.o.values.t(), out=out)
            torch.mm(x, w.mlp.gate_up.values.t(), out=gate_up)
            torch.mm(m, w.mlp.down.values.t(), out=out)

    first = weights.layers[0]
    matrices = first.qkv, first.o, first.mlp.gate_up, first.mlp.down
    per_layer = sum(math.prod(matrix.shape) for matrix in matrices)
    return run, 2.0 * tokens * per_layer * spec.layers


def attention_flops(spec, new: int, reused: int) -> float:
    visible = new * reused + new * (new + 1) / 2
    return 4.0 * spec.layers * spec.heads * spec.head_dim * visible


# --- figures -----------------------------------------------------------------------------------


def solo(rig: Rig, details: dict) -> list[Figure]:
    """Decode steps on every level and prefill on every level, one phase at a time."""
    spec, whole = rig.spec, rig.machine.partitions.units
    bandwidth = copy_bandwidth()
    rows = rig.decode_rows(64, 2048)
    kv_bytes = 64 * 2048 * spec.kv_bytes_per_token(2)
    weight_bytes = 2 * (spec.parameters - spec.vocab_size * spec.hidden_size)
    steps = {u: decode_seconds(rig, rows, u) for u in rig.machine.partitions.decode_units}
    details |= {
        "copy_tb_s": bandwidth / 1e12,
        "decode_step_ms_64x2048": {u: s * 1e3 for u, s in steps.items()},
        "decode_tb_s_64x2048": {u: (kv_bytes + weight_bytes) / s / 1e12 for u, s in steps.items()},
    }
    ideal = (kv_bytes + weight_bytes) / bandwidth
    figures = [at_most("decode step over bytes / copy bandwidth", steps[whole] / ideal, 1.15)]
    narrow = min(steps, key=lambda u: abs(u - 32))
    figures.append(
        at_most(f"decode step on {narrow} SMs over all", steps[narrow] / steps[whole], 1.5)
    )
    rig.give_back(rows)
    row = rig.prompt(8192)
    prefills = {}
    for units in [*(p for p, _ in rig.machine.partitions.levels), whole]:
        prefills[units] = repeat(3, lambda u=units: rig.launch("prefill", u, rig.prefill(row)))
    details["prefill_tokens_s_8192"] = {u: 8192 / s for u, s in prefills.items()}
    bare, flops = gemms(rig, 8192)
    bare_rate = flops / timed(bare, 3)
    rate = (flops + attention_flops(spec, 8192, 0)) / prefills[whole]
    details |= {"bare_gemm_tflops": bare_rate / 1e12, "prefill_tflops": rate / 1e12}
    figures.append(at_least("prefill FLOP/s over bare GEMMs", rate / bare_rate, 0.88))
    figures.append(at_least("prefill of 8192", 8192 / prefills[whole], 38_000, "tokens/s"))
    rig.give_back([row])
    return figures


def hybrid(rig: Rig, details: dict) -> list[Figure]:
    """64 decodes at 2K and 1,024 new tokens on 4K reused, in one pass."""
    whole = rig.machine.partitions.units
    rows, row = rig.decode_rows(64, 2048), rig.prompt(1024, 4096)
    work = HybridWork(rows, (row,), (rig.chunk(row),))
    seconds = repeat(7, lambda: rig.launch("device", whole, work))
    bare, _ = gemms(rig, 1088)
    parts = {"gemms": timed(bare, 7), **attention_alone(rig, rows, row)}
    details["hybrid_ms"] = {"pass": seconds * 1e3, **{k: v * 1e3 for k, v in parts.items()}}
    rig.give_back([*rows, row])
    return [
        at_most("hybrid pass over its GEMMs and attentions", seconds / sum(parts.values()), 1.05)
    ]


def decode_attention_of(rig: Rig, rows: Sequence[DecodeRow], units: int) -> Callable[[], None]:
    """Return all layers' decode attention of these rows, on the current stream."""
    spec, runner = rig.spec, rig.lanes.runner
    slots = torch.arange(len(rows), dtype=torch.int32, device="cuda")
    lengths = torch.full_like(slots, rows[0].position + 1)
    shape = (len(rows), spec.heads, spec.head_dim)
    q = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    out, tables, scratch = torch.empty_like(q), runner.slots.tables, runner.steps.scratch

    def run() -> None:
        for pool in runner.kv.layers:
            decode_attention(q, pool, tables, slots, lengths, out, scratch, units=units)

    return run


def attention_alone(rig: Rig, rows: Sequence[DecodeRow], row: PromptRow) -> dict[str, float]:
    """Return seconds of all layers' decode attention and prefill attention, each alone."""
    spec, runner, whole = rig.spec, rig.lanes.runner, rig.machine.partitions.units
    shape = (spec.heads, spec.head_dim)
    new = row.count
    p = torch.randn(new, *shape, device="cuda", dtype=torch.bfloat16)
    p_out = torch.empty_like(p)
    plan = PrefillPlan.build(
        [(row.start, new)], [rig.held[row.slot]],
        page_size=PAGE, heads=spec.heads, kv_heads=spec.kv_heads,
        dim=spec.head_dim, dtype=p.dtype, units=whole, workspace=PrefillWorkspace("cuda"),
    )  # fmt: skip

    def prompts() -> None:
        for pool in runner.kv.layers:
            prefill_attention(plan, p, pool, p_out)

    decode = decode_attention_of(rig, rows, whole)
    return {"decode attention": timed(decode), "prefill attention": timed(prompts)}


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


def side_by_side(
    rig: Rig, details: dict, running: int, tokens_bar: float, gap_bar: float
) -> list[Figure]:
    """48 SMs decode, the others prefill prompts of 8,192 tokens."""
    level = min(rig.machine.partitions.levels, key=lambda pd: abs(pd[1] - 48))
    rows, row = rig.decode_rows(running, 2048), rig.prompt(8192)
    both_lanes(rig, level, rows, row, 4, 1.0)
    both = both_lanes(rig, level, rows, row, 4, 6.0)
    gaps = np.array(both.gaps) * 1e3
    details[f"both_lanes_{level[0]}_{level[1]}"] = {
        "tokens_s": both.tokens_s,
        "tbt_ms": {q: float(np.percentile(gaps, q)) for q in (50, 90, 99, 100)},
        "decode_idle": both.decode_idle,
        "prefill_idle": both.prefill_idle,
        "launch_ms": float(np.median(both.launch_seconds) * 1e3),
    }
    rig.give_back([*rows, row])
    name = rig.name
    return [
        at_least(f"{name}: prefill beside decode", both.tokens_s, tokens_bar, "tokens/s"),
        at_most(f"{name}: P99 TBT beside prefill", float(np.percentile(gaps, 99)), gap_bar, "ms"),
        at_most(f"{name}: decode lane idle", both.decode_idle, 0.02),
        at_most(f"{name}: prefill lane idle", both.prefill_idle, 0.04),
    ]


def switches(rig: Rig, details: dict) -> list[Figure]:
    """Device time between two decode steps on different levels."""
    levels = [d for _, d in rig.machine.partitions.levels[1:3]]
    rows = rig.decode_rows(16, 512)
    work = DecodeWork(rows, 1)
    tickets = [rig.launch("decode", levels[i % 2], work) for i in range(60)]
    finished(tickets[-1])
    gaps = [b.start - a.end for a, b in itertools.pairwise(tickets)]
    same = [rig.launch("decode", levels[0], work) for i in range(60)]
    finished(same[-1])
    stays = [b.start - a.end for a, b in itertools.pairwise(same)]
    rig.give_back(rows)
    details["switch_us"] = {
        "switch": statistics.median(gaps) * 1e6, "same level": statistics.median(stays) * 1e6,
    }  # fmt: skip
    return [at_most("level switch", statistics.median(gaps) * 1e6, 50, "us")]


def host(rig: Rig, details: dict) -> list[Figure]:
    """Return the time of the host to launch a decode step."""
    figures = []
    for count, bar in ((64, 0.4), (256, 1.2)):
        rows = rig.decode_rows(count, 256)
        work = DecodeWork(rows, 1)
        samples = []
        for _ in range(40):
            ticket = rig.launch("decode", rig.machine.partitions.units, work)
            rig.lanes.synchronize()  # asleep: who polls takes Python's lock from who launches
            samples.append(finished(ticket).host_seconds)
        figures.append(
            at_most(f"launching a step of {count}", statistics.median(samples) * 1e3, bar, "ms")
        )
        rig.give_back(rows)
    return figures


def memory(rig: Rig, details: dict) -> list[Figure]:
    runner = rig.lanes.runner
    kinds = {"decode graphs": runner.steps.levels, "prefill graphs": runner.passes.levels}
    for kind, levels in kinds.items():
        details[kind] = {
            u: {"mib": g.bytes / 2**20, "seconds": g.seconds} for u, g in levels.items()
        }
    graphs = [g for levels in kinds.values() for g in levels.values()]
    return [
        at_most("graphs of all levels", sum(g.bytes for g in graphs) / 1e9, 2.0, "GB"),
        at_most("capture", sum(g.seconds for g in graphs), 60, "s"),
    ]


def big(rig: Rig, details: dict) -> list[Figure]:
    """34B: the solo figures."""
    whole = rig.machine.partitions.units
    rows = rig.decode_rows(32, 2048)
    step = decode_seconds(rig, rows, whole)
    rig.give_back(rows)
    row = rig.prompt(8192)
    seconds = repeat(3, lambda: rig.launch("prefill", whole, rig.prefill(row)))
    rig.give_back([row])
    return [
        at_most("34B: decode step of 32 at 2K", step * 1e3, 20.2, "ms"),
        at_least("34B: prefill of 8192", 8192 / seconds, 8300, "tokens/s"),
    ]


@dataclass(frozen=True)
class _Pace:
    """Times of the parts of a forward pass on one rig."""

    steps: dict[int, float]
    """Seconds of a decode step of 64 at 2,048 tokens, by SMs."""
    reads: dict[int, float]
    """Bytes per second that decode attention reads, by SMs."""
    prefill: float
    """Seconds of a prompt of 8,192 tokens."""
    reused: float
    """Seconds of 4,096 tokens behind 8,192 that are reused."""


def _pace(rig: Rig) -> _Pace:
    rows, units = rig.decode_rows(64, 2048), rig.machine.partitions.decode_units
    steps = {u: decode_seconds(rig, rows, u) for u in units}
    moved = 64 * 2048 * rig.machine.page_token_bytes
    reads = {}
    for u in units:
        stream = rig.machine.partitions.capture_stream("decode", u)
        reads[u] = moved / seconds([decode_attention_of(rig, rows, u)], stream)
    rig.give_back(rows)
    times, whole = [], rig.machine.partitions.units
    for new, reused in ((8192, 0), (4096, 8192)):
        row = rig.prompt(new, reused)
        times.append(repeat(3, lambda row=row: rig.launch("prefill", whole, rig.prefill(row))))
        rig.give_back([row])
    return _Pace(steps, reads, *times)


def narrow(plain: Rig, details: dict) -> list[Figure]:
    """Compare FP8 weights and KV cache with bfloat16 on one GPU."""
    wide = _pace(plain)
    plain.close()
    rig = Rig(plain.name, (24, 32), pages=6400, quantization="fp8", kv_cache_dtype="fp8")
    thin = _pace(rig)
    rig.close()
    details |= {"bfloat16": asdict(wide), "fp8": asdict(thin)}
    whole = max(wide.steps)
    return [
        at_most("FP8: decode step over bfloat16's", thin.steps[whole] / wide.steps[whole], 0.62),
        at_most("FP8: the same on 32 SMs", thin.steps[32] / wide.steps[32], 0.65),
        at_least("FP8: prefill of 8192 over bfloat16's", wide.prefill / thin.prefill, 1.4),
        at_least("FP8: decode attention on 24 SMs", thin.reads[24] / 1e12, 2.1, "TB/s"),
    ]


def four_bits(plain: Rig, details: dict) -> list[Figure]:
    """Compare 4-bit weights with the other rig's on one GPU, both with KV in bfloat16."""
    wide, form = _pace(plain), plain.quantization or "bfloat16"
    plain.close()
    rig = Rig(plain.name, plain.decode_units, pages=plain.pages, quantization="int4")
    thin = _pace(rig)
    rig.close()
    details |= {form: asdict(wide), "int4": asdict(thin)}
    whole = max(wide.steps)
    return [
        at_most(f"int4: decode step over {form}'s", thin.steps[whole] / wide.steps[whole], 0.62),
        at_most("int4: the same on 32 SMs", thin.steps[32] / wide.steps[32], 0.9),
        at_least(f"int4: prefill of 8192 over {form}'s", wide.prefill / thin.prefill, 0.9),
    ]


def _rig(part: str, model: str) -> Rig:
    """Return the rig of a part."""
    if part == "fp8":
        return Rig(model, (24, 32), pages=6400)
    if part != "int4":
        return Rig(model)
    large = torch.cuda.get_device_properties(0).total_memory > 110e9
    return Rig(model, (32,), pages=5600, quantization=None if large else "fp8")


Part = Callable[[Rig, dict], list[Figure]]
PARTS: dict[str, tuple[str, dict[str, Part]]] = {
    "qwen3": (
        "qwen3-8b",
        {"memory": memory, "solo": solo, "hybrid": hybrid, "switches": switches, "host": host},
    ),
    "fp8": ("qwen3-8b", {"narrow": narrow}),
    "int4": ("codellama-34b", {"four_bits": four_bits}),
    "llama": (
        "llama-3.1-8b",
        {"both": lambda rig, details: side_by_side(rig, details, 64, 23_000, 16)},
    ),
    "codellama": (
        "codellama-34b",
        {"big": big, "both": lambda rig, details: side_by_side(rig, details, 32, 4900, 34)},
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", help="models, or model.part")
    args = parser.parse_args()
    figures, details = [], {}
    for key, (model, parts) in PARTS.items():
        chosen = {n: p for n, p in parts.items() if wanted(args.only, key, n)}
        if not chosen:
            continue
        rig = _rig(key, model)
        found = {"start_seconds": rig.start_seconds, "kv_tokens": rig.pages * PAGE}
        details[f"{model} {key}" if key in ("fp8", "int4") else model] = found
        for name, part in chosen.items():
            begun = time.monotonic()
            try:
                new = part(rig, found)
            except Exception as error:
                new = [Figure(f"{key}.{name}: {error!r}"[:300], float("nan"), "runs", False)]
            figures += new
            show(new)
            print(f"     [{key}.{name} {time.monotonic() - begun:.1f} s]", flush=True)
        print(json.dumps(found, default=float), flush=True)
        rig.close()
    if args.out:
        about = provenance(args.only or list(PARTS))
        details = json.loads(json.dumps(details, default=float))  # NumPy's numbers
        save(args.out, about, {"figures": figures, "details": details})
    return 0 if all(f.holds for f in figures) else 1


def wanted(only: Sequence[str] | None, model: str, part: str) -> bool:
    return not only or model in only or f"{model}.{part}" in only


if __name__ == "__main__":
    sys.exit(main())
