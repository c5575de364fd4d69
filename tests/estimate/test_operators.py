"""FLOPs and bytes of operators, worked out by hand from the formulas of DuetServe §4.1."""

import numpy as np
import pytest

from twolane.estimate.papers.operators import Operators, Shape
from twolane.estimate.query import Load
from twolane.model.shapes import SHAPES

DENSE, EXPERTS = SHAPES["qwen3-8b"], SHAPES["qwen3-30b-a3b"]
D, M, HEADS, KV_HEADS, DIM = 4096, 12_288, 32, 8, 128
PRODUCTS = ((D, (HEADS + 2 * KV_HEADS) * DIM), (HEADS * DIM, D), (D, 2 * M), (M, D))
"""Inputs and outputs of QKV, output, gate-up and down projection."""


def test_products_read_their_weights_once_and_their_rows_in_and_out() -> None:
    n, b = 7, 2
    linears = Shape(DENSE, b).linears(n)
    assert linears.flops == tuple(2 * n * i * o for i, o in PRODUCTS)
    assert linears.bytes == tuple((n * i + i * o + n * o) * b for i, o in PRODUCTS)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 8), (4, 2), (16, 1)])
def test_attention_reads_queries_and_contexts(ranks: int, kv_heads: int) -> None:
    """Each rank has its part of the heads, and one KV head at least."""
    load, b, kv_b = Load([3, 5], [100, 0]), 2, 0.5
    (flops,), (moved,) = (
        (both := Shape(DENSE, b, ranks, kv_itemsize=kv_b).together(load)).flops,
        both.bytes,
    )
    heads, pairs = HEADS / ranks, 3 * 103 + 5 * 5
    assert flops == 4 * heads * pairs * DIM + 2 * heads * pairs
    assert moved == 2 * heads * 8 * DIM * b + 2 * kv_heads * 108 * DIM * kv_b


@pytest.mark.parametrize("rates", [(1e12, 1e15), (1e15, 1e9)])
def test_attention_is_the_sum_of_each_requests_roofline(rates: tuple[float, float]) -> None:
    shape, loads = Shape(DENSE, 2), [Load([3], [100]), Load([500], [0])]
    both = Load([3, 500], [100, 0])
    seconds = shape.attention(both, np.array([rates[0]]), np.array([rates[1]]))
    assert seconds == pytest.approx(sum(shape.together(each).seconds(*rates) for each in loads))


@pytest.mark.parametrize("spec", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_layer_is_its_products_and_its_attention(spec) -> None:
    shape, load = Shape(spec, 2, 2, 1.0, 1.0), Load([3, 5], [100, 0])
    linears, attention = shape.linears(8), shape.together(load)
    moved, flops = shape.layer(8, load.new, load.reused, load.squares + load.products)
    assert moved == pytest.approx(sum(linears.bytes) + sum(attention.bytes))
    assert flops == pytest.approx(sum(linears.flops) + sum(attention.flops))


def test_experts_multiply_the_rows_that_go_to_them_and_read_those_that_some_go_to() -> None:
    moe, n, b = EXPERTS.moe, 8, 2
    assert moe is not None
    d, width, rows, active = EXPERTS.hidden_size, moe.intermediate_size, 8 * 8, moe.active(n)
    both = [(d, 2 * width), (width, d)]
    linears = Shape(EXPERTS, b).linears(n)
    assert linears.flops[4:] == tuple(2 * rows * i * o for i, o in both)
    assert linears.bytes[4:] == pytest.approx(
        [(rows * i + active * i * o + rows * o) * b for i, o in both]
    )
    assert sum(linears.flops[2:4]) == 0  # no layer has a dense MLP
    assert (Shape(EXPERTS, b).active(n), Shape(DENSE, b).active(n)) == (active, 0)


def test_the_classifier_and_small_kernels_move_what_they_read_and_write() -> None:
    shape, rows = Shape(DENSE, 2), 3
    head = shape.classifier(rows)
    assert head.flops == (2 * rows * D * DENSE.vocab_size,)
    assert head.bytes == ((rows * D + D * DENSE.vocab_size + rows * DENSE.vocab_size) * 2,)
    assert shape.elementwise(rows).bytes == tuple(rows * w * 2 for w in (4 * D, 4 * D, 3 * M))
    assert shape.reduced_bytes(rows) == rows * D * 2


def test_operators_take_the_longer_of_computing_and_moving_each() -> None:
    both = Operators((10.0, 4.0), (6.0, 30.0))
    assert both.seconds(flop_rate=2.0, byte_rate=3.0) == 10 / 2 + 30 / 3
    assert (both + both).seconds(2.0, 3.0) == 2 * both.seconds(2.0, 3.0)


def test_a_mean_layer_of_both_kinds_of_attention() -> None:
    """Three of four layers of Qwen3.5 move a state of constant size in the place of contexts."""
    spec, b = SHAPES["qwen3.5-35b-a3b"], 2
    assert spec.delta is not None
    shape, state = Shape(spec, b), 2 * spec.delta.state_bytes(b)
    (short,), (long,) = (shape.together(Load.decode([c] * 8)).bytes for c in (1000, 2000))
    assert long - short == 8 * 1000 * 2 * 2 * 256 * b / 4
    queries = 8 * 2 * 16 * 256 * b / 4
    assert short == pytest.approx(8 * 0.75 * state + queries + 8 * 1001 * 2 * 2 * 256 * b / 4)
    weights = sum(flops / 2 for flops in shape.linears(1).flops) * spec.layers
    active = spec.parameters - 2 * spec.vocab_size * spec.hidden_size
    active -= spec.layers * (256 - 8) * 3 * 512 * spec.hidden_size
    assert weights == pytest.approx(active, rel=0.01)
