"""Without a GPU, Triton's kernels run through its interpreter.

Triton reads a variable when it is imported, when a kernel is defined and when one runs. So it is
set around the first two here, before any test's imports bring Triton in, and during each test of
this folder; no other test, and no process that one starts, sees it.
"""

import dataclasses
import functools
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _define_kernels() -> None:
    import twolane.kernels as package

    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".kernels.cpu." not in module.name:  # these need no interpreter, but llvmlite
            importlib.import_module(module.name)


def _mend_loop_bounds() -> None:
    """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _mend_rounding() -> None:
    """Triton 3.6 cuts float32 off where a GPU rounds to the nearest, ties to even.

    Kernels would be off by twice as much as they are, and always towards zero: bfloat16 in all
    numbers, e4m3 in those below its normal range.
    """
    from triton import language
    from triton.runtime import interpreter

    original: Callable[..., Any] = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) == (language.float32, language.float8e4nv):
            return torch.from_numpy(data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) != (language.float32, language.bfloat16):
            return original(data, source, target, rounding)
        bits = data.view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16)

    interpreter._convert_float = convert


def _mend_bfloat16_products() -> None:
    """Triton 3.6 keeps bfloat16 as its bits, and multiplies matrices of these as whole numbers."""
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original: Callable[..., Any] = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), language.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widened(a), widened(b), *rest)

    builder.create_dot = create_dot


def _mend_nested_calls() -> None:
    """Triton 3.6 patches its language anew for each call of a function inside a kernel.

    That it is patched already can be seen, and takes two milliseconds less.
    """
    from triton import language
    from triton.runtime import interpreter

    original: Callable[..., Any] = interpreter._patch_lang
    modules: dict[Any, list[Any]] = {}

    def patch_language(kernel: Any) -> Any:
        if kernel not in modules:
            known = (language, language.core)
            modules[kernel] = [m for m in known if m in kernel.__globals__.values()]
        if any(language.core.is_builtin(module.load) for module in modules[kernel]):
            return original(kernel)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_language


def _leave_out_vain_checks() -> None:
    """Triton 3.6 computes all sums and products of integers anew in 64 bits, to assert that they
    have not overflowed, and asserts nothing unless it debugs."""
    from triton.runtime.interpreter import interpreter_builder as builder

    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_shapes() -> None:
    """Triton 3.6 makes objects for each number of a tensor's shape, their types and those types'
    names, for each value that a kernel computes. Here it makes them once a shape, and names, which
    messages alone have, when they are asked for: kernels run in half of the time."""
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, int]:
        return core.tuple(sizes), core.validate_block_shape(sizes)

    @functools.cache
    def constants_of(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))

    def block_type(self: Any, element: Any, shape: Any) -> None:
        sizes = [core._unwrap_if_constexpr(size) for size in shape]
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element
        self.shape, self.numel = shape_of(*sizes)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants_of(*(type.shape.values if type.is_block() else ()))

    def named(self: Any) -> str:
        return f"<{self.shape}, {self.element_ty}>"

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.block_type.name = property(named)
    stored_as: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        scalar = of.scalar
        if (found := known.get(scalar.name)) is None:
            found = known[scalar.name] = stored_as(scalar)
        return found

    interpreter._get_np_dtype = numpy_type


def run_without(script: str, cache: Path, *options: str) -> str:
    """What a script of this folder prints; it compiles kernels, into that folder."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *options],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def define() -> None:
    """Import Triton and define all kernels for the interpreter, if there is no GPU."""
    if DEVICE != "cpu" or importlib.util.find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        _mend_loop_bounds()
        _mend_rounding()
        _mend_bfloat16_products()
        _mend_nested_calls()
        _leave_out_vain_checks()
        _remember_shapes()
        _define_kernels()
