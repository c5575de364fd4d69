"""Quantised checkpoints: each public format against the floats that it means."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.model.checkpoints import LAYERS, load_decoder, reference
from tests.model.passes import close, cost_of, distance, expected, in_chunks, prompt
from tests.model.quantised_checkpoints import FORMATS, GROUP, edit_config, write
from twolane.model import fp8
from twolane.model.decoder import Decoder
from twolane.model.load.checkpoint import WeightsError
from twolane.model.load.hub import resolve
from twolane.model.load.quantization import Format, ModuleGroup, Quantization
from twolane.model.load.quantized import for_gpu
from twolane.model.matrix import Matrix, Scheme, concatenated, quantised
from twolane.model.products import Products
from twolane.model.spec import UnsupportedModel

SIZES = {"hidden_size": 192, "intermediate_size": 320}
"""Blocks of 128 end short in rows and in columns, and q, k and v end within blocks."""
EIGHT_BITS = [name for name in FORMATS if name.startswith(("fp8", "float"))]
BLOCKS = ("fp8", "float-quantized-block")
ORDERED = "gptq-act-order"
FOUR_BITS = [name for name in FORMATS if name not in (*EIGHT_BITS, ORDERED)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """form → (quantised checkpoint, the same in floats)."""
    made: dict[str, tuple[Path, Path]] = {}

    def folder(form: str) -> tuple[Path, Path]:
        if form not in made:
            parent = tmp_path_factory.mktemp(form)
            made[form] = parent / "quantised", parent / "floats"
            write(*made[form], form, **SIZES)
        return made[form]

    return folder


@pytest.fixture
def checkpoint(folders, tmp_path):
    """form → a copy that a test may break."""

    def copy(form: str) -> Path:
        return Path(shutil.copytree(folders(form)[0], tmp_path / form))

    return copy


def _rounded(x: Tensor) -> Tensor:
    """What e4m3 with one scale for each row holds of `x`."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


class Recorded(Products):
    """Products that keep what each matrix was multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, list[Tensor]] = defaultdict(list)

    def linear(self, x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
        self.inputs[id(matrix)].append(x)
        return super().linear(x, matrix, bias)

    def add_linear(
        self, residual: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None
    ) -> Tensor:
        self.inputs[id(matrix)].append(x)
        return super().add_linear(residual, x, matrix, bias)

    def activations(self, matrix: Matrix) -> Tensor:
        """Return what all tokens' products with a matrix read, [T, columns]."""
        return torch.cat(self.inputs[id(matrix)])


def round_like(ours: Decoder, products: Recorded, model: nn.Module, blocks: bool) -> None:
    """Let every linear module of the reference's layers read e4m3 of what our matrix reads.

    The two activations must agree as far as sums in float32 do, in any order. Each rounded by
    itself, the few that lie at a boundary between two numbers of e4m3 would be rounded apart, which
    is 2 ** -3 of the activation; how many do depends on the processor.
    """

    def rounded(x: Tensor) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
        parts = torch.cat([_rounded(part) for part in x.split(128 if blocks else len(x[0]), 1)], 1)

        def hook(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            close(x, inputs[0][0])
            return parts[None]

        return hook

    for layer, theirs in zip(ours.weights.layers, model.model.layers, strict=True):
        for modules, matrix in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv),
            (("self_attn.o_proj",), layer.o),
            (("mlp.gate_proj", "mlp.up_proj"), layer.mlp.gate_up),
            (("mlp.down_proj",), layer.mlp.down),
        ):
            hook = rounded(products.activations(matrix))
            for name in modules:
                theirs.get_submodule(name).register_forward_pre_hook(hook)


@pytest.mark.parametrize("form", FOUR_BITS)
def test_four_bits_are_what_they_mean(folders, form):
    quantised, floats = folders(form)
    tokens = prompt(60)
    decoder = load_decoder(resolve(str(quantised)))
    assert decoder.weights.layers[0].qkv.scheme == "int4_g32"
    close(in_chunks(decoder, tokens, [50, *[1] * 10]), expected(reference(floats), tokens))


def test_act_order_is_served_in_floats(folders, caplog):
    """Its groups are no neighbours, which no kernel multiplies with; or it is rounded again."""
    quantised, floats = folders(ORDERED)
    tokens = prompt(60)
    with caplog.at_level("INFO"):
        decoder = load_decoder(resolve(str(quantised)))
    assert decoder.weights.layers[0].qkv.scheme == "float32"
    assert "28 matrices stored as gptq with act-order are served as float32" in caplog.text
    close(in_chunks(decoder, tokens, [60]), expected(reference(floats), tokens))
    rounded = load_decoder(resolve(str(quantised)), quantization="fp8")
    assert rounded.weights.layers[0].qkv.scheme == "fp8_channel"


