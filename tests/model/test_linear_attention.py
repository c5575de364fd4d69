"""Linear attention beside its families, whose logits `test_parity.py` compares."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.model.checkpoints import load_decoder, make_checkpoint
from tests.model.passes import Pool, cost_of, distance, prompt
from twolane.common.errors import FieldError
from twolane.devices import DeviceSettings
from twolane.kernels.delta_rule.rule import DeltaRule
from twolane.lanes.load import load
from twolane.model.attention import Batch, Segment
from twolane.model.linear_attention import (
    CHUNK,
    DeltaInputs,
    SequenceStates,
    StateRows,
    chunked,
    recurrent,
)
from twolane.model.load.hub import resolve
from twolane.model.matrix import quantised


def random_inputs(tokens: int, heads: int = 3, key: int = 8, value: int = 12) -> DeltaInputs:
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, heads, key), dim=2) for _ in "qk")
    v, g = torch.randn(tokens, heads, value), -torch.rand(tokens, heads) * 3.0
    inputs = DeltaInputs(q, k, v, g, torch.rand(tokens, heads))
    return DeltaInputs(*(each.double() for each in inputs))


@pytest.mark.parametrize("tokens", [2, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_chunks_compute_what_token_after_token_does(tokens):
    """From a state that is not zero, with decays up to e^-3 a token."""
    inputs, slot = random_inputs(tokens), torch.tensor([1])
    rule = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    state, other = rule[1].clone(), rule[0].clone()
    out = chunked(inputs, state)
    steps = [
        recurrent(DeltaInputs(*(x[i : i + 1] for x in inputs)), rule, slot) for i in range(tokens)
    ]
    torch.testing.assert_close(out, torch.cat(steps), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, rule[1], rtol=1e-9, atol=1e-9)
    assert torch.equal(rule[0], other)


@pytest.mark.parametrize("slots", [(0, -1), (2, 2)])
def test_each_sequence_has_a_slot_of_its_own(slots):
    with pytest.raises(ValueError, match="needs a slot for each sequence"):
        StateRows.of(SequenceStates(slot, 5, 1) for slot in slots)


def test_a_slot_begins_anew_with_another_sequence(tiny):
    """What the sequence before left there, and the pool's first numbers, make no difference."""
    decoder, _ = tiny("qwen3.5")
    pool, tokens = Pool(decoder), prompt(20)
    outs = []
    for before in (None, prompt(31, seed=1)):
        for new in [tokens] if before is None else [before, tokens]:
            batch = Batch.build([Segment(0, len(new), pool.take(len(new)), slot=4)], 8)
            hidden = decoder.embed(new)
            for i in range(decoder.spec.layers):
                hidden = decoder.layer(i, hidden, batch, pool.kv)
        outs.append(hidden)
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
def test_rounded_projections_keep_their_rows(family, tmp_path):
    """Rows that share a scale are mixed up, or not: each is near that of the checkpoint."""
    sizes = {"hidden_size": 128, "linear_value_head_dim": 32, "linear_key_head_dim": 32}
    source = resolve(str(make_checkpoint(family, tmp_path / "model", seed=1, sizes=sizes)))
    exact = load_decoder(source).weights.layers
    for scheme in ("fp8", "fp8_block128"):
        rounded = load_decoder(source, quantization=scheme).weights.layers
        for ours, meant in zip(rounded, exact, strict=True):
            for name in ("qkv", "o"):
                near, wanted = (getattr(layer, name).dequantised() for layer in (ours, meant))
                assert 0 < distance(near, wanted) < cost_of(1), (scheme, name)


def test_whole_blocks_change_places_with_their_scales():
    matrix = quantised(torch.randn(512, 256) * torch.rand(512, 1), "fp8_block128")
    order = torch.arange(512).view(4, 128)[[2, 0, 3, 1]].flatten()
    moved = matrix.reordered(order)
    assert moved.scheme == "fp8_block128"
    assert torch.equal(moved.dequantised(), matrix.dequantised()[order])
    some = matrix.reordered(order[:256])
    assert torch.equal(some.dequantised(), matrix.dequantised()[order[:256]])


def test_the_size_of_states():
    """Of Qwen3-Next: 32 value heads of 128 x 128, and three inputs of 8192 channels."""
    delta = DeltaRule(16, 32, 128, 128, 4)
    assert delta.state_bytes(2) == 32 * 128 * 128 * 4 + 8192 * 3 * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"value_heads": 24}, "24 value heads cannot share 16 key heads"),
        ({"taps": 1}, "needs 2 taps"),
        ({"key_dim": 0}, "key_dim of linear attention must be 1 or more"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(DeltaRule(16, 32, 128, 128, 4), **wrong)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"disaggregated": True}, "disaggregated"),
        ({"lora": {"some": "adapter"}}, "lora"),
    ],
)
def test_what_is_not_built_for_states_is_refused(asked, field, tmp_path: Path):
    path = make_checkpoint("qwen3.5", tmp_path / "model")
    settings = DeviceSettings(model=str(path), device="cpu", **asked)
    with pytest.raises(FieldError) as refused:
        load(settings, lambda *_: None)
    assert refused.value.field == field
