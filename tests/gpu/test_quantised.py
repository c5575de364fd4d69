"""Quantised checkpoints on a GPU, in bfloat16, say what the CPU says of the same rounding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.kernels.test_gpu_decoder import PROMPT, OnGpu, on_cpu
from tests.model.checkpoints import make_checkpoint
from tests.model.quantised_checkpoints import FORMATS, write
from tests.model.test_gguf_families import gpt_oss, in_four_bits
from tests.model.test_gpt_oss import publish
from twolane.kernels import fused
from twolane.kernels.activations import Quantised
from twolane.kernels.products import skinny_gemm
from twolane.kernels.products.dispatch import Case, GpuProducts, input_of
from twolane.kernels.products.skinny_gemm import ROWS
from twolane.kernels.runtime import nvrtc
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.model import fp8
from twolane.model.decoder import Decoder, Weights
from twolane.model.gpu_decoder import GpuDecoder
from twolane.model.load.hub import ModelSource, resolve
from twolane.model.load.weights import load_weights
from twolane.model.matrix import GROUPS, in_registers, quantised

SIZES = {"hidden_size": 256, "intermediate_size": 320}
FOUR_BITS = {"hidden_size": 256, "intermediate_size": 384}
"""Groups of columns that the kernels of four bits multiply."""

if torch.cuda.is_available() and not nvrtc.available(torch.device("cuda", 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


def compared(
    rounded: ModelSource, floats: ModelSource, quantization: str | None = None
) -> tuple[Weights, float, float]:
    """The rounded weights on a GPU, and how far the logits of a CPU and of the GPU are from those
    of the floats in float32, relatively."""
    asked = {"dtype": "bfloat16", "quantization": quantization}
    spec, weights = load_weights(rounded, **asked)
    _, there = load_weights(rounded, device="cuda", **asked)
    _, plain = load_weights(floats, dtype="float32")
    tokens = torch.randint(3, 250, (PROMPT,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cpu, meant = on_cpu(Decoder(spec, weights), tokens), on_cpu(Decoder(spec, plain), tokens)
        gpu = OnGpu(GpuDecoder(spec, there), torch.bfloat16)
        hidden = there.embedding[tokens.cuda()]
        gpu.layers(0, spec.layers, hidden, gpu.prompt())
        logits = gpu.logits(hidden).cpu()
    cost, apart = (float((one - meant).norm() / meant.norm()) for one in (cpu, logits))
    return there, cost, apart


def test_experts_of_a_gguf_file_are_those_of_the_published_layout(tmp_path: Path) -> None:
    """In MXFP4, to the last bit, as the GPU's kernel reads them."""
    sizes = {"hidden_size": 256, "intermediate_size": 128}
    path, file = make_checkpoint("gpt-oss", tmp_path / "m", sizes=sizes), tmp_path / "m.gguf"
    in_four_bits(path)
    gpt_oss(path, file, GGMLQuantizationType.MXFP4)
    publish(path)
    both = (load_weights(resolve(str(each)), device="cuda")[1] for each in (file, path))
    for one, other in zip(*(weights.layers for weights in both), strict=True):
        for (_, a), (_, b) in zip(one.mlp.matrices(), other.mlp.matrices(), strict=True):
            assert a.scheme == b.scheme
            assert torch.equal(a.values, b.values)
            assert a.scales is None or torch.equal(a.scales, b.scales)
    assert {m.scheme for _, m in one.mlp.matrices()} == {"bf16", "mxfp4_gpu"}


@pytest.mark.parametrize("form", FORMATS)
def test_logits(form: str, tmp_path: Path) -> None:
    quantised_path, floats = tmp_path / "quantised", tmp_path / "floats"
    sizes = SIZES if form.startswith(("fp8", "float")) else FOUR_BITS
    write(quantised_path, floats, form, **sizes)
    there, cost, apart = compared(resolve(str(quantised_path)), resolve(str(floats)))
    print(f"{form}: {there.layers[0].qkv.scheme}, CPU {cost:.4f}, GPU {apart:.4f} from float32")
    twice = form in ("fp8", "float-quantized-block")  # blocks are rounded to rows
    assert apart < (1.6 if twice else 1.25) * cost + 0.01


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_logits_of_rounded_experts(family: str, tmp_path: Path) -> None:
    source = resolve(str(make_checkpoint(family, tmp_path / family, seed=1, sizes=SIZES)))
    there, cost, apart = compared(source, source, quantization="fp8")
    print(f"{family}: CPU {cost:.4f}, GPU {apart:.4f} from float32")
    assert there.layers[0].mlp.down.scheme == "fp8_channel"
    assert apart < 1.5 * cost + 0.01  # tokens whose experts are about equally likely may change


@pytest.mark.parametrize("form", ["awq", "gptq", "pack-quantized"])
def test_logits_of_experts_in_four_bits(form: str, tmp_path: Path) -> None:
    quantised_path, floats = tmp_path / "quantised", tmp_path / "floats"
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128}
    write(quantised_path, floats, form, "qwen3-moe", **sizes)
    there, cost, apart = compared(resolve(str(quantised_path)), resolve(str(floats)))
    print(f"{form}: CPU {cost:.4f}, GPU {apart:.4f} from float32")
    assert there.layers[0].mlp.down.scheme.startswith("int4_gpu")
    assert apart < 1.5 * cost + 0.01  # tokens whose experts are about equally likely may change