@pytest.mark.parametrize("form", EIGHT_BITS)
def test_eight_bits_are_what_they_mean(folders, form):
    """The same rounding in `transformers` gives the same logits."""
    quantised, floats = folders(form)
    tokens, model = prompt(60), reference(floats)
    decoder = load_decoder(resolve(str(quantised)))
    decoder.products = products = Recorded()
    ours = in_chunks(decoder, tokens, [50, *[1] * 10])
    plain = expected(model, tokens)
    round_like(decoder, products, model, blocks=form in BLOCKS)
    close(ours, expected(model, tokens))
    assert cost_of(1) < distance(ours, plain) < cost_of(4 * LAYERS)


@pytest.mark.parametrize(
    ("form", "family"),
    [
        *((form, "qwen3-moe") for form in ("fp8", "float-quantized-tensor", "awq")),
        ("gptq", "mixtral"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("float-quantized-channel", "qwen3-moe"),
                ("float-quantized-block", "qwen3-moe"),
                ("fp8", "mixtral"),
            )
        ),
    ],
)
def test_experts_are_what_they_mean(form, family, tmp_path):
    """Each expert's matrices are stored by themselves, and end within blocks."""
    write(tmp_path / "quantised", tmp_path / "floats", form, family, **SIZES)
    decoder, floats = (load_decoder(resolve(str(tmp_path / n))) for n in ("quantised", "floats"))
    for ours, meant in zip(decoder.weights.layers, floats.weights.layers, strict=True):
        assert ours.mlp.matrices()[-1][1].scheme.startswith("fp8" if form in EIGHT_BITS else "int4")
        for (_, matrix), (_, plain) in zip(ours.mlp.matrices(), meant.mlp.matrices(), strict=True):
            close(matrix.dequantised().float(), plain.values)
    tokens = prompt(40)
    logits, plain = in_chunks(decoder, tokens, [30, *[1] * 10]), in_chunks(floats, tokens, [40])
    if form in EIGHT_BITS:  # activations are rounded, and some tokens wake other experts
        assert cost_of(1) < distance(logits, plain) < 2 * cost_of(4 * LAYERS)
    else:
        close(logits, plain)


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block128", "int4_g32", "int4_g128"])
def test_products_are_those_of_what_is_meant(scheme: Scheme) -> None:
    """Also where rows change places and matrices with cut blocks are joined."""
    draw = torch.Generator().manual_seed(0)
    matrices = [quantised(torch.randn(n, 384, generator=draw), scheme) for n in (128, 200, 72)]
    order = torch.randperm(200, generator=draw)
    matrix = concatenated([matrices[0], matrices[1].reordered(order), matrices[2]])
    meant = [each.dequantised() for each in matrices]
    wide = torch.cat([meant[0], meant[1][order], meant[2]])
    assert torch.equal(matrix.dequantised(), wide) and matrix.shape == wide.shape
    x, bias = torch.randn(5, 384, generator=draw), torch.randn(400, generator=draw)
    residual = torch.randn(5, 400, generator=draw)
    seen = x
    if scheme == "fp8_channel":
        seen = _rounded(x)
    elif scheme == "fp8_block128":
        seen = torch.cat([_rounded(part) for part in x.split(128, dim=1)], dim=1)
    products, before = Products(), residual.clone()
    exact = {"atol": 2e-4, "rtol": 1e-5}
    torch.testing.assert_close(products.linear(x, matrix, bias), seen @ wide.T + bias, **exact)
    added = products.add_linear(residual, x, matrix, None)
    torch.testing.assert_close(added, before + seen @ wide.T, **exact)
    assert torch.equal(residual, before)
    half = products.linear(x.bfloat16(), matrix)
    assert half.dtype == torch.bfloat16


def test_blocks_stay_blocks_where_rows_stay_in_them() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (quantised(torch.randn(256, 256, generator=draw), "fp8_block128") for _ in "ab")
    turned = one.reordered(torch.arange(256).view(-1, 2, 32).transpose(1, 2).flatten())
    assert concatenated([turned, other]).scheme == "fp8_block128"
    assert one.reordered(torch.arange(256).roll(64)).scheme == "fp8_row128"
    assert quantised(torch.zeros(4, 32), "fp8_channel").dequantised().eq(0).all()
    with pytest.raises(ValueError, match="cannot be one matrix"):
        concatenated([one, Matrix.plain(one.dequantised())])


