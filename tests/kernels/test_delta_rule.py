"""Kernels of linear attention compute what PyTorch does on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.interpreter import DEVICE
from twolane.kernels.delta_rule.convolution import PromptStates
from twolane.kernels.delta_rule.decode import LinearLayer, decode_step
from twolane.kernels.delta_rule.prefill import (
    CHUNK,
    PromptRoom,
    prompt_lists,
    prompt_pass,
)
from twolane.kernels.delta_rule.rule import DeltaRule
from twolane.lanes.work import PromptRow
from twolane.model.linear_attention import (
    DeltaWeights,
    SequenceStates,
    StatePool,
    StateRows,
    attend,
)
from twolane.model.matrix import Matrix
from twolane.model.spec import LINEAR, ModelSpec

SLOTS = 6
SHAPES = {
    "grouped": DeltaRule(2, 4, 16, 24, 4),
    "square": DeltaRule(1, 1, 32, 32, 3),
    "wide": DeltaRule(1, 2, 8, 80, 2),
    "published": DeltaRule(1, 2, 128, 128, 4),
}


class Layer:
    """One layer of linear attention with random weights and states, twice."""

    def __init__(self, delta: DeltaRule, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.delta, self.dtype, heads = delta, dtype, delta.value_heads
        self.weights = DeltaWeights(
            rates=Matrix.plain(torch.empty(0, 0)),
            conv=self.rounded(torch.randn(delta.taps, delta.mixed_size).t()),
            decay=-torch.rand(heads),
            shift=torch.randn(heads),
            norm=self.rounded(torch.rand(delta.value_dim) + 0.5),
        )
        spec = ModelSpec("any", 1, 8, 1, 1, 8, 8, 8, 8, kinds=(LINEAR,), delta=delta)
        self.right = StatePool(spec, SLOTS, torch.float32)
        self.right.conv[0].copy_(self.rounded(torch.randn(self.right.conv[0].shape)))
        self.right.rule[0].normal_()
        conv = self.right.conv[0].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        self.states = conv.to(DEVICE, dtype), self.right.rule[0].clone().to(DEVICE)
        moved = {name: getattr(self.weights, name).to(DEVICE) for name in ("decay", "shift")}
        moved |= {name: getattr(self.weights, name).to(DEVICE, dtype) for name in ("conv", "norm")}
        self.linear = LinearLayer(SimpleNamespace(**moved), delta, *self.states, 1e-6)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype).float()

    def inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        widths = self.delta.projected, 2 * self.delta.value_heads
        x, rates = (self.rounded(torch.randn(rows, width)) for width in widths)
        return x, rates

    def expected(self, x, rates, places):
        rows = StateRows.of(SequenceStates(*place) for place in places)
        return attend(x, rates, self.weights, self.delta, rows, self.right, 0, 1e-6)

    def same_states(self) -> None:
        conv, rule = (each.cpu().float() for each in self.states)
        torch.testing.assert_close(conv, self.right.conv[0].transpose(1, 2), atol=1e-5, rtol=1e-5)
        atol = 2e-4 if self.dtype == torch.float32 else 5e-2
        torch.testing.assert_close(rule, self.right.rule[0], atol=atol, rtol=atol)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_moves_the_states_of_active_rows(shape):
    """A row is padding, and a state that no row names stays as it is."""
    layer = Layer(SHAPES[shape])
    delta = layer.delta
    slots = torch.tensor([4, 0, 5, 2], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([9, 3, 0, 100], dtype=torch.int32, device=DEVICE)
    active = [0, 1, 3]
    for units in (32, 132):
        x, rates = layer.inputs(4)
        mixed = torch.empty(4, delta.mixed_size, device=DEVICE)
        out = torch.zeros(4, delta.value_size, device=DEVICE)
        given = x.to(DEVICE), rates.to(DEVICE), layer.linear
        decode_step(*given, slots, lengths, mixed, out, units)
        places = [(int(slots[i]), int(lengths[i]) - 1, 1) for i in active]
        expected = layer.expected(x[active], rates[active], places)
        torch.testing.assert_close(out.cpu()[active], expected, atol=1e-4, rtol=1e-4)
        layer.same_states()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in SHAPES),
        ("grouped", torch.bfloat16),
        *(
            pytest.param(s, torch.bfloat16, marks=pytest.mark.full)
            for s in SHAPES
            if s != "grouped"
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "prompts",
    [
        [PromptRow(3, 0, 5)],
        [PromptRow(1, 7, 2), PromptRow(0, 0, 1), PromptRow(5, 30, 1), PromptRow(2, 0, CHUNK + 3)],
        [PromptRow(4, 1, 2 * CHUNK), PromptRow(0, 0, CHUNK)],
        [PromptRow(0, 0, 70, saves=((2, 3), (67, 4))), PromptRow(1, 9, 20, source=5)],
        [PromptRow(1, 16, 9, source=5, saves=((8, 3),)), PromptRow(0, 5, 4, saves=((4, 4),))],
    ],
    ids=["begins", "mixed", "whole tiles", "saved twice", "from a snapshot"],
)
def test_prompts_move_their_states(shape, dtype, prompts):
    """Chunks that begin, go on, are shorter than the convolution, and end within a tile."""
    layer = Layer(SHAPES[shape], dtype)
    delta, rows = layer.delta, sum(row.count for row in prompts)
    x, rates = layer.inputs(rows)
    parts = [row.parts() for row in prompts]
    states = [
        PromptStates(*(torch.from_numpy(each).int().to(DEVICE) for each in lists))
        for lists in prompt_lists(parts)
    ]
    solved = delta.value_heads * CHUNK
    sizes = (
        (delta.mixed_size, dtype),
        (solved, dtype),
        (solved, dtype),
        (delta.value_heads, torch.float32),
    )
    room = PromptRoom(
        *(torch.full((rows, n), torch.nan, device=DEVICE, dtype=kind) for n, kind in sizes)
    )
    out = torch.empty(rows, delta.value_size, device=DEVICE, dtype=dtype)
    given = x.to(DEVICE, dtype), rates.to(DEVICE, dtype), layer.linear
    prompt_pass(*given, states, room, out)
    places = [(row.slot, row.start, row.count, row.parts()) for row in prompts]
    expected = layer.expected(x, rates, places)
    atol = 1e-3 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out.cpu().float(), expected, atol=atol, rtol=atol)
    layer.same_states()
