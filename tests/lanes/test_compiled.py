"""Layers of few bits in compiled code: what it computes, in every order and on several threads."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.model.checkpoints import load_decoder, make_checkpoint
from tests.model.passes import PAGE, Pool, in_chunks, prompt
from tests.model.quantised_checkpoints import write
from tests.model.test_gguf import write_gguf
from twolane.kernels.cpu.availability import available
from twolane.model.attention import Batch, Segment
from twolane.model.load.hub import resolve
from twolane.model.matrix import Matrix, in_tiles, quantised
from twolane.model.products import Products

if not available():
    pytest.skip("llvmlite or products of eight bits are missing", allow_module_level=True)

from twolane.kernels.cpu import compiler, team, tiles
from twolane.kernels.cpu.instructions import Code
from twolane.lanes.cpu.compiled import compiled_layers
from twolane.lanes.disaggregated.cpu_mirror import MirroredKVCache
from twolane.lanes.disaggregated.shared_memory import SharedMemory

FORMATS = {"int4_g32": 384, "int4_g128": 384, "four, half": 320, "eight": 576}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(kind, rows=48, columns=256):
    """A matrix and what its tiles should mean."""
    if kind == "eight":
        return in_tiles(Matrix.plain(drawn(rows, columns))), drawn(rows, columns)
    if kind != "four, half":
        matrix = quantised(drawn(rows, columns), kind)
        return in_tiles(matrix), matrix.dequantised()
    numbers = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales, minima = (drawn(rows, columns // 32, seed=i).half().float() for i in (1, 2))
    matrix = Matrix(numbers, "int4_min32", scales, minima)
    blocks = numbers.view(rows, -1, 16)
    wide = torch.cat([blocks & 15, blocks >> 4], dim=2) * scales[..., None] + minima[..., None]
    return in_tiles(matrix), wide.flatten(1)


@pytest.fixture(params=[1, 2])
def threads(request):
    team.set_threads(request.param)
    yield request.param
    team.set_threads(1)


@pytest.mark.parametrize("kind", FORMATS)
def test_tiles_mean_the_matrix(kind):
    matrix, meant = matrix_of(kind)
    assert matrix.values.shape[2] == FORMATS[kind]
    assert matrix.shape == meant.shape
    error = (matrix.dequantised() - meant).abs().max()
    assert error <= (meant.abs().max() / 250 if kind == "eight" else 1e-6)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_tiles_stay_theirs_where_they_are_moved(kind):
    matrix, other = matrix_of(kind)[0], matrix_of("eight", 32, 64)[0]
    meant, which = [each.dequantised() for each in (matrix, other)], torch.tensor([0, 47, 16, 47])
    before = matrix.values.data_ptr()
    tiles.move_together([matrix.values, other.values])
    assert matrix.values.data_ptr() != before
    assert torch.equal(tiles.rows(matrix.values, which), meant[0][which])
    assert torch.equal(other.dequantised(), meant[1])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_product_is_right_and_the_same_beside_any_rows(kind, threads):
    matrix, _ = matrix_of(kind)
    x, bias, products = drawn(147, 256, seed=5) * 30, drawn(48, seed=6), Products()
    together = products.linear(x, matrix, bias)
    exact = x.double() @ matrix.dequantised().double().t() + bias
    assert (together - exact).abs().max() < 2e-4 * exact.abs().max()
    for rows in (slice(0, 1), slice(5, 7), slice(20, 35), slice(60, 147)):
        assert torch.equal(products.linear(x[rows], matrix, bias), together[rows])


def test_numbers_that_are_none_stay_none():
    matrix, x = matrix_of("eight")[0], drawn(3, 256)
    x[1, 40] = torch.nan
    x[2, 7] = torch.inf
    out = Products().linear(x, matrix)
    assert out[0].isfinite().all()
    assert not out[1:].isfinite().any()


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
def test_four_bits_of_a_file_are_served_as_they_are(tmp_path, kind):
    path, file = make_checkpoint("granite", tmp_path / "c"), tmp_path / "m.gguf"
    write_gguf(path, file, "granite", kind)
    exact, served = (load_decoder(resolve(str(file)), eight_bits=few) for few in (False, True))
    for one, other in zip(exact.weights.layers, served.weights.layers, strict=True):
        for meant, matrix in zip(one.matrices, other.matrices, strict=True):
            assert matrix.values.shape[2] == 320
            assert torch.equal(matrix.dequantised(), meant.dequantised())
    assert served.weights.head.scheme == "tiles"


def test_a_classifier_that_is_the_embedding_is_kept_once(tmp_path):
    path, file = make_checkpoint("qwen3", tmp_path / "c"), tmp_path / "m.gguf"
    write_gguf(path, file, "qwen3", Type.Q4_1)
    exact, served = (load_decoder(resolve(str(file)), eight_bits=few) for few in (False, True))
    assert served.weights.embedding is served.weights.head.values
    tokens = torch.tensor([3, 200, 3])
    meant = exact.embed(tokens)
    assert (served.embed(tokens) - meant).abs().max() < 0.01 * meant.abs().max()


def decoder_of(family, tmp_path, sizes=None):
    path = make_checkpoint(family, tmp_path / "c", sizes={"head_dim": 32, **(sizes or {})})
    write_gguf(path, tmp_path / "m.gguf", family, Type.Q4_1)
    return load_decoder(resolve(str(tmp_path / "m.gguf")), eight_bits=True)


def logits(decoder, tokens, chunks, seed=0):
    """Logits of one sequence in chunks, by compiled layers."""
    layers, pool = compiled_layers(decoder), Pool(decoder, seed=seed)
    pages, start, out = pool.take(len(tokens)), 0, []
    assert layers is not None
    assert layers.takes(pool.kv)
    for n in chunks:
        batch = Batch.build([Segment(start, n, pages)], PAGE)
        hidden = decoder.embed(tokens[start : start + n])
        middle = layers.run(0, 2, hidden, batch, pool.kv)
        hidden = layers.run(2, decoder.spec.layers, middle, batch, pool.kv)
        out.append(decoder.head(hidden))
        start += n
    return torch.cat(out)


@pytest.mark.parametrize("family", ["granite", "qwen2", "qwen3", "smollm3"])
def test_compiled_layers_are_those_of_the_decoder(tmp_path, family, threads):
    """Biases, norms of heads and layers without rotation included; and however a prompt is cut,
    the same to the last bit."""
    decoder, tokens = decoder_of(family, tmp_path), prompt(90)
    whole = logits(decoder, tokens, [90])
    usual = in_chunks(decoder, tokens, [90])
    assert (whole - usual).abs().max() < 1e-3 * usual.abs().max()
    assert torch.equal(logits(decoder, tokens, [70, 9, 1, 1, 9], seed=3), whole)


def test_a_window_hides_what_is_before_it(tmp_path):
    decoder, tokens = decoder_of("qwen3", tmp_path), prompt(60)
    whole = logits(decoder, tokens, [60])
    spec = decoder.spec
    kinds = tuple(dataclasses.replace(spec.kind(i), window=20) for i in range(spec.layers))
    decoder.spec = dataclasses.replace(spec, kinds=kinds)
    windowed = logits(decoder, tokens, [40, 20])
    assert not torch.allclose(windowed[30:], whole[30:], rtol=1e-3)
    usual = in_chunks(decoder, tokens, [60])
    assert (windowed - usual).abs().max() < 0.02 * usual.abs().max()


def test_the_copy_of_a_pool_in_another_process_gets_what_compiled_code_writes(tmp_path):
    """On 1P1D, whose decode otherwise reads what nobody wrote."""
    decoder, memories = decoder_of("qwen3", tmp_path), (SharedMemory.new(), SharedMemory.new())
    kv = MirroredKVCache(decoder.spec, 8, PAGE, torch.float32, memories)
    for pool in (*kv.layers, *kv.other.layers):
        pool.fill_(torch.nan)
    layers, batch = compiled_layers(decoder), Batch.build([Segment(0, 20, [5, 2, 7])], PAGE)
    assert layers is not None
    assert layers.takes(kv)
    hidden = layers.run(0, 2, decoder.embed(prompt(20)), batch, kv)
    assert all(pool.isnan().all() for pool in kv.other.layers[2:])
    layers.run(2, decoder.spec.layers, hidden, batch, kv)
    assert int(kv._pushed) == decoder.spec.layers  # by which the other process sees progress
    for ours, theirs in zip(kv.layers, kv.other.layers, strict=True):
        assert not ours.isnan().all()
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_other_layers_are_left_to_the_decoder(tmp_path):
    path = make_checkpoint("gemma3", tmp_path / "c")
    write_gguf(path, tmp_path / "m.gguf", "gemma3", Type.Q4_0)
    decoder = load_decoder(resolve(str(tmp_path / "m.gguf")), eight_bits=True)
    assert decoder.weights.layers[0].qkv.scheme == "tiles"
    assert compiled_layers(decoder) is None
    assert in_chunks(decoder, prompt(20), [20]).isfinite().all()


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8"])
def test_checkpoints_of_few_bits_become_tiles(tmp_path, form):
    write(tmp_path / "rounded", tmp_path / "floats", form)
    decoder = load_decoder(resolve(str(tmp_path / "rounded")), eight_bits=True)
    assert decoder.weights.layers[0].qkv.scheme == "tiles"
    ours = in_chunks(decoder, prompt(40), [40])
    meant = in_chunks(load_decoder(resolve(str(tmp_path / "floats"))), prompt(40), [40])
    assert (ours - meant).abs().max() < 0.05 * meant.abs().max()


LIMIT = 7


def steps(first: int, end: int) -> int:
    """Every statement that is translated."""
    total, odd = 0, 0
    for i in range(first, end, 3):
        total += min(i, LIMIT) * (2 if i % 2 == 0 else -1)
        if i >= 10 and i != 13:
            odd += i & 1
        elif not i:
            total = total - 100
        else:
            pass
    while total > 50 or odd > 90:
        total //= 2
        odd = max(odd - 1, 0)
    if total == 3:
        return -1
    return (total << 2) + (odd >> 1) + twice(odd)


def twice(n: int) -> int:
    return 2 * n


def test_translated_functions_are_those_of_python():
    program = compiler.Program({}, Code)
    program.add(twice)
    program.add(steps, exported=True)
    made = compiler.Compiled(program.object_code(), {"steps": 2})
    for first, end in [(0, 0), (0, 10), (0, 40), (2, 90), (5, 6), (9, 12)]:
        assert made["steps"](first, end) == steps(first, end)


def mapped_of_llvm() -> int:
    """KiB of LLVM's library in this process' memory."""
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    parts = re.findall(r"/libllvmlite\.so\nSize:.*\n(?:.*\n)*?Rss: +(\d+) kB", text)
    return sum(map(int, parts))


def test_llvm_that_was_given_back_compiles_again():
    program = compiler.Program({}, Code)
    program.add(twice, exported=True)
    code = program.object_code()
    before = mapped_of_llvm()
    compiler.release()
    assert mapped_of_llvm() < 0.5 * before
    assert program.object_code() == code


def test_compiled_code_is_kept_by_its_sources(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("one")
    first = compiler.made_of([source])
    assert compiler.made_of([source]) == first
    source.write_text("two")
    assert compiler.made_of([source]) != first


def test_a_user_without_a_home_compiles_at_each_start(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiled = team.functions.__wrapped__()
    assert callable(compiled["run_layers"])
