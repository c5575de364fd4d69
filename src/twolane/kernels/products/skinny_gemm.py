"""Launches of skinny_gemm.cu: products of few rows, with weights of 16, 8 and 4 bits, on Hopper."""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twolane.kernels.runtime import nvrtc

E4M3 = torch.float8_e4m3fn
INT4_GROUPS = {"int4_gpu32": 32, "int4_gpu64": 64, "int4_gpu128": 128}
"""Columns that share a scale, by the schemes of four bits that the kernel multiplies with."""
SCHEMES = {
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_channel": E4M3,
    **dict.fromkeys(INT4_GROUPS, torch.bfloat16),
}
"""The schemes of matrices that the kernel multiplies with, and the type of what they multiply."""
INT4_RUN = 128
"""Columns whose numbers of four bits lie in an order of their own."""
LINE = 128
"""Bytes of each row of a tile."""
SWAPPED_ROWS, PLAIN_ROWS = (16, 24, 32, 40, 48, 96), (32, 64, 128)
"""Most rows of x of the tiles that there are: with w, and with x, on the product's 64-row side."""
ROWS = tuple(sorted({*SWAPPED_ROWS, *PLAIN_ROWS}))
"""Either of them."""
MAX_ROWS = PLAIN_ROWS[-1]
MAX_TILES = 8192
_SHARED = 216 * 1024
"""Bytes of shared memory of a block. The small kernel in front must fit beside it on the SM, or the
block could not start early."""
_RESERVED = 2048
"""Bytes of shared memory reserved for barriers and alignment."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled variant of the kernel.

    Args:
        block_n: rows of w in a tile: 64, 128 or 256.
        rows: most rows of x: of `SWAPPED_ROWS` or `PLAIN_ROWS`; 128 with `block_n` up to 128.
        swap: w, not x, is on the product's side that counts in 64 rows.
        gated: w is gate rows and up rows, y = silu(gate) * up; `block_n` at least 128.
        wide: y is float32, without bias or residual.
        dtype: Type of x and w: bfloat16, float16, or e4m3, for which y is bfloat16 and not wide.
        grouped: w has the rows of all experts, each group of rows of x goes to one; with `swap`.
        spread: grouped, and a group's rows lie anywhere in x, whose rows fit one tile: the group's
            fourth number is a mask of them. Those of y lie next to one another.
        group: columns of w that share a scale, of four bits; 0: w is of `dtype`. With `swap` and
            bfloat16 alone; `rows` of `ROWS`, up to 64 with `block_n` 256, which gates need.
    """

    block_n: int
    rows: int
    swap: bool = False
    gated: bool = False
    wide: bool = False
    dtype: torch.dtype = torch.bfloat16
    grouped: bool = False
    spread: bool = False
    group: int = 0

    @property
    def name(self) -> str:
        """Unique name among tiles of equal rows: s or p (swapped, plain), g if gated, `block_n`."""
        return f"{'s' if self.swap else 'p'}{'g' if self.gated else ''}{self.block_n}"

    @property
    def columns(self) -> int:
        """Columns of y in a tile."""
        return self.block_n // 2 if self.gated else self.block_n

    @property
    def column_groups(self) -> int:
        """Warpgroups that share the rows of w in a tile."""
        return 2 if self.block_n == 256 or self.group else 1

    @property
    def threads(self) -> int:
        """Threads of a block: a warp that loads, and the warpgroups that multiply."""
        row_groups = 2 if self.rows > 64 and not self.swap else 1
        return 32 + 128 * self.column_groups * row_groups

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage of the ring."""
        if self.group:
            scales = 4 * self.block_n * (INT4_RUN // self.group)
            return self.block_n * LINE // 2 + self.rows * 2 * LINE + scales
        return (self.block_n + self.rows) * LINE

    @property
    def block_k(self) -> int:
        """Elements of each row of a tile."""
        return INT4_RUN if self.group else LINE // self.dtype.itemsize

    @property
    def stages(self) -> int:
        """Tiles of w and x in flight in a block."""
        return min(16, (_SHARED - _RESERVED) // self.stage_bytes)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * self.stage_bytes + _RESERVED

    def options(self) -> tuple[str, ...]:
        """Return the compiler's options."""
        values = {
            "BLOCK_N": self.block_n,
            "ROWS": self.rows,
            "STAGES": self.stages,
            "SWAP": int(self.swap),
            "GATED": int(self.gated),
            "WIDE": int(self.wide),
            "FP8": int(self.dtype == E4M3),
            "INT4": self.group,
            "HALF": int(self.dtype == torch.float16),
            "GROUPED": int(self.grouped),
            "SPREAD": int(self.spread),
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())

    def grids(self, n: int, units: int) -> Iterator[int]:
        """Yield the numbers of blocks worth timing for n columns of y.

        All SMs; and the most of them that give each block as many whole tiles, or each tile as many
        blocks: fewer partial tiles to sum may be worth some idle SMs.
        """
        yield units
        tiles = -(-n // self.columns)
        even = tiles * (units // tiles) or max(g for g in range(1, units + 1) if tiles % g == 0)
        if 0.6 * units < even < units:
            yield even


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory through which blocks of a launch exchange partial sums. Launches that may run at the
    same time must not share one.

    Args:
        partials: float32.
        arrivals: int32 zeros, one for each tile of `block_n` rows of w.
    """

    partials: Tensor
    arrivals: Tensor

    @classmethod
    def of(cls, blocks: int, device: torch.device) -> "Scratch":
        """Allocate scratch memory for launches of up to this many blocks."""
        # A block leaves at most two partial tiles, none larger than this.
        floats = blocks * (2 * 256 * 128)
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
        )


def serves(weight: Tensor, scheme: str, *, gated: bool = False) -> bool:
    """Return whether the kernel exists for values of a scheme, with up to `MAX_ROWS` rows as torch
    has them."""
    n, k = weight.shape
    whole = k * weight.itemsize % (INT4_RUN // 2 if scheme in INT4_GROUPS else 16) == 0
    sizes = n % (32 if gated else 16) == 0 and whole and n <= 64 * MAX_TILES
    return sizes and scheme in SCHEMES and weight.is_contiguous() and nvrtc.available(weight.device)


def variants(
    rows: int,
    dtype: torch.dtype,
    units: int,
    *,
    gated: bool = False,
    wide: bool = False,
    group: int = 0,
) -> list[Variant]:
    """Return the variants worth timing: few SMs need the wide tiles."""
    if group:
        count = next(count for count in ROWS if count >= rows)
        widths = (256,) if gated else (128, 256)  # the wide ones have no registers for more rows
        return [
            Variant(n, count, swap=True, gated=gated, group=group)
            for n in widths
            if n == 128 or count <= 64
        ]
    swapped = next((count for count in SWAPPED_ROWS if count >= rows), None)
    plain = next(count for count in PLAIN_ROWS if count >= rows)
    sizes = [128, 256] if units <= 48 else [64, 128, 256]
    tiles = []
    if swapped is not None and swapped <= plain:
        tiles += [(n, swapped, True) for n in sizes if n > swapped]
    if rows > SWAPPED_ROWS[0]:
        tiles += [(n, plain, False) for n in (sizes if plain < 128 else (64, 128))]
    return [
        Variant(n, count, swap, gated, wide, dtype)
        for n, count, swap in tiles
        if not (gated and n == 64)
    ]


def compile_all(wanted: Iterable[Variant]) -> None:
    """Compile what is not in the cache, several at a time; no GPU is needed."""
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda v: nvrtc.compile_cubin(source(v), v.options()), wanted):
            pass


@cache
def text() -> str:
    """Return the CUDA C++ that all variants share."""
    return nvrtc.with_hopper(Path(__file__).with_name("skinny_gemm.cu"))


@cache
def source(variant: Variant) -> str:
    """Return the CUDA C++ of a variant."""
    width = variant.rows if variant.swap else variant.block_n // variant.column_groups
    multiply = _multiply_widened(width) if variant.group else _multiply(width, variant.dtype)
    return multiply + text()


_INSTRUCTIONS = {
    torch.bfloat16: ("k16.f32.bf16.bf16", "1, 1, 1, 0, 0"),
    torch.float16: ("k16.f32.f16.f16", "1, 1, 1, 0, 0"),
    E4M3: ("k32.f32.e4m3.e4m3", "1, 1, 1"),
}
"""The end of the instruction's name, and its constants, by the type of the factors."""


def _multiply(n: int, dtype: torch.dtype) -> str:
    """`multiply`: one wgmma, 32 bytes of 64 rows by 32 bytes of n rows, both in shared memory, onto
    n / 2 registers."""
    count = n // 2
    name, constants = _INSTRUCTIONS[dtype]
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], unsigned a, unsigned b) {{
    const unsigned long long upper = 0x4000004000000000ull;  // of both descriptors
    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}{name} "
                 "{{{registers}}}, %{count}, %{count + 1}, {constants};"
                 : {outputs} : "l"(upper | a), "l"(upper | b));
}}
"""


def _multiply_widened(n: int) -> str:
    """`multiply`: one wgmma in bfloat16, 16 columns of 64 rows in registers by those of n rows in
    shared memory, onto n / 2 registers."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    fragment = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], const unsigned (&a)[4], unsigned b) {{
    const unsigned long long upper = 0x4000004000000000ull;  // of the descriptor
    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
                 "{{{registers}}}, {{{fragment}}}, %{count + 4}, 1, 1, 1, 0;"
                 : {outputs} : {inputs}, "l"(upper | b));
}}
"""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a grouped product, and the matrices of the product that follows it."""

    list: Tensor
    """As in `experts.routing.Routing`."""
    experts: int
    known: bool
    """Whether the list was complete before the preceding kernel began to let this one start."""
    following: Tensor | None
    """The matrices that the next product multiplies the same groups with; some of them are brought
    into the cache early."""