def test_every_number_of_eight_bits_widens() -> None:
    every = torch.arange(256).to(torch.uint8).view(fp8.E4M3)
    numbers = every[~every.isnan()][None]
    assert torch.equal(fp8.widen(numbers), numbers.float())


def test_modules_may_stay_in_floats(tmp_path):
    """`o_proj` of one layer, and all of another layer, are named as left out."""
    left = ("model.layers.1.self_attn.o_proj", "model.layers.2")

    def stays(name: str) -> bool:
        return any(f".{each}." in f".{name}." for each in left)

    paths = tmp_path / "quantised", tmp_path / "floats"
    write(*paths, "awq", left=stays, **SIZES)
    config = {**FORMATS["awq"][1], "modules_to_not_convert": list(left)}
    edit_config(paths[0], quantization_config=config)
    decoder, tokens = load_decoder(resolve(str(paths[0]))), prompt(40)
    layers = decoder.weights.layers
    assert [layer.o.scheme for layer in layers] == ["int4_g32", "float32", "float32", "int4_g32"]
    close(in_chunks(decoder, tokens, [40]), expected(reference(paths[1]), tokens))


def test_a_tied_head_stays_in_floats(tmp_path):
    paths = tmp_path / "quantised", tmp_path / "floats"
    write(*paths, "pack-quantized", family="llama31", **SIZES)
    decoder, tokens = load_decoder(resolve(str(paths[0]))), prompt(40)
    assert decoder.weights.head.values is decoder.weights.embedding
    close(in_chunks(decoder, tokens, [40]), expected(reference(paths[1]), tokens))


