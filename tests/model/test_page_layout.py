"""Which pages the layers of a model have, and what a pool of them holds."""

from dataclasses import replace

import pytest

from twolane.model.page_layout import PageLayout
from twolane.model.shapes import SHAPES
from twolane.model.spec import FULL, Heads, LayerKind, ModelSpec

SPEC = ModelSpec("qwen3", 6, 64, 4, 2, 16, 128, 256, 512)
WINDOW = LayerKind(window=32)


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-20b", "gpt-oss-120b"])
def test_no_two_layers_share_a_place_and_a_table(name: str) -> None:
    spec = SHAPES[name]
    layout = PageLayout.of(spec)
    assert len({*zip(layout.tables, layout.places, strict=True)}) == spec.layers
    assert max(layout.places) < layout.layers
    for layer, table in enumerate(layout.tables):
        assert (table > 0) == (spec.window(layer) is not None)


@pytest.mark.parametrize(
    ("name", "context", "times"),
    [
        ("gemma-3-27b", 32_768, 4.7),
        ("gemma-3-27b", 8192, 3.3),
        ("gemma-3-27b", 1024, 0.9),
        ("gpt-oss-120b", 32_768, 1.98),
        ("gpt-oss-120b", 2048, 1.8),
    ],
)
def test_a_pool_holds_more_of_contexts_beyond_the_window(
    name: str, context: int, times: float
) -> None:
    """Times the tokens of a pool of the same bytes whose pages are of all layers."""
    spec, page_size = SHAPES[name], 32
    layout = PageLayout.of(spec)
    whole = 100_000
    tokens = layout.tokens(whole * spec.layers // layout.layers, page_size, context)
    assert tokens / (whole * page_size) == pytest.approx(times, rel=0.05)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, kinds=(WINDOW,) * 6),
        replace(SPEC, kinds=(WINDOW, *[FULL] * 5)),
        replace(SPEC, kinds=(WINDOW, LayerKind(heads=Heads(4, 1, 32))) * 3),
    ],
    ids=["no windows", "windows alone", "few windows", "other sizes"],
)
def test_other_models_have_pages_of_all_layers(spec: ModelSpec) -> None:
    layout = PageLayout.of(spec)
    assert layout == PageLayout.whole(spec)
    assert (layout.window, layout.window_tables, layout.layers) == (0, 0, 6)


def test_layers_that_read_what_others_wrote_have_their_pages() -> None:
    reader = replace(WINDOW, reads_earlier=True)
    layout = PageLayout.of(replace(SPEC, kinds=(WINDOW, FULL, WINDOW, FULL, reader, reader)))
    assert [layout.tables[i] for i in (0, 2, 4, 5)] == [1, 1, 1, 1]
    assert layout.places[4] == layout.places[5] == layout.places[2]


def test_the_widest_of_several_windows_is_held() -> None:
    kinds = (WINDOW, LayerKind(window=8), FULL) * 2
    assert PageLayout.of(replace(SPEC, kinds=kinds)).window == 32
