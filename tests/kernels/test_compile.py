import json
from pathlib import Path

import pytest

from tests.kernels.interpreter import run_without

WIDE = {"_rms_norm", "_qkv_rope_write", "_act_mul", "_embed", "_lay_out", "gather_kernel"}
WIDE |= {"_side_by_side"}


@pytest.mark.parametrize(
    ("options", "count"), [([], 11), pytest.param(["--full"], 120, marks=pytest.mark.full)]
)
def test_kernels_compile_for_hopper(tmp_path: Path, options: list[str], count: int) -> None:
    """Without spills, and without reductions that Triton gets wrong; those that move data do so 16
    bytes at a time."""
    kernels = [
        json.loads(line) for line in run_without("compiling.py", tmp_path, *options).splitlines()
    ]
    assert len(kernels) == count
    assert [k for k in kernels if k["spills"] or k["doubtful"]] == []
    moving = [k for k in kernels if k["kernel"] in WIDE]
    assert [k for k in moving if k["load"] < 16 or k["store"] < 16] == []