def edited(path: Path, name: str, tensor: Any) -> None:
    """Replace a tensor of the checkpoint, or add one; None removes it."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    old = tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor(old)
    save_file(tensors, file, {"format": "pt"})


def _with(place: tuple[int, ...], value: float):
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


O = "model.layers.1.self_attn.o_proj"  # noqa: E741
_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor"}
REFUSED = {
    "floats where numbers of eight bits belong": (
        "fp8", "weight", lambda t: t.float(), r"mistyped tensors: .*weight F32 instead of F8_E4M3"
    ),
    "numbers of another eight bits": (
        "fp8", "weight", lambda t: t.float().to(torch.float8_e5m2), "F8_E5M2 instead of F8_E4M3"
    ),
    "no scales": ("fp8", "weight_scale_inv", None, "missing tensors: .*weight_scale_inv"),
    "too few scales": ("fp8", "weight_scale_inv", lambda t: t[:1].clone(), "misshapen tensors"),
    "a scale of 0": (
        "fp8", "weight_scale_inv", _with((0, 1), 0.0), r"1\.self_attn\.o_proj\.weight_scale_inv has"
    ),
    "a scale that is no number": (
        "float-quantized-channel", "weight_scale", _with((3, 0), float("nan")), "weight_scale has"
    ),
    "an endless scale": ("awq", "scales", _with((0, 3), float("inf")), "o_proj.scales has scales"),
    "a scale below 0": (
        "float-quantized-channel", "weight_scale", _with((3, 0), -1.0), "scales that are not above"
    ),
    "a scale of 0 in four bits": ("gptq", "scales", _with((0, 3), 0.0), "o_proj.scales has scales"),
    "a value that is no number": (
        "fp8", "weight", lambda t: _with((0, 0), 127)(t.view(torch.uint8)).view(t.dtype),
        "o_proj.weight has values that are not numbers",
    ),
    "act-order": ("gptq", "g_idx", lambda t: t.flip(0).contiguous(), "but desc_act is false"),
    "act-order of compressed-tensors": (
        "pack-quantized", "weight_g_idx", lambda _: torch.arange(6).int().repeat(32),
        "o_proj.weight_g_idx orders columns by activations, but actorder is not group",
    ),
    "a group from nowhere": (
        "gptq-act-order", "g_idx", lambda t: t + 1, r"o_proj.g_idx names others than the 6 groups"
    ),
    "another shape": ("pack-quantized", "weight_shape", lambda t: t + 1, "o_proj.weight_shape is"),
    "a bias from nowhere": ("gptq", "bias", lambda t: t + 1, "surplus tensors: .*o_proj.bias"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_by_name(checkpoint, what):
    form, end, change, message = REFUSED[what]
    path = checkpoint(form)
    edited(path, f"{O}.{end}", change)
    with pytest.raises(WeightsError, match=message):
        load_decoder(resolve(str(path)))


def test_config_and_tensors_must_agree(checkpoint, folders):
    path = checkpoint("fp8")
    edit_config(path, quantization_config=None)
    with pytest.raises(WeightsError, match=r"mistyped tensors: .*weight F8_E4M3"):
        load_decoder(resolve(str(path)))
    floats = Path(shutil.copytree(folders("fp8")[1], path.parent / "floats"))
    edit_config(floats, quantization_config=FORMATS["fp8"][1])
    with pytest.raises(WeightsError, match=r"missing tensors: .*weight_scale_inv"):
        load_decoder(resolve(str(floats)))
    unlike = checkpoint("gptq")
    edit_config(unlike, quantization_config={**FORMATS["gptq"][1], "group_size": 128})
    with pytest.raises(WeightsError, match="q_proj cannot be stored as gptq: a matrix of 192"):
        load_decoder(resolve(str(unlike)))


def test_modules_of_one_matrix_must_be_stored_alike(tmp_path):
    left = "model.layers.1.mlp.up_proj"
    write(tmp_path / "a", tmp_path / "b", "awq", left=lambda name: name == left, **SIZES)
    config = {**FORMATS["awq"][1], "modules_to_not_convert": [left]}
    edit_config(tmp_path / "a", quantization_config=config)
    refused = r"gate_proj, mlp\.up_proj: matrices of float32, int4.*; --quantization fp8 makes them"
    with pytest.raises(WeightsError, match=refused):
        load_decoder(resolve(str(tmp_path / "a")))
    decoder = load_decoder(resolve(str(tmp_path / "a")), quantization="fp8")
    assert decoder.weights.layers[1].mlp.gate_up.scheme == "fp8_channel"


def test_matrices_with_and_without_zero_points_are_joined() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (quantised(torch.randn(8, 64, generator=draw), "int4_g32") for _ in "ab")
    zeros = torch.randint(0, 16, (8, 2), generator=draw, dtype=torch.uint8)
    parts = [one, replace(other, zeros=zeros)]
    meant = torch.cat([part.dequantised() for part in parts])
    assert torch.equal(concatenated(parts).dequantised(), meant)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("fp8", {"fmt": "e5m2"}, "fmt of fp8 'e5m2'"),
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_block_size of fp8 \[64, 64\]"),
        ("awq", {"version": "gemv"}, "version of awq 'gemv'"),
        ("awq", {"bits": 8}, "bits of awq 8"),
        ("gptq", {"group_size": 16}, "group_size of gptq 16"),
        ("pack-quantized", {"format": "marlin-24"}, "format of compressed-tensors 'marlin-24'"),
        ("pack-quantized", {"transform_config": {"config_groups": {"R4": {}}}}, "transform_config"),
        ("awq", {"checkpoint_format": "gemv_fast"}, "version of awq 'gemv_fast'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format of gptq True"),
        ("gptq", {"format": "marlin"}, "checkpoint_format of gptq 'marlin'"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic of gptq '\+:\.\*down"),
        ("gptq", {"quant_method": "bitsandbytes"}, "quantisation 'bitsandbytes'"),
        ("gptq", {"quant_method": "auto-round"}, "packing_format of auto-round 'auto_round'"),
        ("gptq", {"quant_method": None, "load_in_4bit": True}, "quantisation 'bitsandbytes'"),
        ("gptq", {"quant_method": "intel/auto-round"}, "packing_format of auto-round"),
        ("float-quantized-channel", {"format": "int-quantized"}, "format of compressed-tensors"),
        ("gptq", {"quant_method": None}, "quantisation 'without a quant_method'"),
    ],
)
def test_other_quantisations_are_refused_by_name(checkpoint, form, change, message):
    path = checkpoint(form)
    edit_config(path, quantization_config={**FORMATS[form][1], **change})
    with pytest.raises(UnsupportedModel, match=message):
        load_decoder(resolve(str(path)))


@pytest.mark.parametrize("groups", [{}, {"group_0": {"targets": []}}])
def test_a_checkpoint_may_be_calibrated_for_the_kv_cache_alone(folders, tmp_path, groups):
    path = Path(shutil.copytree(folders("pack-quantized")[1], tmp_path / "floats"))
    config = {**FORMATS["pack-quantized"][1], "config_groups": groups, "kv_cache_scheme": _CACHE}
    edit_config(path, quantization_config=config)
    tensors = load_file(path / "model.safetensors")
    scales = {f"model.layers.{i}.self_attn.{n}_scale": torch.ones(1) for i in (0, 1) for n in "kv"}
    save_file(tensors | scales, path / "model.safetensors", {"format": "pt"})
    same_weights(path, folders("pack-quantized")[1])
    rounded = load_decoder(resolve(str(path)), quantization="fp8")
    assert rounded.weights.layers[0].o.scheme == "fp8_channel"


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("awq", {"w_bit": 4, "q_group_size": GROUP, "version": "GEMM", "group_size": 128}),
        ("awq", {"format": "gemm", "checkpoint_format": "gemm", "sym": False, "lm_head": False}),
        ("gptq", {"format": "gptq", "dynamic": {}, "meta": {"quantizer": ["gptqmodel:2"]}}),
        ("gptq", {"desc_act": None, "sym": None, "bits": "4", "pack_dtype": None}),
        ("pack-quantized", {"transform_config": {}, "version": "0.11.0", "sparsity_config": {}}),
        ("pack-quantized", {"quant_method": "compressed_tensors"}),
        ("float-quantized-channel", {"format": "naive-quantized"}),
    ],
)
def test_other_spellings_mean_the_same(checkpoint, folders, form, change):
    """The names of older and of newer writers."""
    path = checkpoint(form)
    edit_config(path, quantization_config={**FORMATS[form][1], **change})
    same_weights(path, folders(form)[0])


def test_the_order_of_columns_may_be_left_out_where_it_is_the_usual(checkpoint, folders):
    """As writers leave it out that never choose another one; act-order cannot do without."""
    for form in ("gptq", ORDERED):
        path = checkpoint(form)
        tensors = load_file(path / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(".g_idx")}
        save_file(kept, path / "model.safetensors", {"format": "pt"})
        if form == "gptq":
            same_weights(path, folders(form)[0])
        else:
            with pytest.raises(WeightsError, match=r"missing tensors: .*g_idx"):
                load_decoder(resolve(str(path)))


def same_weights(one: Path, other: Path) -> None:
    """Two checkpoints have the same matrices."""
    loaded = [load_decoder(resolve(str(path))).weights.layers for path in (one, other)]
    for ours, theirs in zip(*loaded, strict=True):
        assert torch.equal(ours.qkv.dequantised(), theirs.qkv.dequantised())
        assert torch.equal(ours.mlp.down.dequantised(), theirs.mlp.down.dequantised())


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ("float-quantized-channel", "compression_config"),
        ("gptq", "quantize_config.json"),
        ("awq", "quant_config.json"),
    ],
)
def test_the_format_may_be_told_elsewhere(checkpoint, folders, form, place):
    """Old writers have another name in config.json, or a file of their own."""
    path, config = checkpoint(form), FORMATS[form][1]
    edit_config(path, quantization_config=None)
    if place.endswith(".json"):
        own = {name: value for name, value in config.items() if name != "quant_method"}
        (path / place).write_text(json.dumps(own))
    else:
        edit_config(path, **{place: config})
    same_weights(path, folders(form)[0])


def test_a_format_that_a_file_of_its_own_names_is_refused_by_name(checkpoint):
    path = checkpoint("fp8")
    edit_config(path, quantization_config=None)
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UnsupportedModel, match="quant_algo of modelopt 'NVFP4'"):
        load_decoder(resolve(str(path)))


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("fp8", {"modules_to_not_convert": ["re:model\\.layers\\.1\\.self_attn\\.o_proj"]}),
        ("awq", {"modules_to_not_convert": ["layers.1.self_attn.o_proj"]}),
        ("gptq", {"dynamic": {"-:.*layers\\.1\\.self_attn\\.o_proj": {}}}),
        ("pack-quantized", {"ignore": ["re:.*lm_head", "re:.*1\\.self_attn\\.o.*"]}),
    ],
)
def test_patterns_leave_modules_in_floats(tmp_path, form, change):
    write(tmp_path / "a", tmp_path / "b", form, left=lambda name: name == O, **SIZES)
    edit_config(tmp_path / "a", quantization_config={**FORMATS[form][1], **change})
    layers = load_decoder(resolve(str(tmp_path / "a"))).weights.layers
    assert [layer.o.scheme == "float32" for layer in layers] == [False, True, False, False]


@pytest.mark.parametrize(
    ("form", "family", "change"),
    [
        ("awq", "qwen2", {"modules_to_not_convert": ["model.layers.1."]}),
        ("awq", "phi3", {}),
        ("fp8", "qwen2", {"modules_to_not_convert": ["decoder.layers.1.mlp"]}),
        ("fp8", "qwen2", {"modules_to_not_convert": ["layers.1.", "layers.2"]}),
        ("pack-quantized", "qwen2", {"ignore": ["model.layers.1"]}),
        ("gptq", "qwen2", {"modules_in_block_to_quantize": [["self_attn.o_proj"]]}),
    ],
)
def test_tensors_tell_formats_that_a_config_says_otherwise(tmp_path, caplog, form, family, change):
    """Layer 1 is stored in floats: lists that others match in other ways say less or more."""
    write(tmp_path / "a", tmp_path / "b", form, family, lambda name: ".layers.1." in name, **SIZES)
    edit_config(tmp_path / "a", quantization_config={**FORMATS[form][1], **change})
    decoder, floats = (load_decoder(resolve(str(tmp_path / n))) for n in "ab")
    for place, (ours, meant) in enumerate(
        zip(decoder.weights.layers, floats.weights.layers, strict=True)
    ):
        for kind in (lambda layer: layer.qkv, lambda layer: layer.mlp.down):
            assert (kind(ours).scheme == "float32") == (place == 1)
            close(kind(ours).dequantised().float(), kind(meant).values)
    assert "modules have another format than quantization_config says" in caplog.text


JOINED_FORMS = ["fp8", "float-quantized-tensor", "awq", "gptq", "pack-quantized-zeros"]


@pytest.mark.parametrize("form", JOINED_FORMS)
@pytest.mark.parametrize("family", ["phi3", "glm"])
def test_joined_modules_are_what_they_mean(family, form, tmp_path):
    """Checkpoints that join gate and up, and q, k and v too."""
    write(tmp_path / "a", tmp_path / "b", form, family, **SIZES)
    decoder, floats = (load_decoder(resolve(str(tmp_path / n))) for n in "ab")
    for ours, meant in zip(decoder.weights.layers, floats.weights.layers, strict=True):
        assert ours.qkv.scheme.startswith("int4" if form in FOUR_BITS else "fp8")
        for kind in (lambda layer: layer.qkv, lambda layer: layer.mlp.gate_up):
            close(kind(ours).dequantised().float(), kind(meant).values)
    if form in FOUR_BITS:
        tokens = prompt(40)
        close(in_chunks(decoder, tokens, [40]), in_chunks(floats, tokens, [40]))


def test_a_joined_module_may_stay_in_floats(tmp_path):
    left = "model.layers.1.self_attn.qkv_proj"
    write(tmp_path / "a", tmp_path / "b", "awq", "phi3", lambda name: name == left, **SIZES)
    config = {**FORMATS["awq"][1], "modules_to_not_convert": [left]}
    edit_config(tmp_path / "a", quantization_config=config)
    layers = load_decoder(resolve(str(tmp_path / "a"))).weights.layers
    assert [layer.qkv.scheme for layer in layers] == ["int4_g32", "float32", "int4_g32", "int4_g32"]
    assert layers[1].mlp.gate_up.scheme == "int4_g32"


def test_only_named_modules_of_a_block_may_be_quantised(tmp_path):
    """GPTQ's `modules_in_block_to_quantize`."""

    def stays(name: str) -> bool:
        return ".mlp." in name

    write(tmp_path / "a", tmp_path / "b", "gptq", left=stays, **SIZES)
    attention = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
    config = {**FORMATS["gptq"][1], "modules_in_block_to_quantize": attention}
    edit_config(tmp_path / "a", quantization_config=config)
    layer = load_decoder(resolve(str(tmp_path / "a"))).weights.layers[0]
    assert (layer.o.scheme, layer.mlp.down.scheme) == ("int4_g32", "float32")


