"""A KV pool of which another process keeps a copy.

Each process writes the tokens that it computes into both pools, layer by layer, so both hold every
page. The engine lets no two launches write one token, and none read what a launch writes before
that has ended; a launch has ended when all of its writes are made, in both pools.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twolane.lanes.disaggregated.shared_memory import SharedMemory
from twolane.model.attention import KVCache
from twolane.model.page_layout import PageLayout
from twolane.model.spec import ModelSpec


class MirroredKVCache(KVCache):
    """This process's pool, whose every write is pushed into the other process's pool.

    Args:
        spec: Spec of the model.
        pages: Number of pages in each layer.
        page_size: tokens in a page.
        dtype: Type in which attention computes.
        memories: Memories of this process's pool and of the other process's.
        rounded: keep numbers in e4m3.
        layout: The layers' pages, as for `KVCache`.
    """

    layer_by_layer = True

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        memories: tuple[SharedMemory, SharedMemory],
        *,
        rounded: bool = False,
        layout: PageLayout | None = None,
    ) -> None:
        ours, theirs = memories
        self._received = ours.tensor((1,), torch.int64)
        self._pushed = theirs.tensor((1,), torch.int64)
        shape = spec, pages, page_size, dtype
        super().__init__(*shape, rounded=rounded, allocate=ours.tensor, layout=layout)
        self.other = KVCache(*shape, rounded=rounded, allocate=theirs.tensor, layout=layout)
        """The other process's pool."""

    @property
    def received(self) -> int:
        """Number of layers of passes that the other process has pushed."""
        return int(self._received)

    def write(self, layer: int, slots: Tensor, new: Tensor) -> Tensor:
        """See `KVCache.write`."""
        self.push(layer, slots, new)
        return super().write(layer, slots, new)

    def note_written(self, layers: Sequence[int], slots: Tensor) -> None:
        """See `KVCache.note_written`: the tokens are read from this pool."""
        for layer in layers:
            keys, values = self.k[layer][slots], self.v[layer][slots]
            self.push(layer, slots, torch.cat([keys, values], dim=1))

    def push(self, layer: int, slots: Tensor, new: Tensor) -> None:
        """Put keys and values of a layer, as for `write`, into the other process's pool."""
        self.other.write(layer, slots, new)
        self._pushed += 1
