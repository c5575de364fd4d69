"""A model with experts on one GPU: `python benchmarks/experts.py [--router-skew S]
[--profile SECONDS] [--then-skew S] [--out FILE]`.

With dummy weights in the true shapes: decode steps beside the bytes that they must read, prefill,
and the cliff: what a decode step of few rows takes when prompt tokens join its pass and wake every
expert. With `--profile`, what an estimator that was fitted on a profile of the same lanes says of
the same passes. With `--then-skew`, steps and passes once more behind routers that are skewed in
place, into FILE-skewed.json. See `engine.py`, whose rig this takes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from breakdown import by_parts
from engine import PAGE, DecodeWork, HybridWork, Rig, decode_seconds, finished, repeat, timed
from measured import Figure, at_least, at_most, show
from ranks import RankedRig

import twolane.profile.rig as profiling
from twolane.engine.predict import machine_key
from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.profile import Profile
from twolane.estimate.query import LaunchShape, Load, decode_step, hybrid_pass
from twolane.lanes.settings import LaneSizes
from twolane.model.load.dummy import router_scales
from twolane.model.spec import skewed
from twolane.profile.clocks import Clocks
from twolane.profile.grid import plan
from twolane.profile.run import empty_profile, work_through
from twolane.results.provenance import provenance, save

MODEL = "qwen3-30b-a3b"
MAX_MS = {"qwen3-235b-a22b": {8: 8.0, 64: 17.6}}
"""Bars of steps by rows, in FP8 on four H200s."""
CONTEXT = 2048
ROWS = (1, 8, 16, 32, 64)
CLIFF_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (256, 512, 1024)
COUNTED = 40
"""Steps of each size whose experts an estimator sees counted with `--again`."""


@dataclass(frozen=True)
class Asked:
    """A pass of decode rows, alone or with tokens of one prompt, on some SMs."""

    rows: int
    new: int
    units: int

    def __str__(self) -> str:
        return f"{self.rows}+{self.new} on {self.units}"

    @classmethod
    def parse(cls, text: str) -> "Asked":
        """Parse the text that `str` returns."""
        return cls(*(int(part) for part in text.replace(" on ", "+").split("+")))

    @property
    def launch(self) -> LaunchShape:
        """The launch of an estimator's query."""
        contexts = [CONTEXT - 1] * self.rows
        if not self.new:
            return decode_step(Load.decode(contexts))
        return hybrid_pass(Load([1] * self.rows + [self.new], [*contexts, 0]))


def step_bytes(rig: Rig, rows: int) -> float:
    """Return bytes that a decode step must read: weights of attention and active experts, head,
    KV."""
    moe, weights = rig.spec.moe, rig.machine.decoder.weights
    active = moe.active(rows) / moe.experts
    moved = weights.head.nbytes + rows * CONTEXT * rig.machine.page_token_bytes
    for layer in weights.layers:
        experts = layer.mlp.gate_up.nbytes + layer.mlp.down.nbytes
        moved += layer.qkv.nbytes + layer.o.nbytes + layer.mlp.router.nbytes + active * experts
    return moved