@pytest.mark.parametrize("broad", ["Linear", "re:.*proj"])
def test_the_group_that_names_a_module_holds(tmp_path, broad):
    """Whatever the order in which compressed-tensors' groups are written; of two expressions that
    mean a module, its tensors tell which holds."""
    base = FORMATS["pack-quantized"][1]
    [general] = base["config_groups"].values()
    [eight] = FORMATS["float-quantized-channel"][1]["config_groups"].values()
    special = {**eight, "targets": ["re:.*down_proj"], "format": "float-quantized"}
    write(tmp_path / "a", tmp_path / "b", "pack-quantized", **SIZES)
    write(tmp_path / "eight", tmp_path / "c", "float-quantized-channel", **SIZES)
    file, down = tmp_path / "a/model.safetensors", "mlp.down_proj."
    tensors = {n: t for n, t in load_file(file).items() if down not in n}
    others = load_file(tmp_path / "eight/model.safetensors")
    save_file(tensors | {n: t for n, t in others.items() if down in n}, file, {"format": "pt"})
    groups = {"group_0": {**general, "targets": [broad]}, "group_1": special}
    edit_config(tmp_path / "a", quantization_config={**base, "config_groups": groups})
    layer = load_decoder(resolve(str(tmp_path / "a"))).weights.layers[0]
    assert (layer.o.scheme, layer.mlp.down.scheme) == ("int4_g32", "fp8_channel")


