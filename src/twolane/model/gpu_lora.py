"""LoRA adapters on a GPU: a pool of their matrices, and products that add them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock

import torch
from torch import Tensor

from twolane.kernels import fused
from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.lora import MIN_RANK, AdapterMatrices, RowTiles, expand, expand_silu, shrink
from twolane.kernels.products.dispatch import GpuProducts, Stored
from twolane.kernels.runtime.launch import power_of_2
from twolane.model.decoder import Weights
from twolane.model.lora import Adapter, LoraProduct, Section, places
from twolane.model.matrix import Matrix
from twolane.model.sharding import Shard
from twolane.model.spec import ModelSpec

SECTIONS = 3
"""The most sections of a product: q, k and v."""


@dataclass(frozen=True)
class _Product:
    """A product of a layer that adapters add to."""

    name: LoraProduct
    inputs: int
    ends: tuple[int, ...]
    """The output after the last one of each section."""


class GpuAdapterPool:
    """The adapters that are loaded on a GPU, by slot.

    It has all its memory from the start, so that loading one allocates nothing.

    Args:
        shard: the rank's part of the base model.
        weights: The weights of that part.
        slots: number of adapters that can be loaded at a time.
        max_rank: the largest rank of an adapter.
    """

    def __init__(self, shard: Shard, weights: Weights, slots: int, max_rank: int) -> None:
        self.slots, self.max_rank = slots, max_rank
        like = weights.embedding
        self.device, self._rank = like.device, _room_of(max_rank)
        products = _products(shard)
        shape = shard.spec.layers, max(map(len, products)), slots
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=like.device)
        self._layers: list[dict[LoraProduct, AdapterMatrices]] = [
            {p.name: self._room(p, like, row) for p, row in zip(layer, ranks, strict=False)}
            for layer, ranks in zip(products, self._ranks, strict=True)
        ]
        self.matrices: Mapping[Matrix, AdapterMatrices] = {
            matrix: self._layers[layer][product] for matrix, (layer, product) in places(weights)
        }
        """The adapters' matrices for each matrix of the base model."""
        self._stream = torch.cuda.Stream(like.device) if like.is_cuda else None  # type: ignore[no-untyped-call]
        self._lock = Lock()
        if self._stream is not None:
            # The rooms are empty before that stream fills one.
            self._stream.wait_stream(torch.cuda.current_stream(like.device))

    def _room(self, product: _Product, like: Tensor, ranks: Tensor) -> AdapterMatrices:
        sections = len(product.ends)
        a = like.new_zeros((self.slots, sections * self._rank, product.inputs))
        b = like.new_zeros((self.slots, self._rank, product.ends[-1]))
        return AdapterMatrices(a, b, ranks, product.ends)

    def tiles(self, rows: int) -> RowTiles:
        """Allocate room for the tiles of a pass of at most `rows` rows."""
        return RowTiles.of(rows, self.slots, SECTIONS * self._rank, self.device)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot that no launch names; returns when it is there.

        Any thread may call this. The copies have a stream of their own, so that they wait for
        nothing that is queued, and nothing waits for them.
        """
        with self._lock, torch.cuda.stream(self._stream), torch.inference_mode():
            for layer, room in zip(adapter.layers, self._layers, strict=True):
                for name, sections in layer.items():
                    self._fill(room[name], slot, sections)
            self._ranks[:, :, slot].copy_(self._ranks_of(adapter))
            if self._stream is not None:
                self._stream.synchronize()

    def _ranks_of(self, adapter: Adapter) -> Tensor:
        """Return an adapter's largest rank in each product of each layer, as `_ranks` has them."""
        ranks = torch.zeros(self._ranks.shape[:2], dtype=torch.int32)
        for i, (layer, room) in enumerate(zip(adapter.layers, self._layers, strict=True)):
            for place, name in enumerate(room):
                ranks[i, place] = max((len(s.a) for s in layer.get(name, ())), default=0)
        return ranks

    def _fill(self, room: AdapterMatrices, slot: int, sections: Sequence[Section]) -> None:
        """Write an adapter's sections of one product; others of it add nothing."""
        a, b = (torch.zeros(t.shape[1:], dtype=t.dtype) for t in (room.a, room.b))
        for section in sections:
            first = room.ends.index(section.columns.stop) * self._rank
            rank = len(section.a)
            a[first : first + rank] = section.a
            b[:rank, section.columns] = section.b.T
        room.a[slot].copy_(a)
        room.b[slot].copy_(b)


