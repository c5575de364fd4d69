"""Build a CUDA C++ source for the CPU; see cuda_host.h."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(host: str, source: str, options: Sequence[str], folder: Path) -> ctypes.CDLL:
    """The functions of `host`, a file of this folder that includes `source`, CUDA C++."""
    number = len(list(folder.iterdir()))
    cuda, library = folder / f"{number}.cu", folder / f"{number}.so"
    cuda.write_text(source)
    apart = "-fno-gnu-unique"  # libraries have shared memory of their own
    command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", apart, f'-DSOURCE="{cuda}"']
    subprocess.run([*command, *options, str(HERE / host), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.restype = ctypes.c_char_p
    return loaded
