import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WIDE = {"_rms_norm", "_qkv_rope_write", "_silu_mul", "_embed", "gather_kernel"}


@pytest.mark.parametrize(
    ("options", "count"), [([], 17), pytest.param(["--full"], 50, marks=pytest.mark.full)]
)
def test_kernels_compile_for_hopper(tmp_path: Path, options: list[str], count: int) -> None:
    """Without spills; and those that move data do so 16 bytes at a time."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compiling.py"), *options],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == count
    assert [k for k in kernels if k["spills"]] == []
    moving = [k for k in kernels if k["kernel"] in WIDE]
    assert [k for k in moving if k["load"] < 16 or k["store"] < 16] == []
