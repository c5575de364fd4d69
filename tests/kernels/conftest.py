"""Kernels run through Triton's interpreter where there is no GPU; see `interpreter.py`."""

from importlib.util import find_spec

import pytest

from tests.kernels.interpreter import DEVICE

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> str:
    """Where kernels run in this session."""
    return DEVICE
