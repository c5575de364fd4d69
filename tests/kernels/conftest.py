"""Without a GPU, Triton's kernels run through its interpreter.

Triton reads the variable when it is imported and when a kernel is defined, so both happen here, and
the variable is put back at once: no other test, and no process that one starts, sees it.
"""

import importlib
import os
import pkgutil

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _define_kernels() -> None:
    import twolane.kernels as package

    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


if DEVICE == "cpu":
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pytest.importorskip("triton")
        _define_kernels()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


@pytest.fixture
def device() -> str:
    """Where kernels run in this session."""
    return DEVICE
