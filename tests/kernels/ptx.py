"""Act out PTX that Triton has made of a kernel: the threads of a block in step, with NumPy.

The interpreter of the other tests runs a kernel's Python, and sees no error of the compiler. This
runs what the compiler has made, one instruction after the other; a register is an array of one
number for each thread. No thread is ahead of another, so missing barriers are not seen. Branches
that part the threads of a block, asynchronous copies and wgmma are not acted out.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

THREADS = 128
LANE, WARP = np.arange(THREADS) % 32, np.arange(THREADS) // 32
ROW, PAIR = LANE // 4, 2 * (LANE % 4)
"""Where a lane's two numbers lie in an 8 by 8 matrix: in this row, from this column on."""
LOW = np.uint64(0xFFFFFFFF)
COMPARED = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
COMPARED |= {"eq": np.equal, "ne": np.not_equal}
COMPUTED = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
COMBINED = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
IGNORED = ("griddepcontrol", "bar")


def rounded(value: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers in bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF).astype(np.uint64)


def widened(bits: np.ndarray, half: int) -> np.ndarray:
    """One of the two bfloat16 numbers in words, as float32."""
    return ((bits >> np.uint64(16 * half)).astype(np.uint32) << 16).view(np.float32)


class Program:
    """A kernel in PTX.

    Args:
        text: of the compiler.
        shared: bytes of shared memory.
    """

    def __init__(self, text: str, shared: int) -> None:
        self._instructions: list[str] = []
        self._labels: dict[str, int] = {}
        self._shared = shared
        body = text[text.index("{\n", text.index(".entry")) :]
        for raw in body[2 : body.index("\n}")].splitlines():
            line = raw.split("//")[0].strip()
            if line.endswith(":"):
                self._labels[line[:-1]] = len(self._instructions)
            elif line and not line.startswith("."):
                self._instructions += filter(None, map(str.strip, line.split(";")))

    def run(self, grid: tuple[int, ...], parameters: Mapping[str, int], memory: np.ndarray) -> None:
        """Run all blocks, one after the other.

        Args:
            grid: blocks.
            parameters: by name; addresses are places in `memory`.
            memory: of the device, uint8.
        """
        for place in np.ndindex(*grid):
            Block(parameters, memory, place, grid, self._shared).run(
                self._instructions, self._labels
            )


