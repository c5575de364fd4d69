"""Launches as a driver sees them, `launch`'s and Triton's own: `python tests/kernels/launches.py`.

Kernels are compiled for sm_90; no GPU is needed. Prints how many launches were the same in both
ways and how many compiled forms they had.
"""

import itertools
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from twolane.kernels.runtime.launch import _forms, launch


class Recorder:
    """Stands where Triton's C launcher is."""

    launches: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, source: object, metadata: object) -> None:
        self.form = len(Recorder.launches), id(self)

    def __call__(self, *arguments: object) -> None:
        Recorder.launches.append((self.form, *arguments))


class Driver:
    """What Triton asks of a driver to launch on a Hopper GPU."""

    launcher_cls = Recorder

    class utils:
        @staticmethod
        def load_binary(*_: object) -> tuple[int, ...]:
            return 1, 2, 32, 0, 1024

        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": 232_448}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 7


@triton.jit
def add(
    x: tl.tensor, y: tl.tensor, stride: tl.tensor, offset: tl.tensor, scale: tl.tensor,
    BLOCK: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * stride + tl.arange(0, BLOCK) + offset
    value = tl.load(x + places).to(tl.float32) * scale
    if TWICE:
        value *= 2
    tl.store(y + places, value)


def main() -> None:
    driver.set_active(Driver())
    memory = torch.zeros(1024)
    same, forms = 0, set()
    numbers = (1, 0, 3, 16, 2**31 - 1, 2**31, 2**33)
    kinds = (memory, memory[1:], memory[4:], memory.bfloat16())
    calls = [(x, memory, n, 5, 0.5, 64, False) for x in kinds for n in (1, 3, 16)]
    calls += [(memory, memory, a, b, 1.0, 64, False) for a, b in itertools.product(numbers, (1, 4))]
    calls += [
        (memory, memory, 3, 3, 1.0, block, twice) for block in (64, 128) for twice in (False, True)
    ]
    for *arguments, block, twice in [*calls, *reversed(calls)]:
        begun = len(Recorder.launches)
        add[(9, 2)](*arguments, BLOCK=block, TWICE=twice, num_warps=2)
        for _ in range(2):  # found anew, or remembered
            launch(add, (9, 2), *arguments, BLOCK=block, TWICE=twice, num_warps=2)
        own, first, second = ((each[0], *map(key, each[1:])) for each in Recorder.launches[begun:])
        assert own == first == second, (own, first, second)
        same, forms = same + 1, forms | {own[0]}
    print(same, len(forms), len(_forms))


def key(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return argument if isinstance(argument, int | float | tuple) else type(argument)


if __name__ == "__main__":
    main()