@pytest.mark.parametrize("rows", (16, 40, 64, 128))
def test_gates(rows: int) -> None:
    """Gate and up in one product, in every way, then rounded for the next product."""
    torch.manual_seed(rows)
    inner, k = 1568, 1104
    matrix = quantised(torch.randn(2 * inner, k, device="cuda") * k**-0.5, "fp8_channel")
    x = torch.randn(rows - 3, k, device="cuda").bfloat16()
    rounded = Quantised(*(part.cuda() for part in fp8.quantise_rows(x.cpu())))
    seen = (rounded.values.float() * rounded.scales) @ matrix.dequantised().T
    gate, up = seen.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    products, case = GpuProducts(32), Case.of("gate_up", matrix)
    buffer = torch.empty(rows - 3, 2 * inner, device="cuda", dtype=torch.bfloat16)
    room = torch.empty(rows - 3, inner, device="cuda", dtype=torch.bfloat16)
    out = input_of(room, torch.empty(rows - 3, 1, device="cuda"), "fp8_channel")
    for way in products._candidates(case, rows - 3):
        products.ways = {case: {rows: way}}
        products.gate_up(rounded, matrix, None, buffer, out)
        got = out.values.float() * out.scales
        error = (got - expected).norm() / expected.norm()
        assert error < 4e-2, (way.name, float(error))


@pytest.mark.parametrize("group", (32, 128))
@pytest.mark.parametrize("rows", ROWS)
def test_every_way_of_four_bits(rows: int, group: int) -> None:
    """Right, and the same each time, queued behind one another on 32 SMs."""
    stream = GreenContexts(0, (32,)).stream("decode", 32)
    draw = torch.Generator("cuda").manual_seed(rows)
    for m, n, k in ((rows, 4096, 1024), (rows - 3, 1568, 1152)):
        wide = torch.randn(n, k, device="cuda", generator=draw) * k**-0.5
        matrix = quantised(wide, GROUPS[group])
        assert matrix.scales is not None
        zeros = torch.randint(0, 16, matrix.scales.shape, device="cuda", generator=draw)
        signs = torch.randint(0, 2, matrix.scales.shape, device="cuda", generator=draw) * 2 - 1
        signed = replace(matrix, zeros=zeros.byte(), scales=matrix.scales * signs)
        matrix = in_registers(signed)
        x, old, bias = (
            torch.randn(*s, device="cuda", generator=draw).bfloat16()
            for s in ((m, k), (m, n), (n,))
        )
        seen = x.float() @ matrix.dequantised().bfloat16().float().T
        gate, up = seen.chunk(2, dim=1)
        expected = {
            "linear": seen + bias.float(),
            "add_linear": seen + bias.float() + old.float(),
            "gate_up": torch.nn.functional.silu(gate) * up,
        }
        for operation, right in expected.items():
            products, case = GpuProducts(32), Case.of(operation, matrix)
            ways = list(products._candidates(case, m))
            skinny_gemm.compile_all(way.variant for way in ways if way.variant is not None)
            torch.cuda.synchronize()
            for way in ways:
                products.ways = {case: {rows: way}}
                with torch.cuda.stream(stream):
                    outs = [old[:, : right.shape[1]].clone() for _ in range(3)]
                    for out in outs:
                        if operation == "gate_up":
                            products.gate_up(x, matrix, None, torch.empty_like(old), out)
                        else:
                            getattr(products, operation)(x, matrix, bias, out)
                torch.cuda.synchronize()
                error = (outs[0].float() - right).norm() / right.norm()
                assert error < 8e-3, (operation, way.name, float(error))
                assert all(torch.equal(out, outs[0]) for out in outs), way.name


@pytest.mark.parametrize("rows", ROWS)
def test_every_way(rows: int) -> None:
    """Right, and the same each time, queued behind one another on 32 SMs."""
    stream = GreenContexts(0, (32,)).stream("decode", 32)
    for m, n, k in ((rows, 4096, 1024), (rows - 3, 1552, 1104)):
        torch.manual_seed(m)
        x = torch.randn(m, k, device="cuda").bfloat16()
        matrix = quantised(torch.randn(n, k, device="cuda") * k**-0.5, "fp8_channel")
        # On a GPU PyTorch divides by a constant as it multiplies by its inverse.
        values, scales = (part.cuda() for part in fp8.quantise_rows(x.cpu()))
        rounded = Quantised(torch.empty_like(values), torch.empty_like(scales))
        fused.quantise(x, rounded)
        assert torch.equal(rounded.scales, scales)
        assert torch.equal(rounded.values.float(), values.float())
        old, bias = (torch.randn(*s, device="cuda").bfloat16() for s in ((m, n), (n,)))
        seen = (values.float() * scales) @ matrix.dequantised().T + bias.float()
        products = GpuProducts(32)
        for operation in ("linear", "add_linear"):
            case = Case.of(operation, matrix)
            expected = seen + old.float() if operation == "add_linear" else seen
            torch.cuda.synchronize()
            for way in products._candidates(case, m):
                products.ways = {case: {rows: way}}
                with torch.cuda.stream(stream):
                    outs = [old.clone() for _ in range(3)]
                    for out in outs:
                        getattr(products, operation)(rounded, matrix, bias, out)
                torch.cuda.synchronize()
                error = (outs[0].float() - expected).norm() / expected.norm()
                assert error < 8e-3, (operation, way.name, float(error))
                assert all(torch.equal(out, outs[0]) for out in outs), way.name