@pytest.mark.parametrize(
    ("form", "change", "ends"),
    [
        ("float-quantized-tensor", {"kv_cache_scheme": _CACHE}, ("k_scale", "v_scale")),
        ("fp8", {"kv_cache_scheme": "static"}, ("k_proj.output_scale", "v_proj.output_scale")),
        ("fp8", {"activation_scheme": "static"}, ("q_proj.input_scale", "k_proj.input_scale")),
    ],
)
def test_calibrated_scales_are_left_out(checkpoint, folders, form, change, ends):
    """Those of a KV cache and of activations: ours follow each token."""
    path = checkpoint(form)
    with_scales(path, ends)
    with pytest.raises(WeightsError, match=r"surplus tensors: .*_scale"):
        load_decoder(resolve(str(path)))
    edit_config(path, quantization_config={**FORMATS[form][1], **change})
    same_weights(path, folders(form)[0])


def with_scales(path: Path, ends: Sequence[str]) -> None:
    """Add calibrated scales of attention to each layer."""
    file = path / "model.safetensors"
    names = [f"model.layers.{i}.self_attn.{end}" for i in range(4) for end in ends]
    scales = {name: torch.tensor(0.02) for name in names}
    save_file(load_file(file) | scales, file, {"format": "pt"})


def test_static_activations_of_compressed_tensors(checkpoint, folders):
    form = "float-quantized-tensor"
    path, config = checkpoint(form), FORMATS[form][1]
    with_scales(path, ("o_proj.input_scale",))
    [group] = config["config_groups"].values()
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    groups = {"group_0": {**group, "input_activations": static}}
    edit_config(path, quantization_config={**config, "config_groups": groups})
    same_weights(path, folders(form)[0])