def pool_bytes(shard: Shard, slots: int, max_rank: int, itemsize: int) -> int:
    """Return the bytes of a pool, if its numbers have this many."""
    numbers = sum(len(p.ends) * p.inputs + p.ends[-1] for each in _products(shard) for p in each)
    return slots * _room_of(max_rank) * numbers * itemsize


def _room_of(max_rank: int) -> int:
    """Return the number of ranks that a section has room for."""
    return power_of_2(max(max_rank, MIN_RANK))


class GpuAdaptedProducts(GpuProducts):
    """The products of a pass in which some rows have adapters.

    Args:
        base: computes the products.
        pool: the adapters.
        tiles: the rows of the pass, arranged before its first product.
    """

    def __init__(self, base: GpuProducts, pool: GpuAdapterPool, tiles: RowTiles) -> None:
        super().__init__(base.units, base.ways, base._scratch)
        self._pool, self._tiles = pool, tiles

    def part(self, rows: slice) -> "GpuAdaptedProducts":
        """See `GpuProducts.part`."""
        return GpuAdaptedProducts(self, self._pool, self._tiles.part(rows))

    def linear(self, x: Activations, weight: Stored, bias: Tensor | None, out: Tensor) -> None:
        """See `GpuProducts.linear`."""
        matrices = self._shrunk(x, weight)
        super().linear(x, weight, bias, out)
        if matrices is not None:
            expand(matrices, self._tiles, out)

    def add_linear(self, x: Activations, weight: Stored, bias: Tensor | None, into: Tensor) -> None:
        """See `GpuProducts.add_linear`."""
        matrices = self._shrunk(x, weight)
        super().add_linear(x, weight, bias, into)
        if matrices is not None:
            expand(matrices, self._tiles, into)

    def gate_up(
        self,
        x: Activations,
        weight: Stored,
        bias: Tensor | None,
        gate_up: Tensor,
        out: Activations,
        activation: str = "silu",
    ) -> None:
        """See `GpuProducts.gate_up`."""
        matrices = self._shrunk(x, weight)
        assert matrices is not None, "every dense MLP of the model can have adapters"
        super().linear(x, weight, bias, gate_up)
        # A row's scale is a matter of all its columns; the kernel that does both knows SiLU alone.
        if isinstance(out, Quantised) or activation != "silu":
            expand(matrices, self._tiles, gate_up)
            fused.act_mul(gate_up, out, activation)
        else:
            expand_silu(matrices, self._tiles, gate_up, out)

    def _shrunk(self, x: Activations, weight: Stored) -> AdapterMatrices | None:
        """Run the first adapter kernel; return the adapters' matrices for this weight, if any."""
        assert isinstance(weight, Matrix)
        matrices = self._pool.matrices.get(weight)
        if matrices is not None:
            shrink(x, matrices, self._tiles)
        return matrices


def _products(shard: Shard) -> Sequence[Sequence[_Product]]:
    """Return the products of each of a rank's layers that adapters add to: not those of experts."""
    return [_of_layer(shard.local, i) for i in range(shard.local.layers)]


def _of_layer(spec: ModelSpec, layer: int) -> Sequence[_Product]:
    at, hidden = spec.at(layer), spec.hidden_size
    inner, q, kv = at.intermediate_size, at.q_size, at.kv_size
    rows = (q,) if spec.kind(layer).reads_earlier else (q, kv, kv)
    attention = (_Product("qkv", hidden, tuple(accumulate(rows))), _Product("o", q, (hidden,)))
    mlp = (_Product("gate_up", hidden, (inner, 2 * inner)), _Product("down", inner, (hidden,)))
    return attention + mlp if spec.has_dense(layer) else attention
