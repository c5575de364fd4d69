"""Weights of eight bits on a CPU: exact sums, what is rounded to them, and what that costs."""

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.model.checkpoints import load_decoder, make_checkpoint
from tests.model.passes import in_chunks, prompt
from tests.model.quantised_checkpoints import write
from tests.model.test_gguf import write_gguf
from twolane.model import int8
from twolane.model.load import weights
from twolane.model.load.hub import resolve
from twolane.model.matrix import Matrix, in_eight_bits
from twolane.model.products import Products

pytestmark = pytest.mark.skipif(not int8.is_fast(), reason="this CPU has no products of 8 bits")


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch):
    """As where `llvmlite` is not installed."""
    monkeypatch.setattr(weights, "compiles", lambda: False)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(decoder):
    for layer in decoder.weights.layers:
        yield from (layer.qkv, layer.o, *(matrix for _, matrix in layer.mlp.matrices()))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 100), (96, 576)])
def test_products_are_those_of_the_numbers_that_are_meant(rows, columns):
    """To the last bit: sums of integers have no order."""
    x, weight = drawn(7, columns) * 9, drawn(rows, columns, seed=1)
    values, scales = int8.quantise_rows(weight)
    halves, steps = int8.split(x)
    upper, lower = (halves.long() @ values.long().t()).float().mul(scales).chunk(2)
    expected = torch.add(upper, lower, alpha=1 / int8.LARGEST) * steps
    matrix = in_eight_bits(Matrix.plain(weight))
    assert matrix.shape == (rows, columns)
    assert torch.equal(matrix.dequantised(), values * scales[:, None])
    assert torch.equal(Products().linear(x, matrix), expected)


def test_a_row_is_the_same_beside_any_others():
    products, matrix = Products(), in_eight_bits(Matrix.plain(drawn(96, 576)))
    x, residual, bias = drawn(300, 576, seed=1), drawn(300, 96, seed=2), drawn(96, seed=3)
    together = products.linear(x, matrix, bias), products.add_linear(residual, x, matrix, bias)
    for rows in (slice(0, 1), slice(5, 21), slice(140, 300)):
        alone = products.linear(x[rows], matrix, bias)
        added = products.add_linear(residual[rows], x[rows], matrix, bias)
        assert torch.equal(alone, together[0][rows])
        assert torch.equal(added, together[1][rows])


def test_activations_keep_fourteen_bits_whatever_their_size():
    x = torch.stack([drawn(576), drawn(576) * 1e20, drawn(576) * 1e-20, torch.zeros(576)])
    halves, steps = int8.split(x)
    upper, lower = halves.float().chunk(2)
    error = (upper + lower / int8.LARGEST) * steps - x
    assert bool((error.abs() <= x.abs().amax(dim=1, keepdim=True) / 2**14 * 1.02).all())


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.F16], ids=lambda k: k.name)
def test_files_of_few_bits_are_served_in_eight(tmp_path, kind):
    """With what they mean; those of 16 bits are left alone."""
    path, file = make_checkpoint("qwen3", tmp_path / "c"), tmp_path / "m.gguf"
    write_gguf(path, file, "qwen3", kind)
    tokens, source = prompt(40), resolve(str(file))
    exact, decoder = load_decoder(source), load_decoder(source, eight_bits=True)
    few = kind != Type.F16
    assert {m.scheme for m in matrices(decoder)} == {"int8_channel" if few else "float32"}
    assert decoder.weights.head.scheme == ("int8_channel" if few else "float32")
    assert (decoder.weights.embedding_scales is not None) is few
    assert decoder.dtype == torch.float32
    ours, meant = in_chunks(decoder, tokens, [40]), in_chunks(exact, tokens, [40])
    assert (ours - meant).abs().max() < (0.05 if few else 1e-6) * meant.abs().max()


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8", "float-quantized-channel"])
def test_checkpoints_of_few_bits_are_served_in_eight(tmp_path, form):
    rounded, floats = tmp_path / "rounded", tmp_path / "floats"
    write(rounded, floats, form)
    tokens = prompt(40)
    decoder = load_decoder(resolve(str(rounded)), eight_bits=True)
    assert {m.scheme for m in matrices(decoder)} == {"int8_channel"}
    ours = in_chunks(decoder, tokens, [40])
    meant = in_chunks(load_decoder(resolve(str(floats))), tokens, [40])
    assert (ours - meant).abs().max() < 0.05 * meant.abs().max()


def test_another_cpu_keeps_what_is_stored(tmp_path, monkeypatch):
    """And so do several ranks, which would round other rows."""
    write(tmp_path / "rounded", tmp_path / "floats", "float-quantized-channel")
    source = resolve(str(tmp_path / "rounded"))
    _, shared = weights.load_weights(source, rank=0, ranks=2, eight_bits=True)
    assert not shared.layers[0].o.scheme.startswith("int8")
    monkeypatch.setattr(int8, "is_fast", lambda: False)
    assert not any(
        m.scheme == "int8_channel" for m in matrices(load_decoder(source, eight_bits=True))
    )


@pytest.mark.parametrize("family", ["granite", "qwen2", "qwen3", "smollm3", "gemma3"])
def test_a_layer_in_two_calls_is_the_same_layer(tmp_path, family):
    """To the last bit, in prompts and in decode steps; a layer with more to compute stays whole."""
    path, file = make_checkpoint(family, tmp_path / "c"), tmp_path / "m.gguf"
    write_gguf(path, file, family, Type.Q8_0)
    tokens, decoder = prompt(40), load_decoder(resolve(str(file)), eight_bits=True)
    assert all((layer is None) is (family == "gemma3") for layer in decoder._int8)
    ours = in_chunks(decoder, tokens, [33, 5, 1, 1])
    decoder._int8 = [None] * decoder.spec.layers
    assert torch.equal(ours, in_chunks(decoder, tokens, [33, 5, 1, 1]))


def test_functions_run_without_torchscript(monkeypatch):
    def refuse(function):
        raise RuntimeError("no TorchScript")

    monkeypatch.setattr(torch.jit, "script", refuse)
    assert int8.scripted(drawn) is drawn
