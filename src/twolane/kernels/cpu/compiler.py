"""Compiles functions of whole numbers, written in a part of Python, with LLVM.

`llvmlite` brings LLVM, so that no compiler is needed where the program runs; numba would need a
second to be imported and minutes to compile these functions. What the part of Python has: int64
numbers, assignments, `if`, `while`, `for` over a range, arithmetic, comparisons, `min` and `max`,
names of constants, and calls of each other and of instructions (`instructions.py`). Divisions are
of numbers that are not negative.
"""

import ast
import contextlib
import hashlib
import inspect
import mmap
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, CFUNCTYPE, c_int64, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding, ir

I1, I64 = ir.IntType(1), ir.IntType(64)

Emit = Callable[..., Any]
"""Emits an instruction from its arguments; may return a number."""

_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "sdiv",
    ast.Mod: "srem",
    ast.LShift: "shl",
    ast.RShift: "ashr",
    ast.BitAnd: "and_",
}
_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


def declared(module: Any, name: str, kind: Any) -> Any:
    """Return a function of a module, or one outside of it, by its name and type."""
    return module.globals.get(name) or ir.Function(module, kind, name)


class Program:
    """Functions that become one LLVM module.

    Args:
        instructions: Instructions by their names; they are no part of what calls them.
        code: Makes the first argument of an instruction, of the builder of its function.
    """

    def __init__(self, instructions: Mapping[str, Emit], code: Callable[[Any], Any]) -> None:
        self._module = ir.Module("twolane")
        for name, emit in instructions.items():
            function = self._function(name, len(inspect.signature(emit).parameters) - 1)
            function.linkage = "internal"
            function.attributes.add("noinline")
            builder = ir.IRBuilder(function.append_basic_block())
            result = emit(code(builder), *function.args)
            builder.ret(I64(0) if result is None else result)

    def _function(self, name: str, count: int) -> Any:
        return ir.Function(self._module, ir.FunctionType(I64, [I64] * count), name)

    def add(self, function: Callable[..., Any], *, exported: bool = False) -> None:
        """Translate a function; what it calls was added before."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        made = self._function(tree.name, len(tree.args.args))
        made.linkage = "external" if exported else "internal"
        names = [arg.arg for arg in tree.args.args]
        _Translation(self._module, made, function.__globals__).translate(names, tree.body)

    def object_code(self) -> bytes:
        """Compile the module for this machine."""
        parsed = binding.parse_assembly(str(self._module))
        parsed.verify()
        machine = _machine()
        options = binding.create_pipeline_tuning_options(speed_level=2)
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        code: bytes = machine.emit_object(parsed)
        return code


@lru_cache(1)
def host_features() -> Any:
    """Return LLVM's features of this CPU by name; tile registers are one if Linux grants them."""
    features = binding.get_host_cpu_features()
    arch_prctl, ask, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, for all threads
    if features.get("amx-int8") and CDLL(None).syscall(arch_prctl, ask, tile_data) != 0:
        features["amx-int8"] = False
    return features


def _machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    features = host_features().flatten()
    cpu = binding.get_host_cpu_name()
    return target.create_target_machine(cpu=cpu, features=features, opt=2, jit=True, reloc="pic")


