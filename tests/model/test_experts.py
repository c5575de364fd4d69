"""Mixtures of experts: routing, names, shapes, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, Phi3Config, Qwen3MoeConfig

from tests.model.checkpoints import load_decoder, make_checkpoint, random_model, reference
from tests.model.passes import in_chunks, prompt
from twolane.common.errors import FieldError
from twolane.kernels.experts.rule import RoutingRule
from twolane.model import mlp
from twolane.model.load.checkpoint import WeightsError
from twolane.model.load.configs import spec_from_config
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights
from twolane.model.mlp import Experts
from twolane.model.routing import route
from twolane.model.spec import MoeSpec, UnsupportedModel

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("normalised", [True, False])
def test_routing_against_a_sort(normalised: bool) -> None:
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    weights, experts = route(logits, RoutingRule(logits.shape[1], 4, normalised))
    ties = 0
    for row, w, e in zip(logits.tolist(), weights.tolist(), experts.tolist(), strict=True):
        order = sorted(range(16), key=lambda i: (-row[i], i))[:4]
        assert e == order
        ties += len({row[i] for i in order}) < 4
        exact = torch.tensor(row, dtype=torch.float64).softmax(0)[order]
        exact = exact / exact.sum() if normalised else exact
        torch.testing.assert_close(torch.tensor(w).double(), exact, atol=1e-6, rtol=1e-5)
    assert ties > 5


def test_routing_is_in_float32_and_by_rows() -> None:
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights, experts = route(logits, RoutingRule(logits.shape[1], 2))
    assert weights.dtype == torch.float32
    for i in range(40):
        alone = route(logits[i : i + 1], RoutingRule(logits.shape[1], 2))
        assert torch.equal(alone[0][0], weights[i]) and torch.equal(alone[1][0], experts[i])


def test_a_step_of_the_same_rows_repeats_bit_for_bit(tiny) -> None:
    decoder, _ = tiny("qwen3-moe")
    tokens = prompt(40)
    assert torch.equal(in_chunks(decoder, tokens, [40]), in_chunks(decoder, tokens, [40]))


def test_layers_may_be_dense(tiny) -> None:
    decoder, model = tiny("qwen3-moe")
    kinds = [isinstance(layer.mlp, Experts) for layer in decoder.weights.layers]
    assert kinds == [True, False, True, True]
    assert decoder.spec.parameters == model.num_parameters()
    mixtral, model = tiny("mixtral")
    assert mixtral.spec.parameters == model.num_parameters()


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False),
        Qwen3MoeConfig(**SIZES, num_experts=8, decoder_sparse_step=2, sliding_window=16,
            use_sliding_window=True, max_window_layers=0),
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1, sliding_window=16),
    ],
    ids=["shares not divided", "each second layer", "one expert a token"],
)  # fmt: skip
def test_options_mean_what_they_mean_in_transformers(config, tmp_path) -> None:
    random_model(config, seed=1).save_pretrained(tmp_path)
    tokens = torch.randint(3, 60, (40,), generator=torch.Generator().manual_seed(0))
    ours = in_chunks(load_decoder(resolve(str(tmp_path))), tokens, [32, *[1] * 8])
    with torch.inference_mode():
        expected = reference(tmp_path)(tokens[None]).logits[0]
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_dummy_and_rounded_experts(tmp_path) -> None:
    path = make_checkpoint("qwen3-moe", tmp_path / "model")
    for options in ({"load_format": "dummy"}, {}):
        source = resolve(str(path), options.get("load_format", "auto"))
        decoder = load_decoder(source, quantization="fp8", **options)
        mlp = decoder.weights.layers[0].mlp
        assert mlp.router.scheme == "float32" and mlp.down.scheme == "fp8_channel"
        assert in_chunks(decoder, prompt(9), [9]).isfinite().all()


def test_dummy_routers_can_be_skewed(tmp_path) -> None:
    """Counted for random rows: the law of shares, and of the experts that some rows wake."""
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 8}
    config = Qwen3MoeConfig(hidden_size=64, vocab_size=8, num_hidden_layers=1, **sizes)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    source = resolve(str(tmp_path), "dummy")
    _, even = load_weights(source, load_format="dummy")
    spec, weights = load_weights(source, load_format="dummy", router_skew=0.8)
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    router = weights.layers[0].mlp.router.values
    _, chosen = route(rows @ router.T * 10, RoutingRule(len(router), 8))
    seen = chosen.flatten().bincount(minlength=128) / len(rows)
    law = torch.tensor(spec.moe.shares)
    assert (seen - law).abs().max() < 0.12 and torch.corrcoef(torch.stack([seen, law]))[0, 1] > 0.95
    for n in (8, 64):
        experts_read = [len(part.unique()) for part in chosen[:2048].split(n)]
        assert sum(experts_read) / len(experts_read) == pytest.approx(spec.moe.active(n), rel=0.1)
    assert not torch.equal(even.layers[0].mlp.router.values, router)
    assert torch.equal(even.layers[0].mlp.down.values, weights.layers[0].mlp.down.values)


def test_tokens_of_a_prompt_have_experts_of_their_own(tmp_path) -> None:
    """In the last layer of a dummy model, the tokens of one prompt wake as many as the law says."""
    sizes = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(hidden_size=128, vocab_size=512, num_hidden_layers=12, **sizes, **heads)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    decoder = load_decoder(resolve(str(tmp_path), "dummy"), load_format="dummy")
    chosen: list[torch.Tensor] = []

    def recorded(*args) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = route(*args)
        chosen.append(experts)
        return weights, experts

    tokens = torch.randperm(512, generator=torch.Generator().manual_seed(0))[:64]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "route", recorded)
        in_chunks(decoder, tokens, [64])
    assert decoder.spec.moe is not None and len(chosen) == 12
    assert len(chosen[-1].unique()) == pytest.approx(decoder.spec.moe.active(64), rel=0.05)


def test_a_skew_is_for_dummy_experts(tmp_path) -> None:
    dense = make_checkpoint("qwen3", tmp_path / "model")
    with pytest.raises(FieldError, match="is for models with experts"):
        load_weights(resolve(str(dense)), load_format="dummy", router_skew=1.0)
    with pytest.raises(FieldError, match="is for dummy weights"):
        load_weights(resolve(str(dense)), router_skew=1.0)


@pytest.mark.parametrize(
    ("config", "family"),
    [(Qwen3MoeConfig, "Qwen3Moe"), (MixtralConfig, "Mixtral"), (Phi3Config, "Phi3")],
)
def test_defaults_are_those_of_transformers(config, family) -> None:
    bare = spec_from_config({"architectures": [f"{family}ForCausalLM"]})
    whole = config().to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    assert bare == spec_from_config(whole)


def test_phi3_is_refused_where_it_differs() -> None:
    raw = {"architectures": ["Phi3ForCausalLM"]}
    linear = {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(UnsupportedModel, match="rope type 'linear'; these work: default, longrope"):
        spec_from_config({**raw, "rope_scaling": linear})
    with pytest.raises(ValueError, match="of type longrope have no 'long_factor'"):
        spec_from_config({**raw, "rope_scaling": {"rope_type": "longrope"}})
    lists = {"short_factor": [1.0] * 3, "long_factor": [1.0] * 3}
    with pytest.raises(ValueError, match="long_factor must have 48 numbers"):
        spec_from_config({**raw, "rope_scaling": {"rope_type": "longrope", **lists}})
    with pytest.raises(UnsupportedModel, match="quantisation 'eetq'"):
        spec_from_config({**raw, "quantization_config": {"quant_method": "eetq"}})


def test_which_layers_have_experts_follows_from_the_config() -> None:
    raw = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6}
    spec = spec_from_config({**raw, "decoder_sparse_step": 2, "mlp_only_layers": [1, 77]})
    assert [spec.has_experts(i) for i in range(6)] == [False, False, False, True, False, True]
    with pytest.raises(ValueError, match="a token cannot go to 9 of 8 experts"):
        dataclasses.replace(spec, moe=MoeSpec(8, 9, 16))
    with pytest.raises(UnsupportedModel, match="architecture 'PhimoeForCausalLM'"):
        spec_from_config({"architectures": ["PhimoeForCausalLM"]})


def stacked(family: str, path: Path) -> tuple[Path, Path]:
    """The same model with each expert's tensors by themselves, and with one tensor for all."""
    apart, together = path / "apart", path / "together"
    make_checkpoint(family, apart, seed=4, layers=2)
    model = reference(apart)
    model.save_pretrained(together, save_original_format=False)
    return apart, together


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_all_experts_of_a_layer_may_be_one_tensor(family: str, tmp_path: Path) -> None:
    """As `transformers` writes them without the original format; of each, ranks read their part."""
    folders = stacked(family, tmp_path)
    names = load_file(folders[1] / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        ours, theirs = (
            load_weights(resolve(str(folder)), rank=rank, ranks=ranks)[1] for folder in folders
        )
        for one, other in zip(ours.layers, theirs.layers, strict=True):
            for (_, matrix), (_, meant) in zip(
                one.mlp.matrices(), other.mlp.matrices(), strict=True
            ):
                assert torch.equal(matrix.values, meant.values)


@pytest.mark.parametrize("extra", ["model.layers.2.eh_proj.weight", "model.mtp_block.0.weight"])
def test_what_predicts_further_tokens_is_not_read(
    extra: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for family in ("glm4-moe", "qwen3-moe"):
        path = make_checkpoint(family, tmp_path / family, layers=2)
        tensors = load_file(path / "model.safetensors")
        save_file({**tensors, extra: torch.ones(2)}, path / "model.safetensors", {"format": "pt"})
    load_decoder(resolve(str(tmp_path / "glm4-moe")))
    assert "are ignored" not in caplog.text
    load_decoder(resolve(str(tmp_path / "qwen3-moe")))
    assert f"are ignored: {extra}" in caplog.text


def test_experts_in_one_tensor_may_have_columns_first(tmp_path: Path) -> None:
    """As Qwen3-VL with experts is published."""
    _, path = stacked("qwen3-moe", tmp_path)
    wanted = [m for _, w in [load_weights(resolve(str(path)))] for m in w.layers[0].mlp.matrices()]
    tensors = load_file(path / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(turned, path / "model.safetensors", {"format": "pt"})
    _, weights = load_weights(resolve(str(path)))
    for (_, ours), (_, theirs) in zip(weights.layers[0].mlp.matrices(), wanted, strict=True):
        assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("", lambda t: t[:, :-1].clone(), r"misshapen tensors: .*\[8, 127, 64\] instead of \[8"),
        ("_packed", lambda t: t.int(), r"one tensor are not read, such as .*gate_up_proj_packed"),
    ],
)
def test_stacks_that_cannot_be_are_refused(end, change, message, tmp_path) -> None:
    _, path = stacked("qwen3-moe", tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")][:2]:
        tensors[f"{name}{end}"] = change(tensors.pop(name))
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=message):
        load_decoder(resolve(str(path)))
