"""Tokens as the device computes them: the sizes are those of the lanes."""

import dataclasses

import msgspec
import pytest

from tests.estimate import synthetic
from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.computed import SLOPES, SMALL_ROWS, STEPS, Computed
from twolane.estimate.query import Load, decode_step
from twolane.kernels.sizes import BUCKETS, EMPTY_KEYS, FILLED, SIZES, WHOLE


@pytest.fixture(scope="module")
def gpu() -> Computed:
    profile = synthetic.profile(rounds=1)
    return Computed.on(msgspec.structs.replace(profile, machine="cuda", pass_sizes=SIZES))


def test_sizes_are_those_of_the_lanes(gpu: Computed):
    import torch

    from twolane.kernels.prefill_attention import flashinfer_kernels as fa3
    from twolane.kernels.prefill_attention.triton_kernels import tiling
    from twolane.kernels.products import dispatch as linear
    from twolane.lanes.cuda import decode_graphs as decode

    assert decode.BUCKETS == BUCKETS
    assert linear.ROWS[:-1] == STEPS
    assert set(SLOPES) <= set(STEPS)
    assert gpu.steps == STEPS
    assert gpu.tile == fa3.tile_tokens(synthetic.SHAPE.head_dim)
    taken = [tiling(rows, synthetic.SHAPE.head_dim, torch.bfloat16).rows for rows in range(1, 300)]
    assert sorted(set(taken)) == list(SMALL_ROWS)
    assert [taken.count(rows) for rows in SMALL_ROWS[:-1]] == [16, 64 - 16]


def test_a_gpu_pads(gpu: Computed):
    prompts = Load([1829, 100], [0, 300])
    tokens = [gpu.tokens(Load([n], [0])) for n in (1, 64, 65, 300, 385, 1829, 2049)]
    assert tokens == [64, 64, 128, 320, 512, 1920, 2049]
    assert gpu.pairs(prompts) == (1829 * 1920 + 100 * 128, 128 * 300)
    assert gpu.group == 4
    few = Load([20, 14], [1000, 300])  # tiles of 32 tokens, for large ones would be a seventh full
    assert gpu.pairs(few) == pytest.approx(((20 + 14) * 32 / FILLED, (1000 + 300) * 32 / FILLED))
    fewer = Load([4, 3], [1000, 300])
    assert gpu.pairs(fewer) == pytest.approx(((4 + 3) * 4 / FILLED, (1000 + 300) * 4 / FILLED))
    longer = Load([40], [1000])  # more rows than a small tile has: several of them
    assert gpu.pairs(longer) == pytest.approx((40 * 64 / FILLED, 1000 * 64 / FILLED))
    # In the graph of a hybrid pass tiles are large, as far as the SMs read few keys for them.
    assert gpu.pairs(few, rows=WHOLE) == ((20 + 14) * 128, (1000 + 300) * 128)
    assert gpu.pairs(few, rows=WHOLE + 1) == gpu.pairs(few)
    units, heads = synthetic.UNITS, synthetic.SHAPE.heads
    at_most = EMPTY_KEYS * units // heads
    last, next_one = (Load([20], [keys - 20]) for keys in (at_most, at_most + 1))
    assert gpu.pairs(last, rows=64)[0] == 20 * 128
    assert gpu.pairs(next_one, rows=64) == gpu.pairs(next_one)
    assert [gpu.rows(Load.decode([5] * n)) for n in (1, 3, 250, 256, 257)] == [1, 4, 256, 256, 384]


def test_a_simulated_one_pads_too_but_multiplies_one_way(gpu: Computed):
    profile = synthetic.profile(rounds=1)
    profile = msgspec.structs.replace(profile, machine="simulated", pass_sizes=SIZES)
    simulated = Computed.on(profile)
    heads = synthetic.SHAPE.heads
    assert gpu.heads == 0
    assert simulated == dataclasses.replace(gpu, group=0, steps=(), heads=heads)
    assert simulated.pairs(Load([20], [1000])) == (20 * 128, 1000 * 128)
    key = msgspec.structs.replace(profile.key, tensor_parallel=2)
    assert Computed.on(msgspec.structs.replace(profile, key=key)).heads == heads / 2


def test_tiles_that_leave_units_idle_at_the_end_take_as_long_as_full_turns():
    """Four heads have 128 tiles of 4,096 tokens: two turns on 108 units, as on 92."""
    device = Computed(tile=128, heads=4)
    assert device.turns([4096], 64) == 1.0
    assert device.turns([4096], 108) / 108 == device.turns([4096], 92) / 92 == 2 / 128
    assert device.turns([1, 4000], 132) == 132 / 132  # a token has a tile of its own
    assert Computed().turns([4096], 108) == 1.0


def test_others_do_not():
    prompts, plain = Load([1829, 100], [0, 300]), Computed.on(synthetic.profile(rounds=1))
    assert plain.tokens(prompts) == 1929
    assert plain.pairs(prompts) == (prompts.squares, prompts.products)
    assert plain.rows(Load.decode([5] * 3)) == 3


def test_a_step_takes_longer_where_the_own_kernel_of_products_ends(
    monkeypatch: pytest.MonkeyPatch, gpu: Computed
):
    def stepped(load: Load, units: int) -> float:
        rows = gpu.rows(load)
        alone = 3e-8 * load.reused + 1e-5 * rows + (6e-3 if rows > STEPS[-1] else 4e-3)
        return alone * max(1.0, 48 / units)

    monkeypatch.setattr(synthetic, "decode_step", stepped)
    profile = synthetic.profile(rounds=4)
    estimator = Calibrated(msgspec.structs.replace(profile, machine="cuda", pass_sizes=SIZES))
    for rows in (112, 128, 136, 192):
        load = Load.decode([700] * rows)
        for units in (16, 48, 132):
            predicted = estimator.predict(decode_step(load), units)
            assert predicted == pytest.approx(stepped(load, units), rel=0.02)


def test_windows_hide_contexts_and_pairs():
    """Half of the layers see 128 tokens (by hand)."""
    half = Computed(windows=((128, 0.5),))
    assert half.context(Load.decode([100, 2128])) == 100 + 0.5 * (2128 + 128)
    assert Computed().context(Load.decode([100, 2128])) == 2228
    load = Load([4096, 64], [0, 6000])
    every = sum(range(4096)) + sum(range(6000, 6064))
    seen = sum(min(i, 128) for i in [*range(4096), *range(6000, 6064)])
    squares, products = half.pairs(load)
    visible = 0.5 + 0.5 * seen / every
    assert squares == pytest.approx(visible * load.squares, rel=0.01)
    assert products == pytest.approx(visible * load.products, rel=0.01)
    short = Load([100], [0])
    assert half.pairs(short) == (short.squares, short.products)
