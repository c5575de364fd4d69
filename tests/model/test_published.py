"""Hybrid models as they are published in FP8, and what predicts further tokens beside them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import LAYERS, load_decoder, reference
from tests.model.passes import close, cost_of, distance, expected, in_chunks, prompt
from tests.model.published import publish
from twolane.cli.doctor_model import formats
from twolane.model.load.checkpoint import WeightsError
from twolane.model.load.hub import resolve

FAMILIES = ("qwen3-next", "qwen3.5", "qwen3.5-moe")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory):
    """family → (checkpoint in FP8, the same in floats)."""
    made: dict[str, tuple[Path, Path]] = {}

    def folders(family: str) -> tuple[Path, Path]:
        if family not in made:
            parent = tmp_path_factory.mktemp(family)
            made[family] = parent / "fp8", parent / "floats"
            publish(family, *made[family])
        return made[family]

    return folders


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_eight_bits_are_what_they_mean(family, published, caplog):
    """The weights are those of the reference, whose logits ours are; activations are rounded."""
    quantised, floats = published(family)
    tokens, model = prompt(40), reference(floats)
    decoder, plain = (load_decoder(resolve(str(path))) for path in (quantised, floats))
    assert "another format" not in caplog.text, "the config's names are found"
    close(in_chunks(plain, tokens, [30, *[1] * 10]), expected(model, tokens))
    for ours, meant in zip(decoder.weights.layers, plain.weights.layers, strict=True):
        assert all(each.scheme.startswith("fp8") for each in (ours.qkv, ours.o))
        pairs = [(ours.qkv, meant.qkv), (ours.o, meant.o)]
        if ours.delta is not None:
            assert ours.delta.rates.scheme == "float32"
            pairs.append((ours.delta.rates, meant.delta.rates))
        own = zip(ours.mlp.matrices(), meant.mlp.matrices(), strict=True)
        pairs += [(one, other) for (_, one), (_, other) in own]
        for matrix, wanted in pairs:
            close(matrix.dequantised().float(), wanted.dequantised().float())
    logits = in_chunks(decoder, tokens, [30, *[1] * 10])
    assert cost_of(1) < distance(logits, expected(model, tokens)) < 2 * cost_of(4 * LAYERS)


def test_doctor_says_what_predicts_further_tokens(published):
    quantised, floats = published("qwen3.5-moe")
    rows = {row[0]: row[1] for row in formats(resolve(str(quantised)))}
    # 7 norms, fc, the router, the gate of the shared expert, and 4 + 3 + 24 modules with scales.
    assert rows["MTP"].startswith("1 layer in 72 tensors")
    assert rows["MTP"].endswith("sound, not loaded")
    assert "MTP" not in {row[0] for row in formats(resolve(str(floats)))}


def shorter(tensors, name):
    tensors[name] = tensors[name][:-1].contiguous()


def in_whole_numbers(tensors, name):
    tensors[name] = tensors[name].to(torch.int32)


def left_out(tensors, name):
    del tensors[name]


@pytest.mark.parametrize("change", [shorter, in_whole_numbers, left_out])
@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.layers.0.self_attn.q_norm.weight",
        "mtp.layers.0.mlp.experts.7.down_proj.weight",
        "mtp.layers.0.mlp.shared_expert_gate.weight",
        "mtp.layers.0.self_attn.o_proj.weight_scale_inv",
    ],
)
def test_what_is_broken_of_it_is_refused_by_name(name, change, published, tmp_path):
    quantised, _ = published("qwen3.5-moe")
    for file in quantised.iterdir():
        (tmp_path / file.name).symlink_to(file)
    second = tmp_path / "model-00002-of-00002.safetensors"
    tensors = load_file(second)
    change(tensors, name)
    second.unlink()
    save_file(tensors, second, {"format": "pt"})
    for read in (lambda s: load_decoder(s), lambda s: [*formats(s)]):
        with pytest.raises(WeightsError, match=f"tensors: {name}"):
            read(resolve(str(tmp_path)))
