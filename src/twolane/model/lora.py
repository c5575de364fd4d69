"""LoRA adapters (Hu et al. 2021): what is added to the products of a layer, row by row.

An adapter adds scale * B @ A @ x to the product of a linear module. Modules that are one matrix
here (q, k and v; gate and up) have an A and a B each: a *section* adds to its own columns of the
product.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from twolane.model.decoder import Weights
from twolane.model.matrix import Matrix
from twolane.model.mlp import DenseMlp
from twolane.model.products import Products

LoraProduct = Literal["qkv", "o", "gate_up", "down"]
"""The products of a layer that adapters add to; those of experts are none of them."""
MAX_RANK = 64
"""Largest rank of an adapter's section that is served."""


@dataclass(frozen=True, eq=False)
class Section:
    """The part of an adapter that adds to some columns of a product."""

    columns: slice
    """The columns of the product, [T, columns], that it adds to."""
    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[width of `columns`, rank], scaled; its rows are in the order of the matrix's."""


AdapterLayer = Mapping[LoraProduct, Sequence[Section]]
"""An adapter's sections in one layer; a product that it leaves alone has none."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter, or a rank's part of it."""

    layers: Sequence[AdapterLayer]
    """Sections by product, for each layer of the model."""
    rank: int
    """The largest rank of a section."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its matrices."""
        sections = [s for layer in self.layers for each in layer.values() for s in each]
        return sum(section.a.nbytes + section.b.nbytes for section in sections)


class AdapterPool:
    """The adapters that are loaded, by slot, and the matrices whose products they add to.

    A slot is changed only while no launch names it.

    Args:
        weights: the base model's.
        slots: number of adapters that can be loaded at a time.
        max_rank: the largest rank of an adapter.
    """

    def __init__(self, weights: Weights, slots: int, max_rank: int = MAX_RANK) -> None:
        self.max_rank = max_rank
        self._adapters: list[Adapter | None] = [None] * slots
        self._places = dict(places(weights))

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """Load an adapter into a slot; None empties it."""
        self._adapters[slot] = adapter

    def products(self, base: Products, slots: npt.NDArray[np.int64]) -> Products:
        """Return the products of a pass whose rows have these slots, [T]; -1 is no adapter.

        Without any adapter, they are `base` itself.
        """
        groups = [(self._adapter(slot), _rows(slots, slot)) for slot in set(slots.tolist()) - {-1}]
        return AdaptedProducts(base, groups, self._places) if groups else base

    def _adapter(self, slot: int) -> Adapter:
        adapter = self._adapters[slot]
        assert adapter is not None, f"adapter slot {slot} is empty"
        return adapter


_Rows = slice | Tensor
"""Rows of a pass: int64 [n], or a slice where they follow one another."""
_Places = Mapping[Matrix, tuple[int, LoraProduct]]
"""Layer and product of a matrix."""


class AdaptedProducts(Products):
    """The products of one pass in which some rows have adapters, on a CPU.

    Args:
        base: computes the products.
        groups: each adapter of the pass and its rows.
        places: the matrices that adapters may add to.
    """

    def __init__(
        self, base: Products, groups: Sequence[tuple[Adapter, _Rows]], places: _Places
    ) -> None:
        self._base = base
        self._groups = groups
        self._places = places

    def linear(self, x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
        """See `Products.linear`."""
        return self._adapted(self._base.linear(x, matrix, bias), x, matrix)

    def add_linear(
        self, residual: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None
    ) -> Tensor:
        """See `Products.add_linear`."""
        return self._adapted(self._base.add_linear(residual, x, matrix, bias), x, matrix)

    def _adapted(self, out: Tensor, x: Tensor, matrix: Matrix) -> Tensor:
        """`out` [T, rows of the matrix], changed in place."""
        if (place := self._places.get(matrix)) is None:
            return out
        layer, product = place
        for adapter, rows in self._groups:
            for section in adapter.layers[layer].get(product, ()):
                added = functional.linear(functional.linear(x[rows], section.a), section.b)
                columns = out[:, section.columns]
                if isinstance(rows, slice):
                    columns[rows] += added
                else:
                    columns.index_add_(0, rows, added)
        return out


def places(weights: Weights) -> Iterator[tuple[Matrix, tuple[int, LoraProduct]]]:
    """Yield the matrices whose products adapters may add to, each with its layer and product."""
    for i, layer in enumerate(weights.layers):
        yield layer.qkv, (i, "qkv")
        yield layer.o, (i, "o")
        if isinstance(layer.mlp, DenseMlp):
            yield layer.mlp.gate_up, (i, "gate_up")
            yield layer.mlp.down, (i, "down")


def _rows(slots: npt.NDArray[np.int64], slot: int) -> _Rows:
    (rows,) = np.nonzero(slots == slot)
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else torch.from_numpy(rows)
