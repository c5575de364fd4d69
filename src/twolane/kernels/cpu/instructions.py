"""Instructions of compiled code: each is a loop over vectors of 16 numbers, or an atomic access.

Arguments are addresses and counts, int64. Vectors keep NaN, so that a broken row stays broken.
"""

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llvmlite import ir

from twolane.kernels.cpu.compiler import Emit, declared, host_features
from twolane.kernels.cpu.formats import ACTIVATION_BYTES, COLUMNS, LARGEST, TileFormat

_HOST = host_features()
WIDTH = 512 if _HOST.get("avx512vnni") else 256 if _HOST.get("avxvnni") else 0
"""Bits of the widest registers that add products of eight bits in 32; 0: there are none."""
TILES = WIDTH == 512 and bool(_HOST.get("amx-int8"))
"""Whether tile registers multiply numbers of eight bits."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES = 16
_INTS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(_F32, _LANES)
_HALVES = ir.VectorType(ir.HalfType(), _LANES)
_BYTES = ir.VectorType(ir.IntType(8), _LANES)


class Instruction:
    """A function of addresses and counts that only compiled code can call.

    Args:
        emit: Emits it.
    """

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    def __call__(self, *args: int) -> int:
        """Refuse a call from Python.

        Raises:
            TypeError: always.
        """
        raise TypeError("only compiled code can call an instruction")


def instruction(emit: Emit) -> Instruction:
    """Return what compiled code calls an instruction by."""
    return Instruction(emit)


class Code:
    """Emits instructions with an LLVM builder.

    Args:
        builder: The builder of the function.
    """

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def variable(self, first: Any) -> Any:
        """Return a place for a value, which begins with one."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(first.type)
        self.builder.store(first, place)
        return place

    @contextlib.contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """Repeat what is emitted inside so many times, with the number of the turn."""
        b = self.builder
        head, body, after = (b.append_basic_block() for _ in range(3))
        before = b.block
        b.branch(head)
        b.position_at_end(head)
        turn = b.phi(_I64)
        turn.add_incoming(_I64(0), before)
        b.cbranch(b.icmp_signed("<", turn, count), body, after)
        b.position_at_end(body)
        yield turn
        turn.add_incoming(b.add(turn, _I64(1)), b.block)
        b.branch(head)
        b.position_at_end(after)

    def at(self, address: Any, offset: Any = 0) -> Any:
        """Return an address plus an offset, a number or a value."""
        if isinstance(offset, int):
            return address if offset == 0 else self.builder.add(address, _I64(offset))
        return self.builder.add(address, offset)

    def load(self, address: Any, kind: Any, offset: Any = 0) -> Any:
        """Load a value of a type."""
        pointer = self.builder.inttoptr(self.at(address, offset), kind.as_pointer())
        value = self.builder.load(pointer)
        value.align = 1 if kind is _BYTES else 2 if kind is _HALVES else 4
        return value

    def store(self, value: Any, address: Any, offset: Any = 0) -> None:
        """Store a value."""
        pointer = self.builder.inttoptr(self.at(address, offset), value.type.as_pointer())
        self.builder.store(value, pointer).align = 1 if value.type == _BYTES else 4

    def spread(self, value: Any) -> Any:
        """Return a vector of one value."""
        kind = ir.VectorType(value.type, _LANES)
        nothing, places = ir.Constant(kind, ir.Undefined), ir.Constant(_INTS, [0] * _LANES)
        first = self.builder.insert_element(nothing, value, _I32(0))
        return self.builder.shuffle_vector(first, nothing, places)

    def call(self, name: str, kind: Any, *args: Any) -> Any:
        """Call an intrinsic function of LLVM."""
        of = ir.FunctionType(kind, [arg.type for arg in args])
        return self.builder.call(declared(self.builder.module, name, of), args)

    def memory(self, nbytes: int) -> Any:
        """Return the address of `nbytes` bytes of the function's stack, aligned to a cache line."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(ir.IntType(8), nbytes))
            place.align = 64
            return self.builder.ptrtoint(place, _I64)

    def prefetch(self, address: Any, offset: int) -> None:
        """Have the processor read a cache line early; one that is not mapped is left out."""
        pointer = self.builder.inttoptr(self.at(address, offset), ir.IntType(8).as_pointer())
        # It is read, into the second cache (2), and is data (1).
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, _I32(0), _I32(2), _I32(1))

    def tile(self, name: str, *args: Any) -> None:
        """Emit an instruction of tile registers, which are numbers; addresses are int64."""
        b, byte = self.builder, ir.IntType(8)
        given = [byte(arg) if isinstance(arg, int) else arg for arg in args]
        if name in ("ldtilecfg", "tileloadd64", "tilestored64"):
            i = 0 if name == "ldtilecfg" else 1
            given[i] = b.inttoptr(given[i], byte.as_pointer())
        self.call(f"llvm.x86.{name}", ir.VoidType(), *given)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c of vectors, rounded once."""
        return self.call("llvm.fma.v16f32", _FLOATS, a, b, c)

    def dot(self, total: Any, unsigned: Any, signed: Any) -> Any:
        """Add four products of eight bits to each of 16 sums; the numbers are given as words."""
        if WIDTH == 512:
            name = "llvm.x86.avx512.vpdpbusd.512"
            return self.call(name, _INTS, total, unsigned, signed)
        halves = [
            self.call(
                "llvm.x86.avx512.vpdpbusd.256",
                ir.VectorType(_I32, 8),
                *(self._half(v, i) for v in (total, unsigned, signed)),
            )
            for i in range(2)
        ]
        return self.builder.shuffle_vector(*halves, ir.Constant(_INTS, range(_LANES)))

    def _half(self, vector: Any, i: int) -> Any:
        places = ir.Constant(ir.VectorType(_I32, 8), [*range(8 * i, 8 * i + 8)])
        return self.builder.shuffle_vector(vector, vector, places)

    def reduced(self, operation: str, vector: Any) -> Any:
        """Return the sum ("fadd", "add") or the largest ("smax") of a vector's numbers."""
        kind, element = ("v16f32", _F32) if vector.type == _FLOATS else ("v16i32", _I32)
        name = f"llvm.vector.reduce.{operation}.{kind}"
        if operation != "fadd":
            return self.call(name, element, vector)
        of = ir.FunctionType(element, [element, vector.type])
        function = declared(self.builder.module, name, of)
        return self.builder.call(function, [_F32(0.0), vector], fastmath=("reassoc",))

    def larger(self, one: Any, other: Any) -> Any:
        """Return the larger numbers of two vectors, the first's where one is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", one, other), other, one)

    def largest(self, vector: Any) -> Any:
        """Return the largest of a vector's 16 numbers."""
        for half in (8, 4, 2, 1):
            places = ir.Constant(_INTS, [(i + half) % _LANES for i in range(_LANES)])
            vector = self.larger(vector, self.builder.shuffle_vector(vector, vector, places))
        return self.builder.extract_element(vector, _I32(0))

    def rounded(self, x: Any) -> tuple[Any, Any]:
        """Return numbers of at most 2^22 rounded to whole ones, as float32 and as int32."""
        # The sum's last bits are the whole number.
        start = ir.Constant(_FLOATS, [1.5 * 2.0**23] * _LANES)
        total = self.builder.fadd(x, start)
        whole = self.builder.sub(*(self.builder.bitcast(v, _INTS) for v in (total, start)))
        return self.builder.fsub(total, start), whole

    def each_sum(self, vectors: Sequence[Any]) -> Any:
        """Return the vector of the sums of 16 vectors."""
        while (half := len(vectors) // 2) > 0:
            # What belongs to one of the vectors lies in runs of `half` numbers.
            runs = [16 * v + i for i in range(0, 16, 2 * half) for v in range(2)]
            first, second = (
                ir.Constant(_INTS, [run + k * half + i for run in runs for i in range(half)])
                for k in range(2)
            )
            vectors = [
                self.builder.fadd(*(self.builder.shuffle_vector(a, b, c) for c in (first, second)))
                for a, b in zip(vectors[:half], vectors[half:], strict=True)
            ]
        return vectors[0]

    def exp(self, x: Any) -> Any:
        """Return e^x within two units of the last place; below -87 it is 1e-38."""

        def every(number: float) -> Any:
            return ir.Constant(_FLOATS, [number] * _LANES)

        b = self.builder
        x = b.select(b.fcmp_ordered("<", x, every(-87.0)), every(-87.0), x)
        x = b.select(b.fcmp_ordered(">", x, every(88.0)), every(88.0), x)
        turns, whole = self.rounded(b.fmul(x, every(1.4426950408889634)))
        rest = self.fma(turns, every(-0.693359375), x)
        rest = self.fma(turns, every(2.12194440e-4), rest)
        power = every(1.9875691500e-4)  # the polynomial of Cephes' expf
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            power = self.fma(power, rest, every(factor))
        power = self.fma(power, b.fmul(rest, rest), b.fadd(rest, every(1.0)))
        bits = b.shl(
            b.add(whole, ir.Constant(_INTS, [127] * _LANES)), ir.Constant(_INTS, [23] * 16)
        )
        return b.fmul(power, b.bitcast(bits, _FLOATS))


LEAST = -1e38
"""A score that weighs nothing."""
_ZEROS, _NONE = ir.Constant(_FLOATS, [0.0] * _LANES), ir.Constant(_INTS, [0] * _LANES)


@instruction
def read(code: Code, address: Any) -> Any:
    """Return the int64 at an address; what was written before it is seen after it."""
    place = code.builder.inttoptr(address, _I64.as_pointer())
    return code.builder.load_atomic(place, "acquire", 8)


@instruction
def write(code: Code, address: Any, value: Any) -> None:
    """Write an int64 that others may see, after all that was written before."""
    place = code.builder.inttoptr(address, _I64.as_pointer())
    code.builder.store_atomic(value, place, "seq_cst", 8)


@instruction
def add(code: Code, address: Any, value: Any) -> Any:
    """Add to the int64 at an address at once, and return what it was."""
    place = code.builder.inttoptr(address, _I64.as_pointer())
    return code.builder.atomic_rmw("add", place, value, "seq_cst")


@instruction
def pause(code: Code) -> None:
    """Tell the processor that this thread waits."""
    code.call("llvm.x86.sse2.pause", ir.VoidType())


@instruction
def give_way(code: Code) -> None:
    """Let other threads have this core for a moment (sched_yield(2))."""
    code.call("sched_yield", _I32)


@instruction
def futex(code: Code, address: Any, operation: Any, value: Any) -> None:
    """Wait at an address while it has a value, or wake so many that wait (futex(2))."""
    none = _I64(0)
    code.call("syscall", _I64, _I64(202), address, operation, value, none, none, none)


@instruction
def copy(code: Code, source: Any, to: Any, blocks: Any) -> None:
    """Copy 16 * blocks float32 numbers."""
    with code.loop(blocks) as loop:
        place = code.builder.mul(loop, _I64(64))
        code.store(code.load(source, _FLOATS, place), to, place)


@instruction
def hide(code: Code, x: Any, count: Any) -> None:
    """Overwrite so many scores with one that weighs nothing."""
    with code.loop(count) as loop:
        code.store(_F32(LEAST), x, code.builder.mul(loop, _I64(4)))


@instruction
def turn(code: Code, x: Any, turns: Any, blocks: Any) -> None:
    """Multiply 16 * blocks float32 numbers with others, both pairs of real and imaginary parts."""
    b = code.builder
    swapped, real, imaginary = (
        ir.Constant(_INTS, places)
        for places in zip(*((i ^ 1, i & ~1, i | 1) for i in range(_LANES)), strict=True)
    )
    signs = ir.Constant(_FLOATS, [-1.0, 1.0] * 8)
    with code.loop(blocks) as loop:
        place = b.mul(loop, _I64(64))
        value, turn = code.load(x, _FLOATS, place), code.load(turns, _FLOATS, place)
        across = b.fmul(b.shuffle_vector(value, value, swapped), signs)
        out = b.fmul(value, b.shuffle_vector(turn, turn, real))
        out = code.fma(across, b.shuffle_vector(turn, turn, imaginary), out)
        code.store(out, x, place)


@instruction
def normalise(code: Code, x: Any, weight: Any, eps: Any, out: Any, blocks: Any) -> None:
    """Write the weighted RMS norm of 16 * blocks float32 numbers; `eps` is an address."""
    b = code.builder
    total = code.variable(_ZEROS)
    with code.loop(blocks) as loop:
        value = code.load(x, _FLOATS, b.mul(loop, _I64(64)))
        b.store(code.fma(value, value, b.load(total)), total)
    count = b.uitofp(b.mul(blocks, _I64(_LANES)), _F32)
    mean = b.fdiv(code.reduced("fadd", b.load(total)), count)
    deviation = code.call("llvm.sqrt.f32", _F32, b.fadd(mean, code.load(eps, _F32)))
    factor = code.spread(b.fdiv(_F32(1.0), deviation))
    with code.loop(blocks) as loop:
        place = b.mul(loop, _I64(64))
        value = b.fmul(code.load(x, _FLOATS, place), factor)
        code.store(b.fmul(value, code.load(weight, _FLOATS, place)), out, place)


@instruction
def quantise(code: Code, x: Any, out: Any, blocks: Any) -> None:
    """Write blocks of activations in eight bits of 32 * blocks float32 numbers."""
    with code.loop(blocks) as loop:
        source = code.at(x, code.builder.mul(loop, _I64(128)))
        to = code.at(out, code.builder.mul(loop, _I64(ACTIVATION_BYTES)))
        _emit_block(code, source, to)


@instruction
def leave(code: Code, x: Any, at: Any, blocks: Any) -> None:
    """Subtract the numbers that blocks of activations mean from 32 * blocks float32 numbers."""
    b = code.builder
    with code.loop(blocks) as loop:
        block = code.at(at, b.mul(loop, _I64(ACTIVATION_BYTES)))
        scale = code.spread(code.load(block, _F32, _SCALE))
        for i in range(2):
            place = code.at(b.mul(loop, _I64(128)), 64 * i)
            number = b.sitofp(b.sext(code.load(block, _BYTES, 16 * i), _INTS), _FLOATS)
            value = code.load(x, _FLOATS, place)
            code.store(b.fsub(value, b.fmul(number, scale)), x, place)


def _emit_block(code: Code, source: Any, to: Any) -> None:
    b = code.builder
    parts = [code.load(source, _FLOATS, 64 * i) for i in range(2)]
    # Magnitudes are ordered as their bits are, with NaN above all.
    unsigned = ir.Constant(_INTS, [0x7FFFFFFF] * _LANES)
    sizes = [b.and_(b.bitcast(part, _INTS), unsigned) for part in parts]
    bits = code.reduced("smax", code.call("llvm.smax.v16i32", _INTS, *sizes))
    bits = code.call("llvm.smax.i32", _I32, bits, b.bitcast(_F32(1e-30), _I32))
    largest = b.bitcast(bits, _F32)
    scale = b.fdiv(largest, _F32(LARGEST))
    factor = code.spread(b.fdiv(_F32(LARGEST), largest))
    sums = _NONE
    for i, part in enumerate(parts):
        _, number = code.rounded(b.fmul(part, factor))
        code.store(b.trunc(number, _BYTES), to, 16 * i)
        sums = b.add(sums, number)
    total = code.reduced("add", sums)
    code.store(scale, to, _SCALE)
    code.store(b.fmul(scale, b.sitofp(total, _F32)), to, _SUM)
    code.store(b.mul(total, _I32(-128)), to, _CENTRE)


_SCALE, _SUM, _CENTRE = 32, 36, 40
"""Bytes of an activation block before its scale, scale * sum, and -128 * sum."""
AHEAD = 32
"""Blocks of a matrix that are asked of the memory before their turn: what the processor has ahead
by itself covers too little of the time that memory takes."""
MANY = 16
"""Rows that tile registers (AMX) hold at a time."""
CHUNK = 64
"""Rows of a product's task at most."""
TILE_REGISTERS = 0, 1, 2
"""The tile registers of activations, of numbers of a matrix, and of the sums of their products."""
SPAN = 16
"""Blocks of a tile that are multiplied before their products are scaled."""


class _Block:
    """Emits what is done with a block of a tile.

    Args:
        form: The format of the tile.
        address: The address of the block.
    """

    def __init__(self, form: TileFormat, code: Code, address: Any) -> None:
        self._code, self._form, self._address = code, form, address
        self._eight = form == TileFormat.EIGHT

    def ask(self) -> None:
        """Ask the memory for the block that is `AHEAD` of this one."""
        for line in range(0, self._form.nbytes, 64):
            self._code.prefetch(self._address, AHEAD * self._form.nbytes + line)

    def words(self) -> list[Any]:
        """Return the numbers of the block, a vector for each four columns."""
        b, count = self._code.builder, 8 if self._eight else 4
        words = [self._code.load(self._address, _INTS, 64 * i) for i in range(count)]
        if self._eight:
            return words
        low, four = (ir.Constant(_INTS, [n] * _LANES) for n in (0x0F0F0F0F, 4))
        high = [b.and_(b.lshr(word, four), low) for word in words]
        return [b.and_(word, low) for word in words] + high

    def products(self, rows: Sequence[Any]) -> list[Any]:
        """Return the sums of products with the activations at these addresses."""
        code, sums = self._code, [_NONE] * len(rows)
        for i, word in enumerate(self.words()):
            for j, row in enumerate(rows):
                sums[j] = code.dot(sums[j], word, code.spread(code.load(row, _I32, 4 * i)))
        return sums

    def add(self, rows: Sequence[Any], sums: Sequence[Any], totals: Sequence[Any]) -> None:
        """Add sums of products, scaled, to the variables of totals."""
        code, b = self._code, self._code.builder
        scale, least = self._scales()
        for row, product, total in zip(rows, sums, totals, strict=True):
            if self._eight:
                product = b.add(product, code.spread(code.load(row, _I32, _CENTRE)))
            scaled = code.spread(code.load(row, _F32, _SCALE))
            new = code.fma(b.fmul(b.sitofp(product, _FLOATS), scaled), scale, b.load(total))
            if least is not None:
                new = code.fma(code.spread(code.load(row, _F32, _SUM)), least, new)
            b.store(new, total)

    def _scales(self) -> tuple[Any, Any]:
        """Return the scales of the block's rows and their minima, None in eight bits."""
        code, at = self._code, self._address
        if self._eight:
            return code.load(at, _FLOATS, 512), None
        if self._form == TileFormat.FOUR:
            return code.load(at, _FLOATS, 256), code.load(at, _FLOATS, 320)
        halves = [code.load(at, _HALVES, place) for place in (256, 288)]
        scale, least = (code.builder.fpext(half, _FLOATS) for half in halves)
        return scale, least


class _TileProduct:
    """Emits the products of rows with a tile. The order of a row's sums is that of blocks, whatever
    other rows there are.

    Args:
        form: The format of the tile.
        count: Rows.
    """

    def __init__(self, form: TileFormat, count: int) -> None:
        self._form, self._count = form, count

    def emit(
        self, code: Code, w: Any, x: Any, wide: Any, blocks: Any,
        begin: Any, step: Any, out: Any, apart: Any,
    ) -> None:  # fmt: skip
        """See `multiply`."""
        b = code.builder
        totals = [code.variable(_ZEROS) for _ in range(self._count)]
        rows = [code.at(x, b.mul(wide, _I64(i))) for i in range(self._count)]
        with code.loop(blocks) as loop:
            block = _Block(self._form, code, code.at(w, b.mul(loop, _I64(self._form.nbytes))))
            block.ask()
            place = b.mul(loop, _I64(ACTIVATION_BYTES))
            at = [code.at(row, place) for row in rows]
            block.add(at, block.products(at), totals)
        for i, total in enumerate(totals):
            before = code.load(begin, _FLOATS, b.mul(step, _I64(i)))
            code.store(b.fadd(before, b.load(total)), out, b.mul(apart, _I64(i)))


class _ManyProduct:
    """Emits the same products of `MANY` rows at a time with tile registers (AMX).

    What these registers read, and what reads their results, waits until memory has it. So the
    numbers of `SPAN` blocks are written for all rows, and the products of `SPAN` blocks before the
    first of them is scaled.

    Args:
        form: The format of the tile.
    """

    def __init__(self, form: TileFormat) -> None:
        self._form = form
        self._eight = form == TileFormat.EIGHT

    def emit(
        self, code: Code, groups: Any, w: Any, x: Any, wide: Any, blocks: Any,
        begin: Any, step: Any, out: Any, apart: Any,
    ) -> None:  # fmt: skip
        """See `multiply_many`."""
        b, size = code.builder, self._form.nbytes
        numbers, sums = code.memory(512 * SPAN), code.memory(64 * MANY * SPAN)
        totals = code.memory(64 * CHUNK)
        spans = b.sdiv(b.add(blocks, _I64(SPAN - 1)), _I64(SPAN))
        with code.loop(spans) as span:
            first = b.mul(span, _I64(SPAN))
            left = b.sub(blocks, first)
            count = b.select(b.icmp_signed("<", left, _I64(SPAN)), left, _I64(SPAN))
            at_w = code.at(w, b.mul(first, _I64(size)))
            source, distance = at_w, size
            if not self._eight:
                self._expand(code, at_w, count, numbers)
                source, distance = numbers, 512
            with code.loop(groups) as group:
                rows = b.mul(group, _I64(MANY))
                at_x = code.at(code.at(x, b.mul(rows, wide)), b.mul(first, _I64(ACTIVATION_BYTES)))
                self._multiply(code, source, distance, at_x, wide, count, sums)
                kept = code.at(totals, b.mul(rows, _I64(64)))
                begins = b.icmp_signed("==", span, _I64(0))
                self._scale(code, at_w, at_x, wide, count, sums, kept, begins)
        with code.loop(b.mul(groups, _I64(MANY))) as row:
            before = code.load(begin, _FLOATS, b.mul(step, row))
            total = code.load(totals, _FLOATS, b.mul(row, _I64(64)))
            code.store(b.fadd(before, total), out, b.mul(apart, row))

    def _expand(self, code: Code, w: Any, count: Any, to: Any) -> None:
        """Write the numbers of `count` blocks in eight bits."""
        b = code.builder
        with code.loop(count) as loop:
            block = _Block(self._form, code, code.at(w, b.mul(loop, _I64(self._form.nbytes))))
            block.ask()
            for i, word in enumerate(block.words()):
                code.store(word, code.at(to, b.mul(loop, _I64(512))), 64 * i)

    def _multiply(
        self, code: Code, numbers: Any, size: int, x: Any, wide: Any, count: Any, sums: Any
    ) -> None:
        """Write the sums of `count` blocks, whose numbers are `size` bytes apart."""
        b, (activations, matrix, product) = code.builder, TILE_REGISTERS
        with code.loop(count) as loop:
            code.tile("tileloadd64", matrix, code.at(numbers, b.mul(loop, _I64(size))), _I64(64))
            code.tile(
                "tileloadd64", activations, code.at(x, b.mul(loop, _I64(ACTIVATION_BYTES))), wide
            )
            code.tile("tilezero", product)
            code.tile("tdpbsud", product, activations, matrix)
            to = code.at(sums, b.mul(loop, _I64(64 * MANY)))
            code.tile("tilestored64", product, to, _I64(64))

    def _scale(
        self, code: Code, w: Any, x: Any, wide: Any, count: Any, sums: Any, totals: Any, first: Any
    ) -> None:
        """Add sums of `count` blocks, scaled, to the totals of `MANY` rows; those of the first
        blocks to zeros."""
        b = code.builder
        kept = [
            code.variable(b.select(first, _ZEROS, code.load(totals, _FLOATS, 64 * i)))
            for i in range(MANY)
        ]
        rows = [code.at(x, b.mul(wide, _I64(i))) for i in range(MANY)]
        with code.loop(count) as loop:
            block = _Block(self._form, code, code.at(w, b.mul(loop, _I64(self._form.nbytes))))
            place, product = b.mul(loop, _I64(ACTIVATION_BYTES)), b.mul(loop, _I64(64 * MANY))
            at = [code.at(row, place) for row in rows]
            products = [code.load(code.at(sums, product), _INTS, 64 * i) for i in range(MANY)]
            block.add(at, products, kept)
        for i, total in enumerate(kept):
            code.store(b.load(total), totals, 64 * i)


@instruction
def begin_tiles(code: Code) -> None:
    """Give this thread tile registers for products of `MANY` rows."""
    if not TILES:
        return
    widths, heights = (COLUMNS, 64, 64), (MANY, COLUMNS // 4, MANY)
    setting = struct.pack("<BB14x3H26x3B13x", 1, 0, *widths, *heights)  # LDTILECFG's palette 1
    memory = code.memory(64)
    for i in range(0, 64, 4):
        code.store(_I32(int.from_bytes(setting[i : i + 4], "little")), memory, i)
    code.tile("ldtilecfg", memory)


@instruction
def end_tiles(code: Code) -> None:
    """Give the tile registers back."""
    if TILES:
        code.tile("tilerelease")


@instruction
def multiply(
    code: Code, form: Any, count: Any, w: Any, x: Any, wide: Any, blocks: Any,
    begin: Any, step: Any, out: Any, apart: Any,
) -> None:  # fmt: skip
    """Write the products of 1, 2, 4 or 8 rows of activations with a tile, plus a beginning.

    Args:
        code: Emits.
        form: The `TileFormat` of the tile.
        count: Rows.
        w: Address of the tile.
        x: Address of the rows' blocks.
        wide: Bytes from one row's to the next one's.
        blocks: Number of blocks.
        begin: Address of 16 float32 numbers that products are added to.
        step: Bytes to those of the next row.
        out: Address of the result of 16 float32 numbers, which may be `begin`.
        apart: Bytes to that of the next row.
    """
    b = code.builder
    for each in TileFormat:
        for rows in (1, 2, 4, 8):
            same = b.and_(
                b.icmp_signed("==", form, _I64(each)), b.icmp_signed("==", count, _I64(rows))
            )
            with b.if_then(same):
                _TileProduct(each, rows).emit(code, w, x, wide, blocks, begin, step, out, apart)


@instruction
def multiply_many(
    code: Code, form: Any, groups: Any, w: Any, x: Any, wide: Any, blocks: Any,
    begin: Any, step: Any, out: Any, apart: Any,
) -> None:  # fmt: skip
    """Write the same products of `MANY` * `groups` rows, at most `CHUNK`; see `multiply`."""
    if not TILES:
        return
    b = code.builder
    for each in TileFormat:
        with b.if_then(b.icmp_signed("==", form, _I64(each))):
            _ManyProduct(each).emit(code, groups, w, x, wide, blocks, begin, step, out, apart)


@instruction
def gate(code: Code, x: Any, up: Any, blocks: Any) -> None:
    """Replace 16 * blocks float32 numbers by their SiLU times those at `up`."""
    b, one = code.builder, ir.Constant(_FLOATS, [1.0] * _LANES)
    with code.loop(blocks) as loop:
        place = b.mul(loop, _I64(64))
        value = code.load(x, _FLOATS, place)
        turned = b.fadd(code.exp(b.fsub(_ZEROS, value)), one)
        value = b.fmul(b.fdiv(value, turned), code.load(up, _FLOATS, place))
        code.store(value, x, place)


@instruction
def score(
    code: Code,
    q: Any,
    keys: Any,
    slots: Any,
    last: Any,
    wide: Any,
    blocks: Any,
    out: Any,
    apart: Any,
) -> None:
    """Write the dot products of four queries, whose addresses are at `q`, with four keys.

    `keys` is where the keys of slot 0 are, `wide` bytes before those of slot 1, and `slots` where
    the four slots are, of which the last that there is has the offset `last`: keys after it are it
    again. Queries have 16 * blocks dimensions, and their four results each are `apart` bytes apart.
    """
    b = code.builder
    queries = [code.load(q, _I64, 8 * i) for i in range(4)]
    places = []
    for i in range(4):
        at = _I64(8 * i)
        at = b.select(b.icmp_signed(">", at, last), last, at)
        places.append(code.at(keys, b.mul(code.load(slots, _I64, at), wide)))
    sums = [[code.variable(_ZEROS) for _ in range(4)] for _ in range(4)]
    for row in sums:
        for total in row:
            b.store(_ZEROS, total)
    with code.loop(blocks) as loop:
        offset = b.mul(loop, _I64(64))
        rows = [code.load(each, _FLOATS, offset) for each in queries]
        for j, place in enumerate(places):
            key = code.load(place, _FLOATS, offset)
            for i, row in enumerate(rows):
                b.store(code.fma(row, key, b.load(sums[i][j])), sums[i][j])
    products = code.each_sum([b.load(total) for row in sums for total in row])
    for i in range(4):
        places = ir.Constant(ir.VectorType(_I32, 4), [*range(4 * i, 4 * i + 4)])
        own = b.shuffle_vector(products, products, places)
        code.store(own, out, b.mul(apart, _I64(i)))


@instruction
def soften(code: Code, x: Any, blocks: Any, factor: Any) -> None:
    """Replace 16 * blocks scores, times the float32 at `factor`, by the exponentials of their
    differences to the largest, and the number after them by the reciprocal of their sum."""
    b = code.builder
    largest, total = (
        code.variable(ir.Constant(_FLOATS, [first] * _LANES)) for first in (LEAST, 0.0)
    )
    b.store(ir.Constant(_FLOATS, [LEAST] * _LANES), largest)
    b.store(_ZEROS, total)
    with code.loop(blocks) as loop:
        value = code.load(x, _FLOATS, b.mul(loop, _I64(64)))
        b.store(code.larger(b.load(largest), value), largest)
    most = code.spread(code.largest(b.load(largest)))
    times = code.spread(code.load(factor, _F32))
    with code.loop(blocks) as loop:
        place = b.mul(loop, _I64(64))
        value = b.fmul(b.fsub(code.load(x, _FLOATS, place), most), times)
        weight = code.exp(value)
        code.store(weight, x, place)
        b.store(b.fadd(b.load(total), weight), total)
    whole = code.reduced("fadd", b.load(total))
    code.store(b.fdiv(_F32(1.0), whole), x, b.mul(blocks, _I64(64)))


@instruction
def weigh(
    code: Code,
    x: Any,
    apart: Any,
    sums: Any,
    values: Any,
    slots: Any,
    count: Any,
    wide: Any,
    blocks: Any,
    out: Any,
) -> None:
    """Write the sums of values by four queries' weights, [4, 32 * blocks].

    `x` is where the first query's weights are, `apart` bytes before the next one's; `sums` bytes
    after its weights is the factor of its result. `values` is where the values of slot 0 are,
    `wide` bytes before those of slot 1, and `slots` where the `count` slots are.
    """
    b = code.builder
    weights = [code.at(x, b.mul(apart, _I64(i))) for i in range(4)]
    factors = [code.spread(code.load(each, _F32, sums)) for each in weights]
    totals = [[code.variable(_ZEROS) for _ in range(2)] for _ in range(4)]
    with code.loop(blocks) as part:
        for row in totals:
            for total in row:
                b.store(_ZEROS, total)
        column = b.mul(part, _I64(128))
        with code.loop(count) as loop:
            slot = code.load(slots, _I64, b.mul(loop, _I64(8)))
            place = code.at(code.at(values, b.mul(slot, wide)), column)
            halves = [code.load(place, _FLOATS, 64 * i) for i in range(2)]
            at = b.mul(loop, _I64(4))
            for each, row in zip(weights, totals, strict=True):
                weight = code.spread(code.load(each, _F32, at))
                for value, total in zip(halves, row, strict=True):
                    b.store(code.fma(weight, value, b.load(total)), total)
        for i, row in enumerate(totals):
            to = code.at(code.at(out, b.mul(b.mul(blocks, _I64(128)), _I64(i))), column)
            for j, total in enumerate(row):
                code.store(b.fmul(b.load(total), factors[i]), to, 64 * j)


INSTRUCTIONS: Mapping[str, Emit] = {
    name: each.emit for name, each in globals().copy().items() if isinstance(each, Instruction)
}
"""The instructions by their names in compiled functions."""