def fitting(rig: Rig, rows: Sequence[int]) -> list[int]:
    """Return the numbers of rows whose contexts and a prompt fit the rig's pages."""
    free = rig.pages - PROMPTS[-1] // PAGE
    most = min(rig.slots - 1, free // -(-(CONTEXT + 512) // PAGE))
    return [count for count in rows if count <= most]


def reading_rate() -> float:
    """Return bytes per second of a kernel that reads."""
    data = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    view = data.view(torch.float32)
    total = torch.empty((), device="cuda")
    return data.nbytes / timed(lambda: torch.sum(view, dim=0, out=total))


def decode(rig: Rig, details: dict, rate: float) -> list[Figure]:
    """Steps by rows and share of the SMs."""
    units, figures = rig.machine.partitions.units, []
    for rows in fitting(rig, ROWS):
        asked = rig.decode_rows(rows, CONTEXT)
        steps = {u: decode_seconds(rig, asked, u) for u in rig.machine.partitions.decode_units}
        rig.give_back(asked)
        floor = step_bytes(rig, rows) / rate
        details[f"step_ms_{rows}"] = {u: s * 1e3 for u, s in steps.items()}
        details[f"floor_ms_{rows}"] = floor * 1e3
        share = floor / steps[units]
        if rows in (bars := MAX_MS.get(rig.name, {})):
            figures.append(at_most(f"step of {rows} rows", steps[units] * 1e3, bars[rows], "ms"))
        elif rig.name != MODEL:
            continue
        elif rows == 1:
            figures.append(at_most("step of 1 row", steps[units] * 1e3, 2.5, "ms"))
        else:
            bar = 0.8 if rows == 64 else 0.7
            figures.append(at_least(f"floor over step of {rows} rows", share, bar))
    return figures


def prefill(rig: Rig, details: dict) -> list[Figure]:
    """Measure prompts of 8,192 tokens."""
    row, units = rig.prompt(8192), rig.machine.partitions.units
    took = {
        share: repeat(3, lambda share=share: rig.launch("prefill", share, rig.prefill(row)))
        for share in [*(p for p, _ in rig.machine.partitions.levels), units]
    }
    rig.give_back([row])
    details["prefill_tokens_s_8192"] = {share: 8192 / s for share, s in took.items()}
    bar = 45_000 if rig.name == MODEL else 40_000
    return [at_least("prefill of 8192", 8192 / took[units], bar, "tokens/s")]


def law(rig: Rig, details: dict) -> list[Figure]:
    """Experts that steps of some rows read in a layer, beside the law that predicts them."""
    units, errors = rig.machine.partitions.units, []
    for rows in fitting(rig, CLIFF_ROWS):
        asked = rig.decode_rows(rows, CONTEXT)
        ticket = finished(rig.launch("decode", units, DecodeWork(asked, 1)))
        rig.give_back(asked)
        read, expected = ticket.steps[0].experts_read, rig.spec.moe.active(rows)
        details[f"experts_{rows}"] = {"read": read, "expected": expected}
        errors.append(abs(read / expected - 1))
    return [at_most("experts read, worst error of the law", max(errors), 0.1)]


def cliff(rig: Rig, details: dict) -> dict[Asked, float]:
    """Return seconds of passes of decode rows, alone and with the tokens of a prompt."""
    units, narrow = rig.machine.partitions.units, min(rig.machine.partitions.decode_units)
    took: dict[Asked, float] = {}
    for rows in fitting(rig, CLIFF_ROWS):
        asked = rig.decode_rows(rows, CONTEXT)
        for share in (units, narrow):
            took[Asked(rows, 0, share)] = decode_seconds(rig, asked, share, 1)
        for new in PROMPTS:
            row = rig.prompt(new)
            work = HybridWork(asked, (row,), (rig.chunk(row),))
            seconds = repeat(5, lambda work=work: rig.launch("device", units, work))
            took[Asked(rows, new, units)] = seconds
            rig.give_back([row])
        rig.give_back(asked)
    details["passes_ms"] = {str(asked): seconds * 1e3 for asked, seconds in took.items()}
    return took


@contextmanager
def skewing(rig: Rig, exponent: float) -> Iterator[None]:
    """Skew the rig's even routers in place, as if loaded with `--router-skew`, for a while."""
    even = rig.spec
    rig.spec = skewed(even, exponent)
    scales = router_scales(rig.spec.moe.shares)[:, None]
    routers = [layer.mlp.router.values for layer in rig.machine.decoder.weights.layers]
    before = [router.clone() for router in routers]
    for router in routers:
        router.copy_(router * scales.to(router.device))
    yield
    for router, values in zip(routers, before, strict=True):
        router.copy_(values)
    rig.spec = even


def profile(rig: Rig, seconds: float, path: Path) -> Profile:
    """Return a profile taken with the rig's lanes.

    It does not know how skewed the routers are: counts of experts that steps read tell.
    """
    machine, spec = rig.machine, rig.spec
    driven = profiling.Rig(
        rig.lanes,
        LaneSizes(rig.pages, PAGE, rig.slots, 40_960),
        layers=spec.layers,
        vocab_size=spec.vocab_size,
        batch_tokens=8192,
        own_tokens=True,
    )
    key = machine_key(machine, driven.lanes.units)
    taken = empty_profile(key, machine, driven, 0)
    taken.shape = skewed(spec, 0.0)
    points = plan(driven.limits, 0)
    gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    with Clocks(gpu) as clocks:
        work_through(taken, path, driven, points, clocks, seconds, lambda *_: None)
    return taken


def predictions(estimator: Calibrated, took: Mapping[Asked, float], details: dict) -> list[Figure]:
    """Return the calibrated estimator's errors on the measured passes."""
    errors = {}
    print("rows + prompt tokens on SMs: measured, predicted, ms", flush=True)
    for asked, seconds in took.items():
        predicted = estimator.predict(asked.launch, asked.units)
        errors[str(asked)] = predicted / seconds - 1
        line = f"  {asked!s:>16}: {seconds * 1e3:7.2f} {predicted * 1e3:7.2f}"
        print(f"{line} {100 * errors[str(asked)]:+.1f} %", flush=True)
    details["predicted_over_measured_less_1"] = errors
    return [
        at_most(f"estimator's worst error, {kind}", max(map(abs, some)), 0.1)
        for kind, some in (
            ("steps", [errors[str(asked)] for asked in took if not asked.new]),
            ("passes with a prompt", [errors[str(asked)] for asked in took if asked.new]),
        )
    ]


def again(measured: Path, taken: Profile, out: Path | None) -> list[Figure]:
    """Predict the passes of a results' file by another profile that has observed the counts of
    experts in its steps, like one in use."""
    there = json.loads(measured.read_text())["details"]
    took = {Asked.parse(name): ms / 1e3 for name, ms in there["passes_ms"].items()}
    estimator, details = Calibrated(taken), {"measured": measured.name}
    counts = {name: count for name, count in there.items() if name.startswith("experts_")}
    for _ in range(COUNTED):
        for name, count in counts.items():
            estimator.observe_experts(int(name.removeprefix("experts_")), count["read"])
    figures = predictions(estimator, took, details)
    if out:
        save(out, provenance([measured.name]), {"figures": figures, "details": details})
    return figures


@dataclass
class Report:
    """Content of a results' file: figures with bounds, and details."""

    about: str
    out: Path | None
    details: dict
    figures: list[Figure] = field(default_factory=list)

    def keep(self, *more: Figure) -> None:
        """Print these figures, and write all figures so far to the file, if there is one."""
        self.figures.extend(more)
        show(more)
        if self.out:
            content = {"figures": self.figures, "details": self.details}
            save(self.out, provenance([self.about]), content)


def passes(rig: Rig, report: Report) -> dict[Asked, float]:
    """Experts that steps read, and the cliff; (pass, its seconds)."""
    report.keep(*law(rig, report.details))
    took = cliff(rig, report.details)
    print(json.dumps(report.details, default=float), flush=True)
    report.keep()
    return took


def started(args: argparse.Namespace) -> Rig:
    """Return the rig of the options."""
    if args.ranks > 1:
        return RankedRig(args.model, args.ranks, "nccl", quantization=args.quantization)
    form = {"quantization": args.quantization, "router_skew": args.router_skew}
    roomy = torch.cuda.mem_get_info()[1] > 100e9
    return Rig(args.model, (24, 32, 48), pages=12_000 if roomy else 1_500, **form)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--router-skew", type=float, default=0.0, help="see `twolane serve`")
    parser.add_argument("--quantization", choices=("fp8",), help="see `twolane serve`")
    parser.add_argument("--profile", type=float, default=0.0, help="seconds, and predict by it")
    parser.add_argument("--then-skew", type=float, default=0.0, help="and once more, skewed so")
    parser.add_argument("--parts", action="store_true", help="and one row's time, by breakdown.py")
    parser.add_argument("--again", type=Path, help="results whose passes are predicted, no GPU")
    parser.add_argument("--by", type=Path, help="the profile that predicts them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.again:
        show(again(args.again, Profile.read(args.by), args.out))
        return 0
    if args.then_skew and args.ranks > 1:
        parser.error("--then-skew is for one GPU: other ranks keep their routers")
    rate, rig = reading_rate(), started(args)
    begun = {"start_seconds": rig.start_seconds, "reading_tb_s": rate / 1e12}
    form = f"{args.model} {args.quantization or 'bf16'}, {args.ranks} GPUs"
    report = Report(f"{form}, skew {args.router_skew}", args.out, dict(begun))
    report.keep(*decode(rig, report.details, rate))
    report.keep(*prefill(rig, report.details))
    took = passes(rig, report)
    reports = [report]
    if args.then_skew:
        out = args.out and args.out.with_name(f"{args.out.stem}-skewed.json")
        other = Report(f"{form}, skew {args.then_skew}", out, begun)
        with skewing(rig, args.then_skew):
            other.keep(*decode(rig, other.details, rate))
            passes(rig, other)
        reports.append(other)
    if args.profile and args.ranks == 1:
        path = args.out or Path("experts.json")
        taken = profile(rig, args.profile, path.with_name(f"{path.stem}-profile.json"))
        report.details["profile"] = {"points": len(taken.done()), "seconds": taken.seconds}
        report.keep(*predictions(Calibrated(taken), took, report.details))
    if args.parts:
        report.details["1 row"] = by_parts(rig, 1)
        report.keep()
    rig.close()
    return 0 if all(figure.holds for each in reports for figure in each.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