class _Translation:
    """Translates the statements of a function.

    Args:
        module: Where other functions are.
        function: The function, without blocks.
        known: Constants by their names.
    """

    def __init__(self, module: Any, function: Any, known: Mapping[str, Any]) -> None:
        self._module, self._function, self._known = module, function, known
        self._entry = ir.IRBuilder(function.append_basic_block())
        self._begin = function.append_basic_block()
        self._builder = ir.IRBuilder(self._begin)
        self._variables: dict[str, Any] = {}

    def translate(self, names: Sequence[str], body: Sequence[ast.stmt]) -> None:
        """Write the function with arguments of these names."""
        for name, value in zip(names, self._function.args, strict=True):
            self._builder.store(value, self._variable(name))
        self._all(body)
        if not self._builder.block.is_terminated:
            self._builder.ret(I64(0))
        self._entry.branch(self._begin)

    def _variable(self, name: str) -> Any:
        if name not in self._variables:
            self._variables[name] = self._entry.alloca(I64)
        return self._variables[name]

    def _all(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, s: ast.stmt) -> None:
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._builder.store(self._value(value), self._variable(name))
            case ast.Assign(targets=[ast.Tuple(elts=to)], value=ast.Tuple(elts=values)):
                made = [self._value(value) for value in values]
                for place, each in zip(to, made, strict=True):
                    assert isinstance(place, ast.Name)
                    self._builder.store(each, self._variable(place.id))
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                new = self._binary(op, self._named(name), self._value(value))
                self._builder.store(new, self._variable(name))
            case ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case ast.Expr(value=value):
                self._value(value)
            case ast.Return(value=value):
                self._builder.ret(I64(0) if value is None else self._value(value))
            case ast.If(test=test, body=body, orelse=other):
                with self._builder.if_else(self._condition(test)) as (then, otherwise):
                    for branch, statements in ((then, body), (otherwise, other)):
                        with branch:
                            self._all(statements)
            case ast.While(test=test, body=body):
                self._loop(lambda: self._condition(test), lambda: self._all(body))
            case ast.For(target=ast.Name(id=name), iter=ast.Call(args=args), body=body):
                self._for(self._variable(name), [self._value(arg) for arg in args], body)
            case ast.Pass():
                pass
            case _:
                raise NotImplementedError(ast.unparse(s))

    def _loop(self, condition: Callable[[], Any], body: Callable[[], None]) -> None:
        head, inner, after = (self._function.append_basic_block() for _ in range(3))
        self._builder.branch(head)
        self._builder.position_at_end(head)
        self._builder.cbranch(condition(), inner, after)
        self._builder.position_at_end(inner)
        body()
        if not self._builder.block.is_terminated:
            self._builder.branch(head)
        self._builder.position_at_end(after)

    def _for(self, place: Any, args: Sequence[Any], body: Sequence[ast.stmt]) -> None:
        first, end, step = (
            *((I64(0), args[0]) if len(args) == 1 else args[:2]),
            args[2] if len(args) == 3 else I64(1),
        )
        self._builder.store(first, place)

        def turn() -> None:
            self._all(body)
            if not self._builder.block.is_terminated:
                self._builder.store(self._builder.add(self._builder.load(place), step), place)

        self._loop(lambda: self._builder.icmp_signed("<", self._builder.load(place), end), turn)

    def _value(self, e: ast.expr) -> Any:
        b = self._builder
        match e:
            case ast.Constant(value=int(value)):
                return I64(int(value))
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute(value=ast.Name(id=name), attr=field):
                return I64(int(getattr(self._known[name], field)))
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self._value(left), self._value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return b.neg(self._value(operand))
            case ast.IfExp(test=test, body=body, orelse=other):
                return b.select(self._condition(test), self._value(body), self._value(other))
            case ast.Call(func=ast.Name(id=("min" | "max") as name), args=[left, right]):
                one, other = self._value(left), self._value(right)
                sign = "<" if name == "min" else ">"
                return b.select(b.icmp_signed(sign, one, other), one, other)
            case ast.Call(func=ast.Name(id=name), args=args):
                values = [self._value(arg) for arg in args]
                return b.call(self._module.get_global(name), values)
            case ast.Compare() | ast.BoolOp():
                return b.zext(self._condition(e), I64)
        raise NotImplementedError(ast.unparse(e))

    def _named(self, name: str) -> Any:
        if name in self._variables:
            return self._builder.load(self._variables[name])
        return I64(int(self._known[name]))

    def _binary(self, op: ast.operator, left: Any, right: Any) -> Any:
        return getattr(self._builder, _BINARY[type(op)])(left, right)

    def _condition(self, e: ast.expr) -> Any:
        """Return a condition, i1; both sides of `and` and `or` are computed."""
        b = self._builder
        match e:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return b.icmp_signed(_COMPARED[type(op)], self._value(left), self._value(right))
            case ast.BoolOp(op=op, values=[left, right]):
                join = b.and_ if isinstance(op, ast.And) else b.or_
                return join(self._condition(left), self._condition(right))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return b.not_(self._condition(operand))
        return b.icmp_signed("!=", self._value(e), I64(0))


class Compiled:
    """Functions of compiled code, called without Python's lock.

    Args:
        code: What `Program.object_code` returned, on this machine.
        counts: Number of arguments of each function, by their names.
    """

    def __init__(self, code: bytes, counts: Mapping[str, int]) -> None:
        machine = _machine()
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._functions = {
            name: CFUNCTYPE(c_int64, *[c_int64] * n)(self._engine.get_function_address(name))
            for name, n in counts.items()
        }

    def __getitem__(self, name: str) -> Callable[..., int]:
        return self._functions[name]


def release() -> None:
    """Give back the memory of LLVM, 50 to 70 MB: what is needed again is read from its file."""
    # Of parts without changes of this process; others could not be read again.
    part = re.compile(
        r"^([\da-f]+)-([\da-f]+) .*/libllvmlite\.so\n(?:\w+:.*\n)*?Anonymous: +0 kB", re.M
    )
    with contextlib.suppress(OSError):
        for first, end in part.findall(Path("/proc/self/smaps").read_text(encoding="utf-8")):
            at, size = int(first, 16), int(end, 16) - int(first, 16)
            CDLL(None).madvise(c_void_p(at), c_size_t(size), mmap.MADV_DONTNEED)


def made_of(sources: Sequence[Path]) -> str:
    """Return a digest of all that code depends on: its sources, LLVM and the CPU."""
    features, cpu = host_features().flatten(), binding.get_host_cpu_name()
    known = [llvmlite.__version__, cpu, features, *(path.read_text() for path in sources)]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]
