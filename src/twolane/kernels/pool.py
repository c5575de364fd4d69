"""One layer's keys and values on a GPU, in the layout of the attention kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, eq=False)
class RoundedPool:
    """Keys and values in e4m3 with a power of two for each token and head.

    Because a factor is a power of two, what the pool holds is exact in bfloat16, whoever reads it.
    """

    values: Tensor
    """e4m3 [pages, kv_heads, 2, page_size, head_dim], keys then values."""
    exponents: Tensor
    """Base-2 logarithms of the factors of each token's numbers, int8 [pages, kv_heads, 2,
    page_size]."""


Pool = Tensor | RoundedPool
"""A pool [pages, kv_heads, 2, page_size, head_dim]: of the type of queries, or rounded."""


@dataclass(frozen=True, slots=True, eq=False)
class MirroredPool:
    """A pool and its copy in another GPU's memory: what is written goes into both."""

    own: Pool
    copy: Pool


WrittenPool = Pool | MirroredPool
"""A pool that a kernel writes keys and values to."""


def values_of(pool: Pool) -> Tensor:
    """Return the stored numbers, [pages, kv_heads, 2, page_size, head_dim]."""
    return pool.values if isinstance(pool, RoundedPool) else pool


def exponents_of(pool: Pool) -> Tensor:
    """Return the exponents of a rounded pool; else the pool, which no kernel reads so."""
    return pool.exponents if isinstance(pool, RoundedPool) else pool
