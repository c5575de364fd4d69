"""Matrix products of a layer, each in the way that was fastest on the SMs of its lane.

Libraries choose a GEMM for the whole device. On a share of it their choice is off by up to a factor
of two, and by another for every shape: one with a block for each of 132 SMs takes two turns on 116.
So products are timed, on the lane's own stream with the model's own weights, before its graphs are
captured. The ways: cuBLAS; cuBLASLt with the number of SMs that are not for it; and, for the few
rows of decode, skinny_gemm.cu on Hopper. For e4m3 both libraries are `torch._scaled_mm`, with that
number or without; for four bits they multiply what `widening` makes of the weights. Those of decode
are timed alone, and the fastest again in whole layers, where what starts before the kernel in front
of it has ended is worth more. What was found is kept on disk.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from twolane.common.files import write_cache
from twolane.kernels import fused
from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.products import skinny_gemm
from twolane.kernels.products.widening import parts, widen
from twolane.kernels.runtime import nvrtc
from twolane.kernels.runtime.timing import graph_seconds
from twolane.kernels.sizes import SIZES

log = logging.getLogger("twolane.kernels")

Operation = Literal["linear", "add_linear", "gate_up", "logits", "experts"]
"""Kind of a product; `kernels.experts` computes those with the matrices of "experts"."""

FP8_SCHEMES = ("fp8_channel",)
"""The schemes whose products take activations in e4m3, with a scale for each row."""
PLAIN_SCHEMES = ("float32", "bf16", "float16")
"""The schemes without scales."""
SERVED_SCHEMES = (*PLAIN_SCHEMES, *FP8_SCHEMES, *skinny_gemm.INT4_GROUPS, "mxfp4_gpu")
"""The schemes of matrices that products are computed with on a GPU."""


class Stored(Protocol):
    """A weight matrix as it is stored; `twolane.model.matrix.Matrix` is one."""

    @property
    def values(self) -> Tensor:
        """The stored values."""

    @property
    def scales(self) -> Tensor | None:
        """The scales of the values, or None for a scheme without scales."""

    @property
    def scheme(self) -> str:
        """Name of the format of values and scales."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix that is meant."""

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales together."""


ROWS = (*skinny_gemm.ROWS, 256)
"""Rows that products of decode are timed for; those of passes are for `SIZES`."""
MARGIN = 1.02
"""A less common way is chosen if it is faster by this factor: noise does not choose."""
LAYER_MARGIN = 1.003
"""`MARGIN` of whole layers, whose times are steadier."""
_REPEATS, _LAYER_REPEATS = 3, 7
APART = 0.02
"""Relative difference of a product to the library's beyond which it is wrong, not only rounded."""
COLD_BYTES = 200 << 20
"""Weights that one timing reads: the L2 cache (60 MB) must not serve them."""
MAX_TIMED = 128
"""Largest number of products in one timing; the weights of a model whose layers are so small come
from the L2 cache when it is served, too."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a product: a library, or a variant of the own kernel and its blocks."""

    library: Literal["cublas", "cublaslt"] = "cublas"
    variant: skinny_gemm.Variant | None = None
    blocks: int = 0

    @property
    def name(self) -> str:
        """Unique name among the ways of the same case and rows."""
        return f"{self.variant.name}/{self.blocks}" if self.variant else self.library


CUBLAS, CUBLASLT = Way(), Way("cublaslt")


class Case(NamedTuple):
    """Products with matrices [n, k] of one scheme, which go one way up to a number of rows."""

    operation: Operation
    n: int
    k: int
    scheme: str

    @classmethod
    def of(cls, operation: Operation, matrix: Stored) -> "Case":
        """Return the case of calls with this matrix."""
        n, k = matrix.shape
        return cls(operation, n, k, matrix.scheme)


