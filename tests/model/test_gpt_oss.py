"""gpt-oss: experts in MXFP4, and what of it is refused; parity tests of families have the rest."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import load_decoder, make_checkpoint, reference
from tests.model.passes import close, cost_of, distance, expected, in_chunks, prompt
from tests.parallel.test_sharding import together
from twolane.model.decoder import Decoder
from twolane.model.load.checkpoint import WeightsError
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights
from twolane.model.matrix import Matrix, quantised
from twolane.model.spec import UnsupportedModel
from twolane.parallel.group import CpuGroup

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CHUNKS = [100, 1, 1, 30, *[1] * 18]


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [..., groups, 16] and scales [..., groups] of weights [..., columns], uint8, and what
    they mean."""
    groups = weight.float().unflatten(-1, (-1, 32))
    powers = (groups.abs().amax(-1, keepdim=True) / 6.0).log2().ceil()
    table = torch.tensor([*VALUES, *(-v for v in VALUES)])
    numbers = (groups[..., None] / 2 ** powers[..., None] - table).abs().argmin(-1)
    meant = (table[numbers] * 2**powers).flatten(-2)
    pairs = numbers.unflatten(-1, (16, 2))
    blocks = pairs[..., 0] + 16 * pairs[..., 1]
    return blocks.to(torch.uint8), (powers[..., 0] + 127).to(torch.uint8), meant


def publish(path: Path) -> dict[str, Tensor]:
    """Store the experts of a checkpoint as they are published; return what they mean, by name."""
    file = path / "model.safetensors"
    stored, meant = load_file(file), {}
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, means = mxfp4(stored.pop(name).transpose(1, 2))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = means.transpose(1, 2)
    save_file(stored, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": [*left, "lm_head"]}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return meant


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """A checkpoint in the published layout, and the model that it means, in `transformers`."""
    path = make_checkpoint("gpt-oss", tmp_path_factory.mktemp("gpt-oss") / "model", seed=3)
    model = reference(path)
    model.load_state_dict(publish(path), strict=False)
    return path, model


def test_mxfp4_as_published(published) -> None:
    path, model = published
    decoder = load_decoder(resolve(str(path)))
    mlp = decoder.weights.layers[0].mlp
    assert {m.scheme for _, m in mlp.matrices()} == {"float32", "mxfp4"}
    assert decoder.spec.parameters == model.num_parameters()
    tokens = prompt(150)
    close(in_chunks(decoder, tokens, CHUNKS), expected(model, tokens))


def test_transformers_reads_the_same_files(published) -> None:
    path, model = published
    tokens = prompt(40)
    close(expected(reference(path), tokens), expected(model, tokens))


def test_two_ranks_share_mxfp4(published) -> None:
    path, model = published
    source, tokens = resolve(str(path)), prompt(40)

    def ranked(group: CpuGroup) -> Tensor:
        spec, weights = load_weights(source, rank=group.rank, ranks=2)
        assert weights.layers[0].mlp.down.shape == (8 * 64, 32)
        return in_chunks(Decoder(spec, weights, group), tokens, [30, *[1] * 10])

    close(together(2, ranked)[0], expected(model, tokens))


def test_columns_that_ranks_would_cut_are_refused(published) -> None:
    with pytest.raises(WeightsError, match="4 ranks cannot share it: columns 16 to 32 cut groups"):
        load_weights(resolve(str(published[0])), rank=1, ranks=4)


def test_mxfp4_may_be_rounded_to_fp8(published) -> None:
    source = resolve(str(published[0]))
    four, eight = load_decoder(source), load_decoder(source, quantization="fp8")
    for layer, other in zip(four.weights.layers, eight.weights.layers, strict=True):
        assert other.mlp.down.scheme == "fp8_channel"
        assert 0 < distance(other.mlp.down.dequantised(), layer.mlp.down.dequantised()) < cost_of(1)
    assert in_chunks(eight, prompt(9), [9]).isfinite().all()


def test_values_and_scales_are_those_of_the_format() -> None:
    """Every number with every sign, at scales from the least to the largest."""
    packed = (torch.arange(16) * 16 + torch.arange(16).flip(0)).to(torch.uint8).repeat(3, 1)
    exponents = torch.tensor([[0], [127], [254]], dtype=torch.uint8)
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float64)
    meant = torch.stack([table.flip(0), table], dim=1).flatten()
    whole = Matrix(packed, "mxfp4", exponents)
    assert whole.shape == (3, 32) and whole.nbytes == 3 * 17
    wide = meant * 2.0 ** (exponents.double() - 127)
    assert torch.equal(whole.dequantised(), wide.float())
    again = quantised(whole.dequantised()[1:2], "mxfp4")
    assert torch.equal(again.dequantised(), whole.dequantised()[1:2])


def test_rounding_is_to_the_nearest_number() -> None:
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(0)) / 30
    rounded = quantised(weight, "mxfp4")
    groups, scales = weight.view(20, 3, 32), rounded.scales.float()[..., None] - 127
    assert bool((groups.abs().amax(2) / 2 ** scales[..., 0] < 8.0).all())
    table = torch.tensor([*VALUES, *(-v for v in VALUES)])
    best = (groups[..., None] - table * 2 ** scales[..., None]).abs().amin(-1)
    assert torch.equal((rounded.dequantised() - weight).abs(), best.flatten(1))


def test_dummy_weights_have_experts_in_four_bits(tmp_path) -> None:
    path = make_checkpoint("gpt-oss", tmp_path / "model")
    source = resolve(str(path), "dummy")
    decoder = load_decoder(source, load_format="dummy", quantization="mxfp4")
    layer = decoder.weights.layers[0]
    assert (layer.qkv.scheme, layer.mlp.gate_up.scheme) == ("float32", "mxfp4")
    assert in_chunks(decoder, prompt(9), [9]).isfinite().all()
    with pytest.raises(ValueError, match="mxfp4 is for dummy weights; use a published checkpoint"):
        load_decoder(resolve(str(path)), quantization="mxfp4")
    dense = make_checkpoint("qwen3", tmp_path / "dense")
    with pytest.raises(ValueError, match="mxfp4 is for models with experts"):
        load_weights(resolve(str(dense), "dummy"), load_format="dummy", quantization="mxfp4")


@pytest.mark.parametrize(
    "field", [{"swiglu_limit": 8.0}, {"swiglu_alpha": 1.0}, {"hidden_act": "gelu"}]
)
def test_other_activations_are_refused_by_their_field(field, tmp_path) -> None:
    path = make_checkpoint("gpt-oss", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **field}))
    with pytest.raises(UnsupportedModel, match=next(iter(field))):
        load_weights(resolve(str(path)))


@pytest.mark.parametrize("what", ["scales", "shape"])
def test_broken_experts_are_named(what, tmp_path) -> None:
    path = make_checkpoint("gpt-oss", tmp_path / "model")
    publish(path)
    stored, name = load_file(path / "model.safetensors"), "model.layers.2.mlp.experts.down_proj"
    if what == "scales":
        stored[f"{name}_scales"][3, 1] = 255
    else:
        stored[f"{name}_scales"] = stored[f"{name}_scales"][:, :-1].contiguous()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    problem = r"experts\.3\.down_proj\.scales has" if what == "scales" else r"_scales \[8, 63, 2\]"
    with pytest.raises(WeightsError, match=problem):
        load_weights(resolve(str(path)))
