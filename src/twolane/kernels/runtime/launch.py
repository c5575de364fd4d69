"""Launches of Triton kernels that cost the host little.

Layers of short prompts take the GPU less time than Triton takes to find out, at each launch, which
compiled form of a kernel the arguments want. That is a matter of few properties of theirs
(`_property`), so what Triton found for these is remembered and launched directly.
"""

from typing import Any

from torch import Tensor

_ALIGNMENT = 16
"""Bytes of an address and multiples of a number that Triton compiles a kernel of its own for."""

_forms: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, and the constants that follow the arguments."""


def power_of_2(n: int) -> int:
    """Return the least power of 2 that is not below `n`; Triton's own takes far longer."""
    return 1 << (n - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `kernel[grid](*arguments, **options)` on torch's current stream and device.

    Args:
        kernel: A `triton.jit` kernel without `do_not_specialize` or types that Triton follows (it
            does not follow `tl.tensor`). It must be a global, because kernels are kept by identity.
        grid: one to three numbers of programs.
        arguments: tensors and numbers: all that is not a constant, in the kernel's order.
        options: The kernel's constants, in its order, and options of Triton.
    """
    place = arguments[0].device
    key = (id(kernel), place, *map(_property, arguments), *options.values())
    form = _forms.get(key)
    if form is not None:
        compiled, constants = form
        compiled[(*grid, 1, 1)](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, **options)
    if compiled is not None:  # the interpreter compiles nothing
        names = kernel.arg_names[len(arguments) :]
        _forms[key] = compiled, tuple(options[name] for name in names)


def _property(argument: Any) -> Any:
    """Return what Triton 3.6 specialises on: type, alignment; of ints 1, multiples, width."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if isinstance(argument, int):
        return argument == 1, argument % _ALIGNMENT == 0, -(2**31) <= argument < 2**31
    return float
