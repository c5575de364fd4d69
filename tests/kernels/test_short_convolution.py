"""Short convolutions on a GPU against the CPU's, with the products that slots keep."""

import pytest
import torch

from tests.kernels.interpreter import DEVICE
from twolane.kernels.delta_rule.convolution import PromptStates
from twolane.kernels.delta_rule.prefill import CHUNK, prompt_lists
from twolane.kernels.short_convolution import convolve_prompts, convolve_step
from twolane.lanes.work import PromptRow
from twolane.model.linear_attention import SequenceStates, StateRows, convolve

CHANNELS, SLOTS = 70, 6


def expected(
    x: torch.Tensor, taps: torch.Tensor, kept: torch.Tensor, places: list[tuple[int, int, int]]
) -> torch.Tensor:
    """What the CPU makes of rows with these slots, first positions and counts; moves `kept` on."""
    before, after, value = x.chunk(3, dim=1)
    rows = StateRows.of(SequenceStates(*place) for place in places)
    return after * convolve(before * value, taps, rows, kept.transpose(1, 2))


@pytest.mark.parametrize("taps", [3, 4])
def test_prompts_and_steps_are_those_of_the_cpu(taps: int) -> None:
    """Sequences that begin and that go on, of one token to more than a chunk; then some of them
    get single tokens, beside rows that are not active."""
    draw = torch.Generator().manual_seed(taps)
    places = [(4, 0, CHUNK + 3), (1, 7, 1), (2, 0, 1), (0, 9, 2 * CHUNK), (5, 3, 2)]
    count = sum(n for _, _, n in places)
    weights = torch.randn(CHANNELS, taps, generator=draw)
    kept = torch.randn(SLOTS, taps - 1, CHANNELS, generator=draw)
    x = torch.randn(count, 3 * CHANNELS, generator=draw)
    there, own = kept.clone().to(DEVICE), weights.to(DEVICE)
    want, out = expected(x, weights, kept, places), torch.empty(count, CHANNELS, device=DEVICE)
    [lists] = prompt_lists([PromptRow(*place).parts() for place in places])
    states = PromptStates(*(torch.from_numpy(each).int().to(DEVICE) for each in lists))
    convolve_prompts(x.to(DEVICE), own, there, [states], out)
    torch.testing.assert_close(out.cpu(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(there.cpu(), kept)
    x = torch.randn(3, 3 * CHANNELS, generator=draw)
    slots, lengths = torch.tensor([5, 1, 2]), torch.tensor([6, 0, 2])
    active = [0, 2]
    want = expected(x[active], weights, kept, [(5, 5, 1), (2, 1, 1)])
    out = torch.full((3, CHANNELS), 7.0, device=DEVICE)
    where = (each.to(DEVICE, torch.int32) for each in (slots, lengths))
    convolve_step(x.to(DEVICE), own, there, *where, out)
    torch.testing.assert_close(out[active].cpu(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(there.cpu(), kept)
    assert bool((out[1] == 7.0).all())
