"""Tiny models gain nothing from threads, and lose much when other tests run beside them."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> None:
    torch.set_num_threads(1)
