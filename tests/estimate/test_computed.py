"""Tokens as the device computes them: the sizes are those of the lanes."""

import msgspec
import pytest

from tests.estimate import synthetic
from twolane.estimate import Load
from twolane.estimate.computed import BUCKETS, SLOPES, STEPS, Computed


@pytest.fixture(scope="module")
def gpu() -> Computed:
    profile = synthetic.profile(rounds=1)
    key = msgspec.structs.replace(profile.key, device="cuda (NVIDIA H200)")
    return Computed.on(msgspec.structs.replace(profile, key=key))


def test_sizes_are_those_of_the_lanes(gpu: Computed):
    from twolane.kernels import linear
    from twolane.kernels.prefill_attention_flashinfer import tile_tokens
    from twolane.lanes.cuda import decode

    assert decode.BUCKETS == BUCKETS
    assert linear.ROWS[:-1] == (*STEPS, *SLOPES[1:])
    assert gpu.tile == tile_tokens(synthetic.SHAPE.head_dim)


def test_a_gpu_pads(gpu: Computed):
    prompts = Load([1829, 100], [0, 300])
    assert [gpu.new(Load([n], [0]), 132) for n in (1, 64, 65, 1829, 2048, 2049)] == [
        64, 64, 128, 2048, 2048, 2049,
    ]  # fmt: skip
    assert [gpu.new(Load([n], [0]), 20) for n in (300, 384, 385, 398)] == [384, 384, 385, 398]
    assert gpu.pairs(prompts) == (1829 * 1920 + 100 * 128, 128 * 300)
    assert [gpu.rows(Load.decode([5] * n)) for n in (1, 3, 250, 256, 257)] == [1, 4, 256, 256, 320]


def test_others_do_not():
    prompts, plain = Load([1829, 100], [0, 300]), Computed()
    assert plain.new(prompts, 132) == 1929
    assert plain.pairs(prompts) == (prompts.squares, prompts.products)
    assert plain.rows(Load.decode([5] * 3)) == 3