@pytest.mark.parametrize("nested", [False, True, "config"])
def test_modelopt_stores_one_scale_for_each_module(checkpoint, folders, nested):
    """In config.json, or in the older hf_quant_config.json."""
    path = checkpoint("float-quantized-tensor")
    with_scales(path, ("o_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale"))
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*x"]}
    own = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": said}
    config = {False: {"quant_method": "modelopt", **said}, True: None, "config": own}[nested]
    edit_config(path, quantization_config=config)
    if config is None:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    same_weights(path, folders("float-quantized-tensor")[0])


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_auto_round_writes_the_layouts_of_others(tmp_path, form):
    write(tmp_path / "a", tmp_path / "b", form, left=lambda name: name == O, **SIZES)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    left = {"modules_to_not_convert": [O]}
    edit_config(tmp_path / "c", quantization_config={**FORMATS[form][1], **left})
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": GROUP,
        "packing_format": f"auto_round:auto_{form}",
        "extra_config": {O: {"bits": 16}},
    }
    edit_config(tmp_path / "a", quantization_config=config)
    same_weights(tmp_path / "a", tmp_path / "c")


def test_groups_of_attention_are_about_the_cache(checkpoint, folders):
    path, config = checkpoint("float-quantized-channel"), FORMATS["float-quantized-channel"][1]
    attention = {"targets": ["Qwen2Attention"], "input_activations": {"num_bits": 8}}
    groups = {"attention": attention, **config["config_groups"]}
    edit_config(path, quantization_config={**config, "config_groups": groups})
    same_weights(path, folders("float-quantized-channel")[0])


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("pack-quantized", {"ignore": ["re:*lm_head"]}),
        ("gptq", {"dynamic": {"-:(": {}}}),
    ],
)
def test_a_broken_pattern_is_named(checkpoint, form, change):
    path = checkpoint(form)
    edit_config(path, quantization_config={**FORMATS[form][1], **change})
    with pytest.raises(ValueError, match=r"config\.json: quantization_config: .* is not a pattern"):
        load_decoder(resolve(str(path)))


