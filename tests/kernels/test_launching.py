from pathlib import Path

import pytest

from tests.kernels.interpreter import run_without


@pytest.mark.full
def test_a_remembered_launch_is_what_triton_would_launch(tmp_path: Path) -> None:
    """The same compiled form on the same stream, with the same arguments and options."""
    same, forms, remembered = map(int, run_without("launches.py", tmp_path).split())
    assert same == 60
    assert forms == remembered
