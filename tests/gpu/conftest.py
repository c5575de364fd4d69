"""Everything here needs an NVIDIA GPU: `make test-gpu`."""

import pytest
import torch

GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not GPU:
        for item in items:
            if "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