@dataclass
class GpuProducts:
    """x @ weight.T (+ bias); weights are [out, in], rows dense.

    The x of a scheme in `FP8_SCHEMES` is `Quantised`. What was not tuned is cuBLAS's.

    Args:
        units: SMs of the lane.
    """

    units: int
    ways: dict[Case, dict[int, Way]] = field(default_factory=dict)
    """Chosen ways by largest number of rows, ascending."""
    _scratch: dict[int, skinny_gemm.Scratch] = field(default_factory=dict)
    """Scratch memory of each stream, since launches on several may overlap."""

    def part(self, rows: slice) -> "GpuProducts":
        """Return the products of these rows of a pass alone, for callers whose rows differ."""
        return self

    def linear(self, x: Activations, weight: Stored, bias: Tensor | None, out: Tensor) -> None:
        """`out` [T, out] = x [T, in] @ weight.T + bias."""
        self._run(self.way("linear", len(x), weight), "linear", x, weight, bias, out)

    def add_linear(self, x: Activations, weight: Stored, bias: Tensor | None, into: Tensor) -> None:
        """`into` [T, out] += x [T, in] @ weight.T + bias."""
        self._run(self.way("add_linear", len(x), weight), "add_linear", x, weight, bias, into)

    def gate_up(
        self,
        x: Activations,
        weight: Stored,
        bias: Tensor | None,
        gate_up: Tensor,
        out: Activations,
        activation: str = "silu",
    ) -> None:
        """`out` [T, inner] = activation(gate) * up of x [T, in] @ weight.T + bias, the gate first.

        Args:
            x: the rows.
            weight: [2 * inner, in].
            bias: [2 * inner] or None.
            gate_up: [T, 2 * inner] that may be overwritten.
            out: the result, as the next product wants it.
            activation: The function of the gate.
        """
        if activation != "silu":
            self.linear(x, weight, bias, gate_up)
            fused.act_mul(gate_up, out, activation)
            return
        # The kernel that does both adds no bias.
        way = CUBLAS if bias is not None else self.way("gate_up", len(x), weight)
        self._gate_up(way, x, weight, bias, gate_up, out)

    def _gate_up(
        self,
        way: Way,
        x: Activations,
        weight: Stored,
        bias: Tensor | None,
        gate_up: Tensor,
        out: Activations,
    ) -> None:
        if way.variant is not None and way.variant.gated:
            if isinstance(out, Tensor):
                self._run(way, "gate_up", x, weight, None, out)
                return
            act = gate_up.flatten()[: gate_up.numel() // 2].view(len(x), -1)
            self._run(way, "gate_up", x, weight, None, act)
            fused.quantise(act, out)
            return
        self._run(way, "gate_up", x, weight, bias, gate_up)
        fused.act_mul(gate_up, out)

    def logits(self, x: Tensor, weight: Stored, out: Tensor) -> None:
        """`out`, float32 [R, vocab] = x @ weight.T, not rounded to x's type on the way."""
        self._run(self.way("logits", len(x), weight), "logits", x, weight, None, out)

    def tune(
        self,
        uses: Mapping[Case, Sequence[Stored]],
        rows: int,
        layers: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        """Choose the ways of what decode will call, on torch's current stream, outside capture.

        What an earlier start found is not timed again. Where the own kernel cannot run, nothing is
        chosen.

        Args:
            uses: the weights of all layers for each case.
            rows: the most that will be asked for.
            layers: gives, for this many rows, what queues some layers' products in their order.
                None: the products do not follow one another.
        """
        asked = [count for i, count in enumerate(ROWS) if i == 0 or ROWS[i - 1] < rows]
        self._tune("steps", _served(uses), asked, self._candidates, layers)

    def tune_passes(self, uses: Mapping[Case, Sequence[Stored]]) -> None:
        """Choose between the libraries for prefill and hybrid passes; see `tune`, whose choices
        stand."""
        uses = _served(uses)
        known = {count for case in uses for count in self.ways.get(case, {})}
        asked = [size for size in SIZES if size not in known]
        self._tune("passes", uses, asked, lambda *_: (CUBLAS, CUBLASLT))

    def _tune(
        self,
        kind: Literal["steps", "passes"],
        uses: Mapping[Case, Sequence[Stored]],
        asked: Sequence[int],
        candidates_of: Callable[[Case, int], Iterable[Way]],
        layers: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        if not uses:
            return
        candidates = {(c, count): list(candidates_of(c, count)) for c in uses for count in asked}
        device = next(iter(uses.values()))[0].values.device
        record = choice_file(kind, tuple(uses), self.units, device)
        known = read_ways(record, candidates)
        missing = [count for count in asked if any((case, count) not in known for case in uses)]
        skinny_gemm.compile_all(
            {way.variant for (_, n), ways in candidates.items() if n in missing
             for way in ways if way.variant}
        )  # fmt: skip
        for count in missing:
            times = {
                case: {
                    way: self._seconds(way, case, count, weights)
                    for way in self._agreeing(candidates[case, count], case, count, weights[0])
                }
                for case, weights in uses.items()
            }
            chosen: Mapping[Case, Way] = {c: choose(seconds) for c, seconds in times.items()}
            if layers is not None:
                chosen = self._by_layer(chosen, times, count, layers(count))
            known |= {(case, count): way for case, way in chosen.items()}
        if missing:
            write_ways(record, known)
        for case in uses:
            found = {**self.ways.get(case, {}), **{count: known[case, count] for count in asked}}
            self.ways[case] = dict(sorted(found.items()))

    def _agreeing(
        self, ways: Sequence[Way], case: Case, rows: int, weight: Stored
    ) -> Sequence[Way]:
        """Return the ways whose products of random rows equal the library's but for rounding.

        Only those of four bits are tried: their kernel is new on GPUs.
        """
        if case.scheme not in skinny_gemm.INT4_GROUPS:
            return ways
        draw = torch.Generator(weight.values.device).manual_seed(rows)
        x = torch.randn(rows, case.k, generator=draw, device=weight.values.device).bfloat16()
        gated = case.operation == "gate_up"

        def product(way: Way) -> Tensor:
            wide = x.new_zeros(rows, case.n)
            if not gated:
                self._run(way, case.operation, x, weight, None, wide)
                return wide.float()
            out = x.new_zeros(rows, case.n // 2)
            self._gate_up(way, x, weight, None, wide, out)
            return out.float()

        right = product(CUBLAS)
        most = APART * float(right.norm())
        kept = [w for w in ways if w.variant is None or float((product(w) - right).norm()) <= most]
        for way in set(ways) - set(kept):
            log.warning("%s of %d rows: %s gives wrong results here", case, rows, way.name)
        return kept

    def way(self, operation: Operation, rows: int, weight: Stored) -> Way:
        """Return the way for this many rows and such a weight: as the next more that were timed, or
        by the library that was best for the most."""
        ways = self.ways.get(Case.of(operation, weight), {})
        most = next(reversed(ways.values()), CUBLAS)
        beyond = CUBLAS if most.variant else most
        return next((way for count, way in ways.items() if count >= rows), beyond)

    def _candidates(self, case: Case, rows: int) -> Iterator[Way]:
        yield CUBLAS
        yield CUBLASLT
        dtype = skinny_gemm.SCHEMES.get(case.scheme)
        if rows > skinny_gemm.MAX_ROWS or dtype is None:
            return
        gated = case.operation == "gate_up"
        wide = case.operation == "logits"
        # Tiles that are narrow, or of many rows, exist without gates alone; e4m3 has a kernel
        # after SiLU either way.
        kinds = (gated,) if not gated or case.scheme in PLAIN_SCHEMES else (True, False)
        group = skinny_gemm.INT4_GROUPS.get(case.scheme, 0)
        for kind in kinds:
            for variant in skinny_gemm.variants(
                rows, dtype, self.units, gated=kind, wide=wide, group=group
            ):
                for blocks in variant.grids(case.n // 2 if kind else case.n, self.units):
                    yield Way("cublas", variant, blocks)

    def _by_layer(
        self,
        chosen: Mapping[Case, Way],
        times: Mapping[Case, Mapping[Way, float]],
        rows: int,
        run: Callable[[], None],
    ) -> Mapping[Case, Way]:
        """Return the ways that make `run`, some layers' products, fastest."""

        def seconds(ways: Mapping[Case, Way]) -> float:
            self.ways |= {case: {rows: way} for case, way in ways.items()}
            return graph_seconds(run, _LAYER_REPEATS)

        return improve(chosen, {case: shortlist(each) for case, each in times.items()}, seconds)

    def scratch(self, device: torch.device) -> skinny_gemm.Scratch:
        """Scratch memory of torch's current stream, kept because graphs know its address."""
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in self._scratch:
            self._scratch[stream] = skinny_gemm.Scratch.of(self.units, device)
        return self._scratch[stream]

    def _run(
        self,
        way: Way,
        operation: Operation,
        x: Activations,
        weight: Stored,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """Queue one product by one kernel, with its activation, bias and residual."""
        add = operation == "add_linear"
        if way.variant is not None:
            values, scales = factors(x, weight)
            rest = bias, out, self.scratch(out.device)
            skinny_gemm.launch(
                way.variant,
                way.blocks,
                values,
                weight.values,
                *rest,
                residual=add,
                scales=scales,
                w_groups=weight.scales if way.variant.group else None,
            )
            return
        with cublaslt(self.units) if way.library == "cublaslt" else _AS_IT_IS:
            if isinstance(x, Quantised):
                _multiply_scaled(x, weight, bias, out, add=add)
                return
            for rows, values in _plain_parts(weight):
                if add:
                    out[:, rows].addmm_(x, values.t())
                else:
                    _multiply(x, values, None if bias is None else bias[rows], out[:, rows])
        if add and bias is not None:
            out.add_(bias)

    def _seconds(self, way: Way, case: Case, rows: int, weights: Sequence[Stored]) -> float:
        """Return the seconds of one product after a norm, as layers have them."""
        like, operation = weights[0], case.operation
        several = in_turn(weights)
        device = like.values.device
        dtype = like.values.dtype if case.scheme in PLAIN_SCHEMES else torch.bfloat16
        x = torch.randn(rows, case.k, dtype=dtype, device=device)
        scale, normal = torch.ones_like(x[0]), torch.empty_like(x)
        seen = input_of(normal, normal.new_empty((rows, 1), dtype=torch.float32), case.scheme)
        kind = torch.float32 if operation == "logits" else dtype
        out = torch.zeros(rows, case.n, dtype=kind, device=device)
        scales = out.new_zeros((rows, 1), dtype=torch.float32)
        act = input_of(out.new_zeros(rows, case.n // 2), scales, case.scheme)

        def run() -> None:
            for weight in several:
                fused.rms_norm(x, scale, 1e-6, seen)
                if operation == "gate_up":
                    self._gate_up(way, seen, weight, None, out, act)
                else:
                    self._run(way, operation, seen, weight, None, out)

        return graph_seconds(run, _REPEATS) / len(several)


def in_turn(weights: Sequence[Stored]) -> Sequence[Stored]:
    """Repeat these weights, of one shape, until the L2 cache does not serve them, or as often as
    one timing may."""
    enough = min(-(-COLD_BYTES // weights[0].nbytes), MAX_TIMED)
    return [weights[i % len(weights)] for i in range(enough)]


def input_of(buffer: Tensor, scales: Tensor, scheme: str) -> Activations:
    """Return the buffer for the input of a matrix of this scheme.

    Args:
        buffer: [T, k], contiguous; e4m3 takes a part of its memory.
        scales: float32 [T, 1], for e4m3.
        scheme: Scheme of the matrix.
    """
    if scheme not in FP8_SCHEMES:
        return buffer
    values = buffer.view(torch.float8_e4m3fn).flatten()[: buffer.numel()].view(buffer.shape)
    return Quantised(values, scales)


def choose(seconds: Mapping[Way, float]) -> Way:
    """cuBLAS, unless cuBLASLt is faster than it by `MARGIN`, unless the own kernel is than that."""
    chosen = CUBLAS
    for own in (False, True):
        ways = [way for way in seconds if (way.variant is not None) == own]
        fastest = min(ways, key=seconds.__getitem__, default=chosen)
        if seconds[chosen] > MARGIN * seconds[fastest]:
            chosen = fastest
    return chosen


def shortlist(seconds: Mapping[Way, float]) -> list[Way]:
    """Return the fastest ways of the own kernel, and the faster library."""
    order = sorted(seconds, key=seconds.__getitem__)
    own = [way for way in order if way.variant is not None]
    # Ways of the own kernel that are timed in layers.
    return [*own[:4], *[way for way in order if way.variant is None][:1]]


def improve(
    chosen: Mapping[Case, Way],
    tries: Mapping[Case, Sequence[Way]],
    seconds: Callable[[Mapping[Case, Way]], float],
) -> Mapping[Case, Way]:
    """Change one case's way after the other where that saves all together `LAYER_MARGIN`."""
    best = seconds(chosen)
    for case, ways in tries.items():
        for way in ways:
            if way == chosen[case]:
                continue
            tried = {**chosen, case: way}
            took = seconds(tried)
            if best > LAYER_MARGIN * took:
                chosen, best = tried, took
    return chosen


Ways = dict[tuple[Case, int], Way]
"""The chosen way of each case and number of rows."""


def read_ways(record: Path, candidates: Mapping[tuple[Case, int], Sequence[Way]]) -> Ways:
    """Return the ways that `write_ways` kept and that are among the candidates."""
    try:
        kept = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    names = kept if isinstance(kept, dict) else {}
    return {
        key: way for key, ways in candidates.items() for way in ways
        if names.get(_label(*key)) == way.name
    }  # fmt: skip


def write_ways(record: Path, ways: Ways) -> None:
    """Keep what was chosen."""
    names = {_label(*key): way.name for key, way in ways.items()}
    write_cache(record, json.dumps(names).encode())


def _label(case: Case, rows: int) -> str:
    return f"{case.operation} {case.n}x{case.k} {case.scheme} {rows}"


def _served(uses: Mapping[Case, Sequence[Stored]]) -> Mapping[Case, Sequence[Stored]]:
    """Return the weights that can be multiplied in more than one way."""
    return {
        case: weights
        for case, weights in uses.items()
        if case.operation != "experts"
        and skinny_gemm.serves(weights[0].values, case.scheme, gated=case.operation == "gate_up")
    }


def choice_file(kind: str, cases: Sequence[object], units: int, device: torch.device) -> Path:
    """Return the file of the choice for this GPU, its driver, these libraries and this source."""
    made = torch.__version__, nvrtc.driver_version(), torch.cuda.get_device_name(device)
    return nvrtc.cache_path(repr((kind, cases, units, made, skinny_gemm.text())), "ways.json")


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    elif x.dtype == out.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def _plain_parts(weight: Stored) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight, and their numbers without scales: all at once, or widened part by part."""
    if weight.scheme not in skinny_gemm.INT4_GROUPS:
        yield slice(0, len(weight.values)), weight.values
        return
    assert weight.scales is not None
    for rows in parts(*weight.shape):
        yield rows, widen(weight.values, weight.scales, rows)


def factors(x: Activations, weight: Stored) -> tuple[Tensor, skinny_gemm.Scales | None]:
    """Return the values of x, and the scales of both factors if they have some."""
    if not isinstance(x, Quantised):
        return x, None
    assert weight.scales is not None
    return x.values, (x.scales, weight.scales)


def _multiply_scaled(
    x: Quantised, weight: Stored, bias: Tensor | None, out: Tensor, *, add: bool
) -> None:
    """`out` (+)= x @ weight.T + bias, by `_scaled_mm`, which cannot add by itself."""
    assert weight.scales is not None
    factors = x.values, weight.values.t(), x.scales, weight.scales[None]
    into = torch.empty_like(out) if add else out
    torch._scaled_mm(*factors, bias=bias, out_dtype=out.dtype, use_fast_accum=out.is_cuda, out=into)
    if add:
        out.add_(into)


_AS_IT_IS = nullcontext()


@contextmanager
def sm_carveout(units: int) -> Iterator[None]:
    """Have torch's libraries leave all SMs but `units` unused.

    This is the process's and is put back at once: only one thread may launch.
    """
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    torch._C._set_sm_carveout_experimental(total - units or None)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


@contextmanager
def cublaslt(units: int) -> Iterator[None]:
    """torch calls cuBLASLt, with `sm_carveout`; see there."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        with sm_carveout(units):
            yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