class Block:
    """A block of threads; see `Program.run`."""

    def __init__(
        self,
        parameters: Mapping[str, int],
        memory: np.ndarray,
        place: tuple[int, ...],
        grid: tuple[int, ...],
        shared: int,
    ) -> None:
        self._parameters = parameters
        self._memory = {"global": memory, "shared": np.zeros(shared, np.uint8)}
        self._special = {"%tid.x": np.arange(THREADS), "global_smem": 0}
        for axis, at, count in zip("xyz", place, grid, strict=False):
            self._special |= {f"%ctaid.{axis}": at, f"%nctaid.{axis}": count}
        self._registers: dict[str, np.ndarray] = {}

    def run(self, instructions: list[str], labels: Mapping[str, int]) -> None:
        """Run to the end."""
        at = 0
        while True:
            found = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)\s*(.*)", instructions[at])
            assert found, instructions[at]
            negated, predicate, name, rest = found.groups()
            active = np.ones(THREADS, bool)
            if predicate:
                active = self._registers[predicate].astype(bool) ^ bool(negated)
            arguments = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]]+", rest)
            at += 1
            if name == "ret":
                return
            if name.startswith("bra"):
                assert active.all() or not active.any(), "threads part"
                at = labels[arguments[0]] if active.all() else at
            elif not name.startswith(IGNORED):
                self._active = active
                self._step(name.split("."), *arguments)

    def _step(self, name: list[str], target: str, *arguments: str) -> None:
        """Carry out an instruction."""
        first = name[0]
        if first in ("ld", "st", "mov", "cvt", "mma", "ldmatrix", "stmatrix", "mad", "shfl"):
            getattr(self, f"_{first}")(name, target, *arguments)
            return
        if name[-1] == "pred":
            x, y = (self._read(a).astype(bool) for a in arguments)
            self._write(target, COMBINED[first](x, y))
        elif first == "setp":
            read = self._signed if name[2] == "s32" else self._read
            self._write(target, COMPARED[name[1]](*map(read, arguments)))
        elif first == "selp":
            *values, chosen = map(self._read, arguments)
            self._write(target, np.where(chosen.astype(bool), *values))
        elif name[-1] == "f32":
            self._write_floats(target, self._computed(first, *map(self._floats, arguments)))
        elif name[-1] == "bf16x2":
            x, y = map(self._read, arguments)
            low, high = (rounded(widened(x, h) * widened(y, h)) for h in (0, 1))
            self._write(target, low | high << np.uint64(16))
        elif name[1] == "wide" or first in ("mul", "neg"):
            self._mad(name, target, *arguments, *(["-1"] if first == "neg" else []), "0")
        else:
            value = self._integers(first, name[1], *arguments)
            self._write(target, value & LOW if name[1].endswith("32") else value)

    def _computed(self, name: str, x: np.ndarray, y: Any = None) -> np.ndarray:
        with np.errstate(all="ignore"):  # in threads that are masked later
            return np.exp2(x) if name == "ex2" else COMPUTED[name](x, y)

    def _integers(self, name: str, kind: str, *arguments: str) -> np.ndarray:
        x, y, *rest = map(self._read, arguments)
        if name in COMBINED or name in COMPUTED:
            return (COMBINED | COMPUTED)[name](x, y)
        if name in ("shl", "shr"):
            return x << y if name == "shl" else x >> y
        assert name == "bfe", name
        bits = (x >> y) & ((np.uint64(1) << rest[0]) - np.uint64(1))
        negative = (bits >> (rest[0] - np.uint64(1))) & np.uint64(kind[0] == "s")
        return bits - (negative << rest[0])

    def _read(self, name: str) -> np.ndarray:
        """A register or a constant, uint64."""
        if name in self._special:
            return np.broadcast_to(self._special[name], THREADS).astype(np.uint64)
        if name.startswith("%"):
            return self._registers[name]
        value = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(THREADS, value & (2**64 - 1), np.uint64)

    def _signed(self, name: str) -> np.ndarray:
        return self._read(name).astype(np.uint32).view(np.int32).astype(np.int64)

    def _floats(self, name: str) -> np.ndarray:
        return self._read(name).astype(np.uint32).view(np.float32)

    def _write(self, name: str, value: np.ndarray) -> None:
        before = self._registers.get(name, np.zeros(THREADS, np.uint64))
        self._registers[name] = np.where(self._active, value.astype(np.uint64), before)

    def _write_floats(self, name: str, value: np.ndarray) -> None:
        self._write(name, value.astype(np.float32).view(np.uint32))

    def _mov(self, name: list[str], target: str, source: str) -> None:
        if target.startswith("{"):
            value = self._read(source)
            for half, each in enumerate(_names(target)):
                self._write(each, (value >> np.uint64(16 * half)) & np.uint64(0xFFFF))
        elif source.startswith("{"):
            low, high = map(self._read, _names(source))
            self._write(target, low | high << np.uint64(16))
        else:
            value = self._read(source)
            self._write(target, value & LOW if name[1].endswith("32") else value)

    def _cvt(self, name: list[str], target: str, *sources: str) -> None:
        if name[1] == "rn":
            high, *low = (rounded(self._floats(each)) for each in sources)
            self._write(target, high << np.uint64(16) | low[0] if low else high)
        elif name[1:] == ["f32", "bf16"]:
            self._write(target, (self._read(*sources) & np.uint64(0xFFFF)) << np.uint64(16))
        else:
            assert {name[1][1:], name[2][1:]} == {"32", "64"}
            read: Callable[[str], np.ndarray] = self._signed if name[2] == "s32" else self._read
            value = read(*sources).view(np.uint64)
            self._write(target, value if name[2] == "s32" else value & LOW)

    def _mad(self, name: list[str], target: str, x: str, y: str, added: str) -> None:
        """Also products and negatives, to which nothing is added."""
        kind = name[-1]
        read = self._signed if kind == "s32" else lambda each: self._read(each).view(np.int64)
        wide = name[1] == "wide" or kind.endswith("64")
        left, right = read(x), read(y)
        value = (left * right + self._read(added).view(np.int64)).view(np.uint64)
        self._write(target, value if wide else value & LOW)

    def _shfl(self, name: list[str], target: str, source: str, by: str, *_: str) -> None:
        number = self._read(by).astype(np.int64)
        other = LANE ^ number if name[2] == "bfly" else number & 31
        self._write(target, self._read(source)[WARP * 32 + other])

    def _places(self, address: str, size: int) -> np.ndarray:
        """The bytes that each thread means, [threads, size]."""
        base, _, offset = address.strip("[] ").partition("+")
        first = self._read(base.strip()).astype(np.int64) + int(offset or 0)
        assert not (first[self._active] % size).any(), "an address that is not aligned"
        return first[:, None] + np.arange(size)

    def _ld(self, name: list[str], target: str, address: str) -> None:
        if name[1] == "param":
            value = self._parameters[address.strip("[]")]
            self._write(target, np.full(THREADS, value, np.uint64))
            return
        names, width = _names(target), int(name[-1][1:]) // 8
        data = np.zeros((THREADS, width * len(names)), np.uint8)
        places = self._places(address, data.shape[1])[self._active]
        data[self._active] = self._memory[name[1]][places]
        for each, value in zip(names, data.view(f"u{width}").T, strict=True):
            self._write(each, value)

    def _st(self, name: list[str], address: str, source: str) -> None:
        width = int(name[-1][1:]) // 8
        words = [self._read(each).astype(f"u{width}") for each in _names(source)]
        data = np.stack(words, axis=1).view(np.uint8)
        places = self._places(address, data.shape[1])
        self._memory[name[1]][places[self._active]] = data[self._active]

    def _ldmatrix(self, name: list[str], target: str, address: str) -> None:
        lines = self._memory["shared"][self._places(address, 16)].view(np.uint16)
        for matrix, each in enumerate(_names(target)):
            at = WARP * 32 + 8 * matrix
            if "trans" in name:
                low, high = (lines[at + PAIR + half, ROW] for half in (0, 1))
            else:
                low, high = (lines[at + ROW, PAIR + half] for half in (0, 1))
            self._write(each, low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(16))

    def _stmatrix(self, name: list[str], address: str, source: str) -> None:
        shared, lines = self._memory["shared"].view(np.uint16), self._places(address, 16)[:, 0] // 2
        for matrix, each in enumerate(_names(source)):
            for half in (0, 1):
                row, column = (ROW, PAIR + half)
                if "trans" in name:
                    row, column = column, row
                value = (self._read(each) >> np.uint64(16 * half)).astype(np.uint16)
                shared[lines[WARP * 32 + 8 * matrix + row] + column] = value

    def _mma(self, name: list[str], target: str, *factors: str) -> None:
        assert name[3:] == ["m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"]
        a, b, c = np.zeros((4, 16, 16)), np.zeros((4, 16, 8)), np.zeros((4, 16, 8))
        words = [[self._read(each) for each in _names(factor)] for factor in factors]
        for half in (0, 1):
            for i, word in enumerate(words[0]):
                a[WARP, ROW + 8 * (i % 2), PAIR + half + 8 * (i // 2)] = widened(word, half)
            for i, word in enumerate(words[1]):
                b[WARP, PAIR + half + 8 * i, ROW] = widened(word, half)
        for i, word in enumerate(words[2]):
            c[WARP, ROW + 8 * (i // 2), PAIR + i % 2] = word.astype(np.uint32).view(np.float32)
        out = c + a @ b
        for i, each in enumerate(_names(target)):
            self._write_floats(each, out[WARP, ROW + 8 * (i // 2), PAIR + i % 2])


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.strip("{} ").split(",")]
