"""Build a CUDA C++ source for the CPU; see cuda_host.h."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = ("g++", "-O1", "-std=c++17", "-w", "-fPIC", "-fno-gnu-unique")
"""The compiler; libraries have shared memory of their own, so none of their symbols is unique."""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@functools.cache
def standard() -> "tempfile.TemporaryDirectory[str]":
    """Compile what all sources include of the standard library, a third of each one's time."""
    folder = tempfile.TemporaryDirectory()
    header = shutil.copy(HERE / "standard.h", folder.name)
    subprocess.run([*COMPILER, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    return folder


def build(host: str, source: str, options: Sequence[str], folder: Path) -> ctypes.CDLL:
    """The functions of `host`, a file of this folder that includes `source`, CUDA C++."""
    number = len(list(folder.iterdir()))
    cuda, library = folder / f"{number}.cu", folder / f"{number}.so"
    cuda.write_text(source)
    command = [*COMPILER, "-include", f"{standard().name}/standard.h", "-shared"]
    command += [f'-DSOURCE="{cuda}"', *options, str(HERE / host), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.restype = ctypes.c_char_p
    return loaded
