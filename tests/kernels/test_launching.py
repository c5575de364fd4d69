import os
import subprocess
import sys
from pathlib import Path


def test_a_remembered_launch_is_what_triton_would_launch(tmp_path: Path) -> None:
    """The same compiled form on the same stream, with the same arguments and options."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("launches.py")],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    same, forms, remembered = map(int, done.stdout.split())
    assert same == 60
    assert forms == remembered
