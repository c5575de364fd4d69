"""A KV cache in e4m3: what it holds, what that costs, and that reuse changes nothing."""

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.model.checkpoints import LAYERS, VOCAB, load_decoder, make_checkpoint, reference
from tests.model.doubled import doubled
from tests.model.passes import PAGE, expected, prompt
from tests.parity.prompts import random_requests
from tests.parity.schedules import schedules
from tests.parity.serving import serve
from twolane.model import fp8
from twolane.model.attention import Batch, KVCache, Segment
from twolane.model.decoder import Decoder
from twolane.model.load.hub import resolve

FAMILIES = ("qwen3", "qwen2-sliding")
REQUESTS = random_requests(VOCAB)[::3]
SHORT = {
    *(("qwen3", schedule) for schedule in ("static-split-k3", "every-layer")),
    ("qwen2-sliding", "chunked-48"),
}


@cache
def decoder(family: str) -> Decoder:
    """In float64: whether a number is rounded up or down cannot depend on what runs beside it."""
    with TemporaryDirectory() as folder:
        path = make_checkpoint(family, Path(folder) / family, seed=1)
        return doubled(load_decoder(resolve(str(path))))


@cache
def alone(family: str) -> list[list[int]]:
    """The tokens of requests that are served one at a time, without a prefix cache."""
    system = schedules(LAYERS)["prefill-first"]()
    pool = {"pages": 1024, "page_size": 8, "running": 1, "prefix_cache": False, "rounded": True}
    return serve(decoder(family), system, REQUESTS, **pool).outputs


@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        pytest.param(*case, marks=[] if case in SHORT else pytest.mark.full)
        for case in product(FAMILIES, schedules(LAYERS))
    ],
)
def test_tokens_are_the_same_whatever_is_reused(family: str, schedule: str) -> None:
    """With prefix hits, in slices and chunks, on all levels, and after preemption."""
    turn = list(schedules(LAYERS)).index(schedule)
    pool = {"pages": (1024, 80)[turn % 2], "page_size": 8, "running": 16, "prefix_cache": True}
    served = serve(decoder(family), schedules(LAYERS)[schedule](), REQUESTS, **pool, rounded=True)
    assert served.prefix_hits > 0
    assert served.outputs == alone(family)


def test_numbers_keep_four_digits_and_large_ones_fit() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 64, generator=draw) * torch.logspace(-20, 20, 1000)[:, None]
    x[0], x[1, 0], x[2] = 0, 448 * 2**9, 449.0
    values, exponents = fp8.quantise_heads(x)
    back = fp8.dequantise_heads(values, exponents, torch.float32)
    assert values.float().isfinite().all() and values.float().abs().max() == 448
    assert exponents[1] == 9 and exponents[2] == 1
    large = x.abs() > x.abs().amax(dim=1, keepdim=True) / 1000
    assert ((back - x).abs() <= x.abs() / 16)[large].all()
    again, same = fp8.quantise_heads(back)
    assert torch.equal(fp8.dequantise_heads(again, same, torch.float32), back)
    assert torch.equal(fp8.dequantise_heads(values, exponents, torch.bfloat16).float(), back)


def test_what_rounding_costs(tmp_path: Path) -> None:
    """Logits differ, and by little."""
    path = make_checkpoint("qwen3", tmp_path / "qwen3", seed=1)
    plain, tokens = load_decoder(resolve(str(path))), prompt(60)
    kv = KVCache(plain.spec, 8, PAGE, plain.dtype, rounded=True)
    batch = Batch.build([Segment(0, 60, range(8))], PAGE)
    hidden = plain.embed(tokens)
    for i in range(plain.spec.layers):
        hidden = plain.layer(i, hidden, batch, kv)
    logits, meant = plain.head(hidden), expected(reference(path), tokens)
    assert 0.001 < (logits - meant).norm() / meant.norm() < 0.15
