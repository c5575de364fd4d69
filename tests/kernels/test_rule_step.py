"""The gated delta rule in CUDA C++, acted out by fibers of the CPU (cuda_host.h)."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tests.kernels.on_host import build, needs_compiler
from twolane.kernels.delta_rule import rule_step
from twolane.kernels.delta_rule.rule import DeltaRule
from twolane.kernels.delta_rule.rule_step import RuleStepArguments

DELTA = DeltaRule(1, 2, 128, 128, 4)
ROWS, SLOTS = 37, 40


class Case:
    """Rows of which some are padding, and the states of all slots."""

    def __init__(self, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        self.x = random(ROWS, DELTA.projected).bfloat16()
        self.mixed = (random(ROWS, DELTA.mixed_size) / 11).bfloat16()
        self.rates = random(ROWS, 2 * DELTA.value_heads).bfloat16()
        self.decay, self.shift = -torch.rand(2, generator=draw), random(2)
        self.norm = random(128).bfloat16()
        self.states = random(SLOTS, DELTA.value_heads, 128, 128)
        self.slots = torch.randperm(SLOTS, generator=draw)[:ROWS].int()
        self.lengths = torch.zeros(ROWS, dtype=torch.int32)
        self.lengths[[0, 2, 31, 33, 36]] = 5
        self.out = torch.zeros(ROWS, DELTA.value_size, dtype=torch.bfloat16)
        for name, made in list(vars(self).items()):
            setattr(self, name, made.to(device))

    def arguments(self) -> RuleStepArguments:
        arrays = (self.mixed, self.rates, self.decay, self.shift, self.states)
        others = (self.slots, self.lengths, self.out, self.x[:, DELTA.mixed_size :], self.norm)
        pointers = (tensor.data_ptr() for tensor in (*arrays, *others))
        strides = self.rates.stride(0), self.x.stride(0)
        return RuleStepArguments(*pointers, ROWS, *strides, 1e-6)

    def expected(self) -> tuple[Tensor, Tensor]:
        """States and results of all rows in float64, rounded where the kernels round."""
        parts = self.mixed.double().view(ROWS, 4, 128)
        (q, k), v = parts[:, :2].unbind(1), parts[:, 2:]
        rates = self.rates.double()
        moved = softplus(rates[:, 2:] + self.shift.double())
        kept = torch.exp(self.decay.double() * moved)[..., None, None]
        state = self.states[self.slots.long()].double() * kept
        known = torch.einsum("rhkv,rk->rhv", state, k)
        correction = (v - known) * torch.sigmoid(rates[:, :2])[..., None]
        state += k[:, None, :, None] * correction[:, :, None]
        read = torch.einsum("rhkv,rk->rhv", state, q).bfloat16().double()
        scale = torch.rsqrt(read.square().mean(2, keepdim=True) + 1e-6)
        normal = ((read * scale).bfloat16().double() * self.norm.double()).bfloat16().double()
        gates = self.x[:, DELTA.mixed_size :].double().view_as(normal)
        return state.float(), (normal * silu(gates)).flatten(1).float()


def compare(case: Case, wanted: tuple[Tensor, Tensor], before: Tensor) -> None:
    """States of active rows, their results, and that all others stay as they were."""
    state, out = wanted
    active = case.lengths > 0
    slots = case.slots.long()[active]
    torch.testing.assert_close(case.states[slots], state[active], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.out[active].float(), out[active], atol=2e-2, rtol=2e-2)
    assert not case.out[~active].any()
    left = torch.ones(SLOTS, dtype=torch.bool, device=slots.device)
    left[slots] = False
    assert torch.equal(case.states[left], before[left])


@needs_compiler
@pytest.mark.parametrize(("stages", "grid"), [(1, 4), (2, 16)])
def test_active_rows_move_their_states(stages: int, grid: int, tmp_path: Path) -> None:
    """Copies end in any order; with 16 blocks some have nothing to do."""
    options = rule_step.options(DELTA, stages)
    library = build("rule_step_host.cc", rule_step.source(), options, tmp_path)
    case = Case()
    wanted, before = case.expected(), case.states.clone()
    fault = library.run(ctypes.byref(case.arguments()), grid, stages)
    assert fault is None, fault
    compare(case, wanted, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_moves_them_alike() -> None:
    case = Case("cuda")
    if not rule_step.serves(DELTA, case.x, 132):
        pytest.skip("needs Hopper")
    wanted, before = case.expected(), case.states.clone()
    rule_step.launch(DELTA, case.arguments(), case.x.device, 64)
    compare(case, wanted, before)