TensorMap = ctypes.c_ubyte * 128
Describe = Callable[[Tensor, int, int], Any]
"""Describes a matrix as boxes; the numbers are the rows and the bytes of a box."""
Scales = tuple[Tensor, Tensor]
"""The scales, float32, of the rows of x and of the rows of w."""


class _GemmArguments(ctypes.Structure):
    """As in the source; its tensor maps make its size a multiple of 64."""

    _fields_ = (
        *((name, TensorMap) for name in ("w", "x", "w_groups")),
        *((name, ctypes.c_void_p) for name in ("out", "bias", "x_scales", "w_scales")),
        *((name, ctypes.c_void_p) for name in ("scratch", "arrivals")),
        *((name, ctypes.c_int) for name in ("m", "n", "iterations", "tiles")),
        *((name, ctypes.c_int) for name in ("out_stride", "residual")),
        *((name, ctypes.c_void_p) for name in ("groups", "following")),
        *((name, ctypes.c_int) for name in ("following_bytes", "groups_known")),
        ("padding", ctypes.c_char * 32),
    )


def launch(
    variant: Variant,
    blocks: int,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scratch: Scratch,
    *,
    residual: bool = False,
    scales: Scales | None = None,
    groups: Groups | None = None,
    w_groups: Tensor | None = None,
) -> None:
    """Compute on torch's current stream.

    It may begin to read w before the kernel in front of it has ended, which must not write w.

    Args:
        variant: A variant whose `rows` are at least x's, or at least those of a group.
        blocks: one for each SM of the stream, or fewer.
        x: [m, k], rows contiguous.
        w: [n, k], contiguous; n is twice out's columns if gated, and times the experts if grouped.
            Of four bits uint8 [n, k / 2], as `twolane.model.int4.for_registers` orders them.
        bias: [n] or None; None if gated or wide.
        out: [m, columns], rows contiguous.
        scratch: see there.
        residual: add into `out`.
        scales: Scales of x and w in e4m3; None for other types.
        groups: Groups of rows; None unless the variant is grouped.
        w_groups: Scales of four-bit weights, int32 [k / group, n]: a scale and, above it, 128 plus
            a zero point.
    """
    packed = arguments(
        variant, x, w, bias, out, scratch, residual, _tensor_map, scales, groups, w_groups
    )
    kernel = nvrtc.load(
        source(variant), variant.options(), "skinny_gemm", variant.shared, x.device.index
    )
    grid = blocks if variant.grouped else min(blocks, packed.tiles * packed.iterations)
    kernel.launch(grid, variant.threads, variant.shared, packed, early=True)


