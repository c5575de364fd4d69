"""Over an FP8 KV cache on the GPU tokens are those of a CPU, whatever is reused and however cut."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.serving import LEVELS, PAGE, serve
from tests.model.checkpoints import LAYERS, VOCAB, load_decoder
from tests.model.doubled import doubled
from tests.parity.judge import Judge, Tally
from tests.parity.prompts import random_requests
from tests.parity.schedules import schedules
from tests.parity.test_tiny import compare
from twolane.devices import DeviceSettings
from twolane.lanes.cuda.machine import CudaMachine
from twolane.model.attention import Batch, KVCache, Segment
from twolane.model.decoder import Decoder
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights

REQUESTS = random_requests(VOCAB)[::2]
SURE = 0.02
"""Float32 rounds a number of the KV cache another way now and then than float64 does."""


class Reference:
    """A decoder on the CPU, in float64, that prefills into an FP8 KV cache."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = doubled(decoder)

    def __call__(self, tokens: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
        """As a model of `transformers`, for one sequence [1, n]."""
        decoder, count = self._decoder, tokens.shape[1]
        pages = -(-count // PAGE)
        kv = KVCache(decoder.spec, pages, PAGE, decoder.dtype, rounded=True)
        batch = Batch.build([Segment(0, count, range(pages))], PAGE)
        hidden = decoder.embed(tokens[0])
        for i in range(decoder.spec.layers):
            hidden = decoder.layer(i, hidden, batch, kv)
        return SimpleNamespace(logits=decoder.head(hidden)[None, -logits_to_keep:])


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> tuple[CudaMachine, Judge]:
    """A GPU with a model, and the same on the CPU."""
    source = resolve(str(checkpoint))
    spec, weights = load_weights(source, dtype="float32", device="cuda")
    judge = Judge(Reference(load_decoder(source)), SURE)
    return CudaMachine(
        spec, weights, DeviceSettings(model="", levels=LEVELS, kv_cache_dtype="fp8")
    ), judge


@pytest.mark.parametrize("reuse", [True, False], ids=["reused", "not reused"])
@pytest.mark.parametrize("schedule", tuple(schedules(LAYERS)))
def test_tokens(schedule: str, reuse: bool, both: tuple[CudaMachine, Judge], tally: Tally) -> None:
    """With and without prefix hits, sliced, chunked and whole, on every level."""
    machine, judge = both
    system = schedules(LAYERS)[schedule]()
    served = serve(machine, system, REQUESTS, pages=2048, running=16, prefix_cache=reuse)
    assert bool(served.prefix_hits) == reuse
    compare(REQUESTS, served, judge, tally)