@pytest.mark.parametrize(("asked", "scheme"), [("fp8", "fp8_channel"), ("int4", "int4_g128")])
def test_dummy_weights_of_every_scheme(asked, scheme, checkpoint):
    path = checkpoint("fp8")
    edit_config(path, hidden_size=256, intermediate_size=384, quantization_config=None)
    source = resolve(str(path), "dummy")
    decoder = load_decoder(source, load_format="dummy", quantization=asked)
    layer = decoder.weights.layers[0]
    assert {m.scheme for m in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)} == {scheme}
    fewest = {"fp8": 1.0, "int4": 0.5}[asked]
    assert fewest < decoder.weights.matrix_itemsize < 1.07 * fewest
    assert len(layer.qkv.scales.unique()) > 9
    assert len(layer.qkv.values.view(torch.uint8).unique()) > 9
    assert 0.015 < float(layer.o.dequantised().std()) < 0.025
    assert in_chunks(decoder, prompt(5), [5]).isfinite().all()


def test_dummy_weights_follow_the_config(checkpoint):
    decoder = load_decoder(resolve(str(checkpoint("fp8")), "dummy"), load_format="dummy")
    assert decoder.weights.layers[0].o.scheme == "fp8_block128"


def test_floats_are_rounded_while_they_are_loaded(folders):
    source, tokens = resolve(str(folders("fp8")[1])), prompt(60)
    plain = in_chunks(load_decoder(source), tokens, [60])
    for asked in ("fp8", "fp8_block128"):
        ours = in_chunks(load_decoder(source, quantization=asked), tokens, [60])
        assert cost_of(1) < distance(ours, plain) < cost_of(8 * LAYERS)  # weights, activations
    with pytest.raises(ValueError, match="quantization must be one of"):
        load_decoder(source, quantization="fp4")
    with pytest.raises(ValueError, match="int4 is for dummy weights"):
        load_decoder(source, quantization="int4")
    with pytest.raises(ValueError, match="the checkpoint is stored as awq"):
        load_decoder(resolve(str(folders("awq")[0])), quantization="fp8_block128")
    with pytest.raises(ValueError, match="the checkpoint is stored as fp8"):
        load_decoder(resolve(str(folders("fp8")[0])), quantization="fp8")


def test_four_bits_may_be_rounded_again(folders):
    quantised, floats = folders("awq")
    decoder, tokens = load_decoder(resolve(str(quantised)), quantization="fp8"), prompt(60)
    assert decoder.weights.layers[0].qkv.scheme == "fp8_channel"
    ours, plain = in_chunks(decoder, tokens, [60]), expected(reference(floats), tokens)
    assert cost_of(1) < distance(ours, plain) < cost_of(8 * LAYERS)


@pytest.mark.parametrize("form", [*EIGHT_BITS, *FOUR_BITS])
def test_what_a_gpu_gets_means_the_same(folders, form):
    """Four bits stay so where columns allow; e4m3 has a scale for each row, or is as it was."""
    layer = load_decoder(resolve(str(folders(form)[0]))).weights.layers[0]
    for matrix in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down):
        there, meant = for_gpu(matrix, torch.bfloat16), matrix.dequantised().float()
        apart = (there.dequantised().float() - meant).norm() / meant.norm()
        if form in FOUR_BITS:
            whole = matrix.shape[1] % 128 == 0
            assert there.scheme == ("int4_gpu32" if whole else "bf16") and apart < 0.003
            assert for_gpu(matrix, torch.bfloat16, four_bits=False).scheme == "bf16"
        else:
            assert there.scheme == "fp8_channel" and apart < 0.05
            assert (there is matrix) == (matrix.scheme == "fp8_channel")
        assert for_gpu(matrix, torch.float16).scheme == "float16"


class CountedName(str):
    """A name of which somebody counts how often it is looked at."""

    looks = 0

    def startswith(self, *begin: Any) -> bool:
        CountedName.looks += 1
        return super().startswith(*begin)


@pytest.mark.parametrize("by_pattern", [False, True])
def test_long_lists_of_modules_are_not_read_for_each_module(by_pattern):
    """Mixtures of experts have tens of thousands of modules, and lists that name many of them."""
    ignored = [CountedName(f"model.layers.{i}.mlp.gate") for i in range(1000)]
    form = Format("fp8_scale", "fp8")
    groups = (ModuleGroup(form, ("Linear",)),)
    found = Quantization(groups, (*ignored, "b.c"), head=True, by_pattern=by_pattern)
    CountedName.looks = 0
    formats = [found.format(f"model.layers.{i}.mlp.gate") for i in range(2000)]
    assert formats == [None] * 1000 + [form] * 1000
    assert CountedName.looks <= 2 * len(ignored)
    below, beside = found.format("a.b.c.d"), found.format("a.b.cd")
    assert (below, beside) == (form if by_pattern else None, form)
