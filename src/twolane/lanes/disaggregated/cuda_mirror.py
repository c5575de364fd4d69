"""A KV pool on a GPU of which another GPU has a copy; see `cpu_mirror.py`.

The kernel that writes keys and values of a layer stores them in both GPUs' memory, also inside
graphs. An event recorded after a launch has happened when all of its stores are made, in both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twolane.kernels.pool import MirroredPool
from twolane.model.gpu_decoder import GpuKVCache
from twolane.model.page_layout import PageLayout
from twolane.model.spec import ModelSpec
from twolane.parallel.peer_memory import PeerGroup


class MirroredGpuKVCache(GpuKVCache):
    """This GPU's pool, whose every write goes into the other GPU's pool, too.

    Args:
        spec: Spec of the model.
        pages: Number of pages in each layer.
        page_size: tokens in a page.
        dtype: Type of the numbers; e4m3 has an exponent for each token and head.
        device: this GPU.
        group: the two processes, both of which make their pools now.
        layout: The layers' pages, as for `GpuKVCache`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        group: PeerGroup,
        layout: PageLayout | None = None,
    ) -> None:
        theirs: list[Tensor] = []

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            ours = group.empty(shape, dtype, device)
            theirs.append(group.of(1 - group.rank, ours))
            return ours

        shape = spec, pages, page_size, dtype, device
        super().__init__(*shape, allocate, layout=layout)
        others = iter(theirs)
        self.other = GpuKVCache(*shape, lambda *_: next(others), layout=layout)
        """The other GPU's pool."""

    def written(self, layer: int) -> MirroredPool:
        """See `GpuKVCache.written`."""
        return MirroredPool(self.layers[layer], self.other.layers[layer])
