"""The fused operations and the sampler on a GPU: right first, then how fast, on 132, 32 and 16 SMs.

    PYTHONPATH=src OUT=. python benchmarks/kernels/fused.py [--tune]

Shapes are Qwen3-8B's. Times are of graph replays; up to 256 rows the data is in the L2 cache, as
after a matrix product. `share` is the bytes moved over time and the same partition's copy.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import Partition, Report, copy_bandwidth, partition, seconds, worst_difference
from torch.nn import functional

from twolane.kernels import fused, sampling
from twolane.lanes.cpu.sampler import SampleRow, sample
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
            "silu_mul": (lambda: fused.silu_mul(self.gate_up, self.inner), 3 * line * INNER),
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
        fused.qkv_rope_write_decode(
            self.qkv, self.positions, self.norm, EPS, self.table, self.q, self.pool, self.tables,
            self.slots, self.lengths,
        )  # fmt: skip


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], None, EPS) * weight.float()


def check_layer(report: Report, layer: Layer, dtype: torch.dtype) -> None:
    """Against float32; the pool by what each token's place holds."""

    def add(what: str, out: torch.Tensor, reference: torch.Tensor) -> None:
        error, where = worst_difference(out.flatten(1), reference.flatten(1))
        good = error < (2e-6 if dtype == torch.float32 else 6e-3)
        row = {"check": what, "rows": layer.rows, "dtype": str(dtype)[6:], "error": error}
        report.add(**row, good=good, **({} if good else {"where": where}))
        report.failures += not good

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
    rows = torch.arange(layer.rows, device="cuda")
    position = layer.positions.long()
    page = layer.tables[layer.slots.long(), position // PAGE].long()
    decode_places = page * PAGE + position % PAGE
    # Where two rows share a place (the pages are few), the check is of one of them.
    unique = torch.zeros(layer.pool.shape[0] * PAGE, dtype=torch.long, device="cuda")
    alone = unique.index_add(0, decode_places, torch.ones_like(rows))[decode_places] == 1
    cases = [("rope", layer.rope, layer.places, rows >= 0),
             ("rope_decode", layer.rope_decode, decode_places, alone)]  # fmt: skip
    for name, call, places, chosen in cases:
        layer.pool.zero_()
        layer.q.zero_()
        call()
        add(f"{name} q", layer.q, rotated[:, :HEADS])
        written = layer.pool[places // PAGE, :, :, places % PAGE]
        add(f"{name} kv", written[chosen], kv[chosen])
    gate, up = layer.gate_up.float().chunk(2, dim=1)
    add("silu_mul", fused.silu_mul(layer.gate_up, layer.inner), functional.silu(gate) * up)
    out = fused.embed(layer.last, layer.slots, layer.lengths, layer.embedding, layer.out)
    add("embed", out, layer.embedding[layer.last[layer.slots.long()]])


KINDS = {
    "greedy": [{"temperature": 0.0}],
    "plain": [{}],
    "top_p": [{"top_p": 0.9}],
    "top_k": [{"top_k": 50, "top_p": 0.95}],
    "mixed": [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 50}, {}],
    "hard": [
        {"top_p": 0.999}, {"temperature": 2.0, "top_p": 0.6}, {"min_p": 0.02}, {"top_k": 3000},
        {"top_k": 20_000, "top_p": 0.5}, {"temperature": 0.2, "top_p": 0.3},
    ],
}  # fmt: skip


def distributions(rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Logits: as of a trained model (a few high above many), broader ones, and ties."""
    noise = torch.randn(rows, VOCAB, device="cuda")
    trained = 1.5 * noise
    likely = torch.randint(VOCAB, (rows, 20), device="cuda")
    trained.scatter_(1, likely, 18.0 - 0.6 * torch.arange(20.0, device="cuda").expand(rows, -1))
    broad = 2.0 * noise
    broad += 9.0 * torch.exp(-torch.arange(VOCAB, device="cuda") / 40)
    flat = 0.05 * noise
    return {
        "trained": trained.to(dtype),
        "broad": broad.to(dtype),
        "normal": noise.to(dtype),
        "flat": flat.to(dtype),
        "ties": (2 * noise).round().to(dtype),
    }


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

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        places = (self.positions + 1).tolist()
        rows = [
            SampleRow(p, r, q) for r, (p, q) in enumerate(zip(self.params, places, strict=True))
        ]
        return sample(logits.float().cpu(), rows)


def check_sampler(report: Report, rows: int = 12) -> None:
    for dtype in TYPES:
        for name, logits in distributions(rows, dtype).items():
            different, slow, total = [], 0, 0
            for kind, kinds in KINDS.items():
                if kind in ("top_p", "top_k", "plain") and name != "trained":
                    continue
                case = Sampling(rows, kinds)
                out, expected = case(logits).cpu(), case.expected(logits)
                again = case(logits).cpu()
                total += rows
                filtered = torch.tensor([p.top_k > 0 or p.top_p < 1 for p in case.params])
                over = (case.sampler._counts.cpu() > case.sampler._candidates) & filtered
                slow += int(over.sum())
                for r in torch.nonzero((out != expected) | (out != again)).flatten().tolist():
                    tokens = [int(out[r]), int(again[r]), int(expected[r])]
                    different.append((kind, r, tokens, str(case.params[r])[:160]))
            report.add(check="sampler", logits=name, dtype=str(dtype)[6:], rows=total,
                       different=len(different), whole_row_searches=slow,
                       first=different[:3])  # fmt: skip


def check_advance(report: Report) -> None:
    rows, k = 300, 3
    numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
    steps = numbers % (k + 1)
    slots = torch.randperm(rows, device="cuda").int()
    step = torch.zeros(1, dtype=torch.int32, device="cuda")
    positions, lengths = numbers + 10, torch.where(steps > 0, numbers + 11, 0).int()
    last = torch.full((rows,), -1, device="cuda")
    ring = torch.full((k, rows), -1, dtype=torch.long).pin_memory()
    for now in range(k):
        fused.advance(numbers.long() + now, slots, steps, step, positions, lengths, last, ring)
    torch.cuda.synchronize()
    now = torch.arange(k, device="cuda")[:, None]
    good = {
        "ring": torch.equal(ring.cuda(), torch.where(now < steps, numbers.long() + now, -1)),
        "positions": torch.equal(positions, numbers + 10 + steps),
        "lengths": not lengths.any(),
        "last": torch.equal(
            last[slots.long()], torch.where(steps > 0, numbers.long() + steps - 1, -1)
        ),
        "step": step.item() == k,
    }
    report.add(check="advance into pinned memory", **good)
    report.failures += not all(good.values())


def time_layer(report: Report, where: Partition, copy: float, rows: int, layer: Layer) -> None:
    result = {}
    for name, (call, size) in layer.calls().items():
        with report.attempt(f"{name}, {rows} rows, {where.units} SMs"):
            took = seconds([call] * (20 if rows <= 256 else 2), where.stream)
            result[name] = f"{took * 1e6:.1f}us/{size / took / copy:.2f}"
    report.add(units=where.units, rows=rows, **result)


def time_sampler(report: Report, where: Partition, copy: float, logits: Any, name: str) -> None:
    for rows, (kind, kinds) in itertools.product((64, 256), KINDS.items()):
        if kind == "hard" or (name != "trained" and kind != "top_p"):
            continue
        with report.attempt(f"sampler, {kind}, {rows} rows, {where.units} SMs"):
            case, part = Sampling(rows, kinds), logits[:rows]
            took = seconds([lambda c=case, p=part: c(p)] * 3, where.stream, repeats=5)
            read = part.numel() * part.element_size()
            report.add(units=where.units, sampler=kind, logits=name, dtype=str(part.dtype)[6:],
                       rows=rows, us=took * 1e6, reads=took * copy / read)  # fmt: skip


@contextmanager
def setting(module: Any, **values: int) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def tune_layer(report: Report, where: Partition) -> None:
    """Programs of other sizes, microseconds at 64 and 8,192 rows."""
    layers = [Layer(64), Layer(8192)]
    settings = {
        "add_rms_norm": [{"_PER_WARP": n} for n in (256, 512, 1024)],
        "silu_mul": [{"_PER_WARP": w, "_ELEMENTS": e} for w in (256, 512, 1024)
                     for e in (1024, 2048, 4096)],
        "qkv_rope_write_decode": [{"_PER_WARP": w, "_HEADS": h} for w in (256, 512, 1024)
                                  for h in (8, 16, 64)],
    }  # fmt: skip
    for name, choices in settings.items():
        result = {}
        for values in choices:
            with report.attempt(f"{name} {values}"), setting(fused, **values):
                took = [
                    seconds([layer.calls()[name][0]] * n, where.stream, repeats=5)
                    for layer, n in zip(layers, (20, 2), strict=True)
                ]
                key = ",".join(str(v) for v in values.values())
                result[key] = f"{took[0] * 1e6:.1f}/{took[1] * 1e6:.0f}"
        report.add(tune=name, units=where.units, **result)


def tune_sampler(report: Report, where: Partition, logits: torch.Tensor) -> None:
    for kind in ("greedy", "top_p"):
        result = {}
        for chunk, warps in ((4096, 4), (8192, 8), (8192, 16)):
            with (
                report.attempt(f"sampler {chunk} {warps}"),
                setting(sampling, _WARPS=warps),
            ):
                case = Sampling(len(logits), KINDS[kind], chunk)
                took = seconds([lambda c=case: c(logits)] * 3, where.stream, repeats=5)
                result[f"{chunk}/{warps}"] = f"{took * 1e6:.0f}"
        report.add(tune=f"sampler {kind}", units=where.units, rows=len(logits), **result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="time programs of other sizes, too")
    tune = parser.parse_args().tune
    torch.manual_seed(0)
    report = Report("kernels-fused")
    for dtype, rows in itertools.product(TYPES, (3, 1000)):
        with report.attempt(f"check {dtype}, {rows} rows"):
            check_layer(report, Layer(rows, dtype), dtype)
    with report.attempt("check advance"):
        check_advance(report)
    with report.attempt("check sampler"):
        check_sampler(report)
    places = [partition(units) for units in UNITS]
    copies = [copy_bandwidth(place.stream) for place in places]
    logits = distributions(256, torch.float32)
    for place, copy in zip(places, copies, strict=True):
        report.add(units=place.units, copy=copy)
        time_sampler(report, place, copy, logits["trained"], "trained")
        for name in ("broad", "normal"):
            time_sampler(report, place, copy, logits[name], name)
    for rows in (1, 64, 256, 8192):
        layer = Layer(rows)
        for place, copy in zip(places, copies, strict=True):
            time_layer(report, place, copy, rows, layer)
    if tune:
        for place in places[:2]:
            tune_layer(report, place)
            tune_sampler(report, place, logits["broad"][:64].contiguous())
    report.write()


if __name__ == "__main__":
    main()
