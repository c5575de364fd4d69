"""Which pages of the KV pool the layers of a model use.

A layer with a sliding window needs the pages of its window alone, a full one those of all tokens.
So that one pool and one free list serve both, pages of both kinds have the same bytes: a page holds
some tokens of as many layers as a model has full ones, or a few more. The full layers share table 0
of a request; the layers with a window are dealt to further tables, each of which has a page of its
own for the same tokens, and gives it back when it has left the window. vLLM pages hybrid models in
this way, too ("hybrid KV cache manager").
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twolane.model.spec import ModelSpec

MAX_WINDOW_TABLES = 7
"""Most tables of layers with a window: each costs the host time at every launch."""
WINDOWS_OF_CONTEXT = 4
"""Windows in the context of a request for which padding is kept small."""


@dataclass(frozen=True)
class PageLayout:
    """The table and the place of each layer's keys and values."""

    tables: Sequence[int]
    """The table whose pages each layer has: 0, or that of some layers with a window."""
    places: Sequence[int]
    """Each layer's place in a page; layers with the same place have different tables, or share
    their keys and values."""
    layers: int
    """Number of layers whose keys and values a page holds."""
    window: int = 0
    """Tokens that the layers of tables from 1 on read; 0: there are none."""

    @property
    def window_tables(self) -> int:
        """Number of tables of layers with a window."""
        return max(self.tables)

    def tokens(self, pages: int, page_size: int, context: int) -> int:
        """Return the tokens of requests of a context that a pool of pages holds while they run.

        Each of them holds all pages of its context in table 0, and in the others those of its
        window, which may begin within a page.
        """
        whole = -(-context // page_size)
        seen = min(whole, -(-(self.window + page_size - 1) // page_size))
        return pages * context // (whole + self.window_tables * seen)

    @classmethod
    def whole(cls, spec: ModelSpec) -> "PageLayout":
        """Return the layout in which all layers share one table."""
        places = [spec.kv_layer(i) for i in range(spec.layers)]
        return cls([0] * spec.layers, places, len(spec.kv_layers))

    @classmethod
    def of(cls, spec: ModelSpec, key_tile: int = 1) -> "PageLayout":
        """Return the layout that a model is served with.

        Kernels read keys and values in aligned tiles of at most `key_tile` tokens, and those that a
        window hides have no weight. They must be numbers, for which their pages are held, too.

        All layers share one table if none has a window, or all have one; if fewer than half as many
        have one as have none; if layers differ in the size of keys and values (Gemma 4); and if
        there are layers of linear attention.
        """
        windowed = [i for i in spec.kv_layers if spec.window(i) is not None]
        full = [i for i in spec.kv_layers if spec.window(i) is None]
        sizes = {(spec.each[i].kv_heads, spec.each[i].head_dim) for i in spec.kv_layers}
        if spec.state is not None or not full or 2 * len(windowed) < len(full) or len(sizes) > 1:
            return cls.whole(spec)
        layers = min(_sizes(len(full), len(windowed)), key=lambda size: size[1])[0]
        where = {layer: (0, place) for place, layer in enumerate(full)}
        where |= {i: (1 + k // layers, k % layers) for k, i in enumerate(windowed)}
        tables, places = zip(*(where[spec.kv_layer(i)] for i in range(spec.layers)), strict=True)
        window = max(spec.window(i) or 0 for i in windowed)
        return cls(tables, places, layers, window + key_tile - 1)


def _sizes(full: int, windowed: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of layers that a page may hold, and the layers that are held for each token
    of a window by a request of `WINDOWS_OF_CONTEXT`."""
    for layers in range(full, full + windowed + 1):
        tables = -(-windowed // layers)
        if tables <= MAX_WINDOW_TABLES:
            yield layers, layers * (WINDOWS_OF_CONTEXT + tables)
