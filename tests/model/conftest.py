from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.model.checkpoints import load_decoder
from twolane.model.decoder import Decoder
from twolane.model.load.hub import resolve

from .checkpoints import make_checkpoint, reference


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other crawl where something else runs; tiny models need one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """family → (decoder, the same checkpoint in transformers); each loaded once."""

    @cache
    def load(family: str) -> tuple[Decoder, torch.nn.Module]:
        path = make_checkpoint(family, tmp_path_factory.mktemp("tiny") / family, seed=1)
        return load_decoder(resolve(str(path))), reference(path)

    return load