def arguments(
    variant: Variant,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scratch: Scratch,
    residual: bool,
    tensor_map: Describe,
    scales: Scales | None = None,
    groups: Groups | None = None,
    w_groups: Tensor | None = None,
) -> _GemmArguments:
    """Return the kernel's arguments; `tensor_map` as `_tensor_map`."""
    (m, k), n = x.shape, out.shape[1]
    box = variant.columns // variant.column_groups if variant.gated else variant.block_n
    line = LINE // 2 if variant.group else LINE
    of_groups = TensorMap()
    if w_groups is not None:
        of_groups = tensor_map(w_groups, INT4_RUN // variant.group, 4 * box)
    return _GemmArguments(
        tensor_map(w, box, line),
        tensor_map(x, variant.rows, LINE),
        of_groups,
        out.data_ptr(),
        bias.data_ptr() if bias is not None else None,
        *((None, None) if scales is None else (each.data_ptr() for each in scales)),
        scratch.partials.data_ptr(),
        scratch.arrivals.data_ptr(),
        m,
        n,
        -(-k // variant.block_k),
        -(-n // variant.columns),
        out.stride(0),
        int(residual),
        *_of_groups(groups),
    )


def _of_groups(groups: Groups | None) -> tuple[int | None, int | None, int, int]:
    """Return the arguments that only a grouped product has."""
    if groups is None:
        return None, None, 0, 0
    w = groups.following
    following = (None, 0) if w is None else (w.data_ptr(), w.nbytes // groups.experts)
    return groups.list.data_ptr(), *following, int(groups.known)


def _tensor_map(matrix: Tensor, rows: int, line: int) -> Any:
    """Describes a matrix, rows contiguous, to the copy engine: boxes of `rows` rows by `line`
    bytes of each, swizzled if these are `LINE`.

    Raises:
        RuntimeError: the driver refuses.
    """
    height, width = matrix.shape
    return _described(matrix.data_ptr(), height, width, matrix.stride(0), rows, line, matrix.dtype)


@lru_cache(maxsize=4096)
def _described(
    address: int, rows: int, columns: int, stride: int, box_rows: int, line: int, dtype: torch.dtype
) -> Any:
    """See `_tensor_map`."""
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    names = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.int32: "INT32"}
    kind = names.get(dtype, "UINT8")
    swizzle = "128B" if line == LINE else "NONE"
    memory = (ctypes.c_char * 192)()
    offset = -ctypes.addressof(memory) % 64
    status = _encoder()(
        ctypes.addressof(memory) + offset,
        int(getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")),
        2,
        address,
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(dtype.itemsize * stride),
        (ctypes.c_uint32 * 2)(line // dtype.itemsize, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,  # not interleaved
        int(getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        0,  # zeros beyond the edges
    )
    if status:
        what = f"[{rows}, {columns}], stride {stride}, at {address:#x}"
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {status} for {what}")
    return TensorMap.from_buffer_copy(memory, offset)


@cache
def _encoder() -> Any:
    """Return the driver's cuTensorMapEncodeTiled: the binding's passes an unaligned map."""
    from cuda.bindings import driver

    found = nvrtc.cuda_checked(driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0))
    pointers = [ctypes.c_void_p] * 5
    kinds = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *pointers, *[ctypes.c_int] * 4]
    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(int(found[0]))
