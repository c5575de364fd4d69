"""Launch the kernels of adapters as PTX for sm_90, acted out on the CPU (`ptx.py`).

    python tests/kernels/acting_out.py ROWS INPUTS WIDTHS RANK [--silu]

compares what adapters of three ranks add with PyTorch, and prints the relative error. No GPU is
needed. Widths are those of a product's sections, separated by commas.
"""

import argparse
import inspect
from typing import Any

import numpy as np
import torch
import triton
from compiling import source
from ptx import Program
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from twolane.kernels import lora

ADAPTERS = (2, -1, 1, 0, 2, -1)
"""The adapter of each request slot."""
SLOTS = 3


def act_out(
    kernel: Any, *args: Any, grid: Any, num_warps: int = 4, num_stages: int = 3, **kwargs: Any
) -> None:
    """In place of `JITFunction.run`; the kernel has four warps."""
    kwargs.pop("warmup")
    kwargs.pop("launch_pdl", None)
    values = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source(kernel, values), GPUTarget("cuda", 90, 32), options)
    given = [value for value in args if not (isinstance(value, int) and value == 1)]
    tensors = {id(value): value for value in given if isinstance(value, torch.Tensor)}
    memory, places = np.zeros(256, np.uint8), {}
    for number, tensor in tensors.items():
        places[number] = len(memory)
        data = tensor.view(torch.uint8).numpy().ravel()
        memory = np.concatenate([memory, data, np.full(-len(data) % 256, 255, np.uint8)])
    parameters = {
        f"{kernel.fn.__name__}_param_{i}": places.get(id(value), value)
        for i, value in enumerate(given)
    }
    Program(built.asm["ptx"], built.metadata.shared).run((*grid, 1, 1)[:3], parameters, memory)
    for number, tensor in tensors.items():
        data = memory[places[number] :][: tensor.nbytes].copy()
        tensor.copy_(torch.from_numpy(data).view(tensor.dtype).view(tensor.shape))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def arranged(adapters: list[int], rank: int) -> lora.RowTiles:
    """Rows in tiles, as `RowTiles.arrange` deals them."""
    count, before = len(adapters), 0
    tiles = lora.RowTiles.of(count, SLOTS, 3 * rank, torch.device("cpu")).of_first(count)
    tiles.rows.fill_(-1), tiles.owners.fill_(-1), tiles.sums.fill_(torch.nan)
    size = tiles.rows.shape[1]
    for owner in range(SLOTS + 1):
        mine = [row for row, slot in enumerate(adapters) if slot % (SLOTS + 1) == owner]
        for first in range(0, len(mine), size):
            rows, tile = mine[first : first + size], owner + before // size + first // size
            tiles.rows[tile, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
            tiles.owners[tile] = owner
        before += len(mine)
    return tiles


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rows", "inputs", "widths", "rank"):
        parser.add_argument(name)
    parser.add_argument("--silu", action="store_true")
    given = parser.parse_args()
    count, inputs, rank = (int(getattr(given, name)) for name in ("rows", "inputs", "rank"))
    widths = [int(width) for width in given.widths.split(",")]
    JITFunction.run = act_out
    lora.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}
    torch.manual_seed(0)
    room, ends = max(16, 1 << (rank - 1).bit_length()), np.cumsum(widths).tolist()
    ranks = torch.tensor([0, max(1, rank // 2), rank], dtype=torch.int32)
    a = random(SLOTS, len(widths) * room, inputs) * inputs**-0.5
    b = random(SLOTS, room, ends[-1]) * rank**-0.5
    matrices = lora.AdapterMatrices(a, b, ranks, tuple(ends))
    adapters = [ADAPTERS[slot] for slot in torch.randint(0, len(ADAPTERS), (count,)).tolist()]
    tiles, x, out = arranged(adapters, room), random(count, inputs), random(count, ends[-1])
    meant = out.double()
    for row, slot in enumerate(adapters):
        used = int(ranks[slot]) if slot >= 0 else 0
        for section, (end, width) in enumerate(zip(ends, widths, strict=True)):
            first = section * room
            sums = a[slot, first : first + used].double() @ x[row].double()
            meant[row, end - width : end] += sums @ b[slot, :used, end - width : end].double()
    lora.shrink(x, matrices, tiles)
    if given.silu:
        gate, up = meant.chunk(2, dim=1)
        meant, act = torch.nn.functional.silu(gate) * up, random(count, widths[0])
        lora.expand_silu(matrices, tiles, out, act)
        out = act
    else:
        lora.expand(matrices, tiles, out)
    print(float((out - meant).norm() / meant.norm()))


if __name__ == "__main__":
    main()
