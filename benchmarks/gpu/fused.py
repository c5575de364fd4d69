"""The fused operations and the sampler: right first, then how fast, on 132, 32 and 16 SMs.

Shapes are Qwen3-8B's. Times are of graph replays; up to 256 rows the data is in the L2 cache, as
after a matrix product. A share is the bytes moved over time and the same partition's copy. The
sampler's choices are checked by `tests/kernels/test_sampling.py`, on a GPU where there is one.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from harness import Partition, Report, copy_rate, partition, seconds
from torch.nn import functional

from twolane.kernels import fused, sampling
from twolane.sampling import SamplingParams

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, PAGE = 4096, 32, 8, 128, 12_288, 151_936, 32
COUNT = HEADS + 2 * KV_HEADS
EPS = 1e-6
UNITS = (132, 32, 16)
TYPES = (torch.bfloat16, torch.float32)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device="cuda")).to(dtype)


class Layer:
    """Inputs and outputs of the fused operations for `rows` tokens."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rows, self.size = rows, dtype.itemsize
        self.x, self.residual, self.out = (random(rows, HIDDEN, dtype=dtype) for _ in range(3))
        self.weight = 1 + random(HIDDEN, dtype=dtype, scale=0.2)
        self.qkv = random(rows, COUNT * DIM, dtype=dtype)
        self.norm = 1 + random(HEADS + KV_HEADS, DIM, dtype=dtype, scale=0.2)
        frequencies = 1e6 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
        self.table = fused.rotary_table(frequencies, 1.0, 40_960)
        self.q = random(rows, HEADS, DIM, dtype=dtype)
        pages = max(rows // 8, 64)
        self.pool = torch.zeros(pages, KV_HEADS, 2, PAGE, DIM, dtype=dtype, device="cuda")
        self.positions = torch.randint(40_960, (rows,), dtype=torch.int32, device="cuda")
        self.places = torch.randperm(pages * PAGE, device="cuda")[:rows]
        self.slots = torch.randperm(rows, device="cuda").int()
        self.tables = torch.zeros(rows, 40_960 // PAGE, dtype=torch.int32, device="cuda")
        page = torch.randperm(pages, device="cuda")[torch.arange(rows, device="cuda") % pages]
        self.tables[self.slots.long(), self.positions.long() // PAGE] = page.int()
        self.lengths = self.positions + 1
        self.gate_up = random(rows, 2 * INNER, dtype=dtype, scale=3.0)
        self.inner = random(rows, INNER, dtype=dtype)
        self.embedding = random(VOCAB, HIDDEN, dtype=dtype) if rows <= 256 else self.x
        self.last = torch.randint(len(self.embedding), (rows,), device="cuda")

    def calls(self) -> dict[str, tuple[Callable[[], Any], int]]:
        """What to run, and the bytes that it must move."""
        line = self.rows * self.size
        rope = line * 2 * COUNT * DIM + 4 * self.rows * DIM
        return {
            "rms_norm": (
                lambda: fused.rms_norm(self.x, self.weight, EPS, self.out),
                2 * line * HIDDEN,
            ),
            "add_rms_norm": (
                lambda: fused.add_rms_norm(self.x, self.residual, self.weight, EPS, self.out),
                4 * line * HIDDEN,
            ),
            "qkv_rope_write": (self.rope, rope),
            "qkv_rope_write_decode": (self.rope_decode, rope),
            "act_mul": (lambda: fused.act_mul(self.gate_up, self.inner), 3 * line * INNER),
            "embed": (
                lambda: fused.embed(self.last, self.slots, self.lengths, self.embedding, self.out),
                2 * line * HIDDEN,
            ),
        }

    def rope(self) -> None:
        fused.qkv_rope_write(
            self.qkv, self.positions, self.norm, EPS, self.table, self.q, self.pool, self.places
        )

    def rope_decode(self) -> None:
        fused.qkv_rope_write(
            self.qkv, self.positions, self.norm, EPS, self.table, self.q, self.pool, self.tables,
            self.slots, self.lengths,
        )  # fmt: skip


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], None, EPS) * weight.float()


def check_layer(report: Report, layer: Layer, dtype: torch.dtype) -> None:
    """Against float32; the pool by what each token's place holds."""

    def add(what: str, out: torch.Tensor, reference: torch.Tensor) -> None:
        name = f"{what}, {layer.rows} rows, {str(dtype)[6:]}"
        report.check(name, out, reference, 2e-6 if dtype == torch.float32 else 6e-3)

    add("rms_norm", fused.rms_norm(layer.x, layer.weight, EPS, layer.out),
        norm(layer.x, layer.weight))  # fmt: skip
    total = layer.x + layer.residual
    fused.add_rms_norm(layer.x, layer.residual, layer.weight, EPS, layer.out)
    add("residual", layer.residual, total)
    add("add_rms_norm", layer.out, norm(total, layer.weight))
    x = layer.qkv.view(-1, COUNT, DIM).float()
    qk = norm(x[:, : HEADS + KV_HEADS], layer.norm)
    turn = torch.view_as_complex(layer.table[layer.positions.long()])[:, None]
    pairs = torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2)) * turn
    rotated = torch.view_as_real(pairs).flatten(2)
    kv = torch.stack((rotated[:, HEADS:], x[:, HEADS + KV_HEADS :]), dim=2)
    position = layer.positions.long()
    page = layer.tables[layer.slots.long(), position // PAGE].long()
    decode_places = page * PAGE + position % PAGE
    # Where two rows share a place (the pages are few), the check is of one of them.
    alone = torch.bincount(decode_places)[decode_places] == 1
    cases = [("rope", layer.rope, layer.places, torch.ones_like(alone)),
             ("rope_decode", layer.rope_decode, decode_places, alone)]  # fmt: skip
    given = layer.qkv.clone()  # `rope` puts the rotated keys back there
    for name, call, places, chosen in cases:
        layer.pool.zero_()
        layer.q.zero_()
        layer.qkv.copy_(given)
        call()
        add(f"{name} q", layer.q, rotated[:, :HEADS])
        written = layer.pool[places // PAGE, :, :, places % PAGE]
        add(f"{name} kv", written[chosen], kv[chosen])
    gate, up = layer.gate_up.float().chunk(2, dim=1)
    add("act_mul", fused.act_mul(layer.gate_up, layer.inner), functional.silu(gate) * up)
    out = fused.embed(layer.last, layer.slots, layer.lengths, layer.embedding, layer.out)
    add("embed", out, layer.embedding[layer.last[layer.slots.long()]])


KINDS = {
    "greedy": [{"temperature": 0.0}],
    "plain": [{}],
    "top_p": [{"top_p": 0.9}],
    "top_k": [{"top_k": 50, "top_p": 0.95}],
    "mixed": [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 50}, {}],
}


def distributions(rows: int) -> dict[str, torch.Tensor]:
    """Return logits as of a trained model (a few high above many), broader and normal ones."""
    noise = torch.randn(rows, VOCAB, device="cuda")
    trained = 1.5 * noise
    likely = torch.randint(VOCAB, (rows, 20), device="cuda")
    trained.scatter_(1, likely, 18.0 - 0.6 * torch.arange(20.0, device="cuda").expand(rows, -1))
    broad = 2.0 * noise
    broad += 9.0 * torch.exp(-torch.arange(VOCAB, device="cuda") / 40)
    return {"trained": trained, "broad": broad, "normal": noise}


class Sampling:
    """A call of the sampler for `rows` rows of one kind."""

    def __init__(self, rows: int, kinds: list[dict[str, float]], chunk: int = 8192) -> None:
        self.params = [SamplingParams(**kinds[r % len(kinds)]) for r in range(rows)]
        words = [
            sampling.pack_params(
                temperature=0.0 if p.greedy else p.temperature,
                top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, seed=r,
            )
            for r, p in enumerate(self.params)
        ]  # fmt: skip
        self.words = torch.stack([torch.from_numpy(w) for w in words]).cuda()
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.positions = 100 * self.slots + 1
        self.ones = torch.ones_like(self.slots)
        self.out = torch.empty(rows, dtype=torch.int64, device="cuda")
        self.sampler = sampling.Sampler(rows, VOCAB, "cuda", chunk=chunk)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.sampler.sample(
            logits, self.slots, self.positions, self.ones, self.words, self.out
        )


def time_layer(report: Report, where: Partition, copy: float, rows: int, layer: Layer) -> None:
    result = {}
    for name, (call, size) in layer.calls().items():
        with report.attempt(f"{name}, {rows} rows, {where.units} SMs"):
            took = seconds([call] * (20 if rows <= 256 else 2), where.stream)
            result[name] = f"{took * 1e6:.1f}us/{size / took / copy:.2f}"
    report.add(units=where.units, rows=rows, **result)


def time_sampler(report: Report, where: Partition, copy: float, logits: Any, name: str) -> None:
    for rows, (kind, kinds) in itertools.product((64, 256), KINDS.items()):
        if name != "trained" and kind != "top_p":
            continue
        with report.attempt(f"sampler, {kind}, {rows} rows, {where.units} SMs"):
            case, part = Sampling(rows, kinds), logits[:rows]
            took = seconds([lambda c=case, p=part: c(p)] * 3, where.stream, repeats=5)
            read = part.numel() * part.element_size()
            report.add(units=where.units, sampler=kind, logits=name, dtype=str(part.dtype)[6:],
                       rows=rows, us=took * 1e6, reads=took * copy / read)  # fmt: skip


def options(add: Callable[..., Any]) -> None:
    """The case has no options."""


def main(report: Report, given: argparse.Namespace) -> None:
    """Check, then measure."""
    for dtype, rows in itertools.product(TYPES, (3, 1000)):
        with report.attempt(f"check {dtype}, {rows} rows"):
            check_layer(report, Layer(rows, dtype), dtype)
    places = [partition(units) for units in UNITS]
    copies = [copy_rate(place.stream) for place in places]
    logits = distributions(256)
    for place, copy in zip(places, copies, strict=True):
        report.add(units=place.units, copy=copy)
        for name, rows in logits.items():
            time_sampler(report, place, copy, rows, name)
    for rows in (1, 64, 256, 8192):
        layer = Layer(rows)
        for place, copy in zip(places, copies, strict=True):
            time_layer(report, place, copy, rows, layer)
