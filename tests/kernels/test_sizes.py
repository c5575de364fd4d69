"""Which sizes passes are padded to."""

import pytest

from twolane.kernels.sizes import SIZES, WHOLE, padded, worth_padding_to


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ({64: 1.0, 128: 1.1, 192: 1.5, 256: 1.8}, (64, 128, 192, 256)),
        ({64: 1.0, 128: 1.1, 192: 1.9, 256: 1.8}, (64, 128, 256)),
        ({64: 1.0, 128: 1.1, 192: 1.79, 256: 1.8}, (64, 128, 256)),
        ({64: 2.0, 128: 1.99, 192: 1.98, 256: 1.8}, (256,)),
        # Each is a little faster than the next, and all together are worth a size of their own.
        ({64: 0.97, 128: 0.98, 192: 0.99, 256: 1.0}, (64, 256)),
        ({512: 1.0, WHOLE: 3.0, 2048: 2.9}, (512, WHOLE, 2048)),
        ({}, ()),
    ],
)
def test_sizes_that_are_no_faster_than_larger_ones_are_left_out(
    seconds: dict[int, float], sizes: tuple[int, ...]
) -> None:
    assert worth_padding_to(seconds) == sizes
    assert worth_padding_to(dict(reversed(seconds.items()))) == sizes


def test_more_tokens_never_take_less_time() -> None:
    """Of any times: systems look for the largest pass that fits, and find it by halving."""
    seconds = {
        size: size * (1.0 + 0.6 * (size % 128 > 0) + 0.3 * (size % 512 > 0)) for size in SIZES
    }
    kept = worth_padding_to(seconds)
    assert kept[-1] == SIZES[-1] and not {192, 320, 576} & {*kept}
    took = [seconds[size] for size in kept]
    assert took == sorted(took)
    for size in SIZES:
        assert seconds[padded(size, kept)] <= seconds[size] / 0.98
