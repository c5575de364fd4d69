"""The one launch that sums over ranks, adds and normalises, acted out by threads of the CPU."""

import ctypes
from pathlib import Path

import pytest
import torch

from tests.kernels.on_host import build, needs_compiler
from twolane.kernels.collectives.reduce_norm import source
from twolane.kernels.fused import add_rms_norm

EPS, LAUNCHES = 1e-6, 4


def launched(
    folder: Path, ranks: int, rows: int, dtype: torch.dtype, text: str
) -> tuple[str, bool]:
    """What went wrong, and whether all ranks have what they are to have."""
    wide = dtype == torch.float32
    width, blocks = (128 if wide else 256), 2
    options = {"HIDDEN": width, "RANKS": ranks, "FLOAT": int(wide), "EARLY": 1}
    defined = [f"-D{name}={value}" for name, value in options.items()]
    library = build("reduce_norm_host.cc", text, [*defined, "-pthread"], folder)
    draw = torch.Generator().manual_seed(rows)
    inputs = torch.randn(LAUNCHES, ranks, rows, width, generator=draw).to(dtype)
    first = torch.randn(rows, width, generator=draw).to(dtype)
    weight = torch.randn(width, generator=draw).to(dtype)
    residuals, outs = first.expand(ranks, rows, width).clone(), torch.zeros_like(inputs)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (inputs, residuals, weight, outs)]
    said = library.run(LAUNCHES, rows, blocks, ctypes.c_float(EPS), *pointers).decode()
    residual, right = first.clone(), True
    for i in range(LAUNCHES):
        total = torch.stack([part.float() for part in inputs[i]]).sum(0).to(dtype)
        normal = add_rms_norm(total, residual, weight, EPS, torch.empty_like(residual))
        right &= all(torch.allclose(out, normal, rtol=0.02, atol=1e-3) for out in outs[i])
        right &= all(torch.equal(out, outs[i, 0]) for out in outs[i])
    return said, right and all(torch.allclose(each, residual, rtol=0.02) for each in residuals)


@needs_compiler
@pytest.mark.parametrize(
    ("ranks", "rows", "dtype"),
    [
        (2, 9, torch.bfloat16),  # the last group is not whole
        pytest.param(2, 1, torch.float32, marks=pytest.mark.full),  # rank 1 sums nothing
        pytest.param(4, 6, torch.float32, marks=pytest.mark.full),
    ],
)
def test_all_ranks_have_the_normalised_sum(
    ranks: int, rows: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In launches that follow each other, with ranks ahead of others."""
    assert launched(tmp_path, ranks, rows, dtype, source()) == ("", True)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("which", [0, 1])
def test_blocks_must_meet_before_they_read_and_when_they_have_written(
    which: int, tmp_path: Path
) -> None:
    begin = source().rindex('extern "C"')
    calls = source()[begin:].split("    meet(a);\n")
    calls[which : which + 2] = [calls[which] + calls[which + 1]]
    broken = source()[:begin] + "    meet(a);\n".join(calls)
    tries = [launched(tmp_path, 2, 9, torch.bfloat16, broken) for _ in range(5)]
    assert tries != [("", True)] * 5
