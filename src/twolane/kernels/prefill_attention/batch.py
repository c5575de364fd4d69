"""A prefill batch as the kernels see it, and the memory that a lane lends them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from twolane.kernels.prefill_attention.schedule import Ints, Segments

NewKV = tuple[Tensor, Tensor]
"""Keys and values of a batch's new tokens, each [T, kv_heads, dim]."""


class PrefillWorkspace:
    """A lane's scratch memory for split tiles; grows as its plans need. Lanes never share one."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, elements: int, dtype: torch.dtype) -> Tensor:
        """Return `elements` elements or more, the same memory at each call; contents remain."""
        held = self._buffers.get((name, dtype))
        if held is None or held.numel() < elements:
            held = torch.empty(elements, dtype=dtype, device=self.device)
            self._buffers[name, dtype] = held
        return held


@dataclass(frozen=True)
class AttentionBatch:
    """The part of a batch's plans that is the same at all levels."""

    segments: Segments
    tokens: int
    """Rows up to the last segment's end: their new tokens, and what precedes them in the pass."""
    pages: Tensor
    """The segments' pages, end to end, int32 on the device."""
    page_size: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    window: int | None
    """Tokens seen by each token, itself included; None: all."""
    workspace: PrefillWorkspace

    @classmethod
    def build(
        cls,
        segments: Sequence[tuple[int, int]],
        tables: Sequence[Sequence[int]],
        page_size: int,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        window: int | None,
        workspace: PrefillWorkspace,
        first_row: int = 0,
    ) -> "AttentionBatch":
        """Check the arguments of `PrefillPlan.build` and upload the pages.

        `first_row`: rows of the pass before the segments'.
        """
        _check(segments, tables, page_size, heads, kv_heads, dim, window)
        columns, pages = laid_out(segments, tables, page_size, first_row)
        if window is not None and window >= (columns.reused + columns.new).max():
            window = None
        (sent,) = upload([pages], workspace.device)[1]
        shape = (page_size, heads, kv_heads, dim, dtype, window)
        return cls(columns, first_row + int(columns.new.sum()), sent, *shape, workspace)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.dim**-0.5)


def laid_out(
    segments: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    page_size: int,
    first_row: int,
) -> tuple[Segments, Ints]:
    """(reused, new) tokens of each segment as columns, and their pages, end to end.

    `first_row`: rows of the pass before the segments'.
    """
    reused, new = np.array(segments, dtype=np.int64).T
    used = -(-(reused + new) // page_size)
    lists = [np.array(t[:n]) for t, n in zip(tables, used.tolist(), strict=True)]
    rows = first_row + np.cumsum(new) - new
    return Segments(reused, new, rows, np.cumsum(used) - used), np.concatenate(lists)


class Block:
    """Lists of int32 at fixed places in device memory, for graphs, written by one copy.

    Args:
        sizes: Maximum length of each list.
        device: where.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._starts = places(sizes)
        self.memory = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        self.lists = _views(self.memory, self._starts, sizes)

    def send(self, parts: Sequence[Ints]) -> None:
        """Write all lists on the current stream, each followed by zeros, the last up to its end."""
        starts = [*self._starts[:-1], self._starts[-2] + parts[-1].size]
        host = _on_host(parts, starts, self.memory.device)
        self.memory[: len(host)].copy_(host, non_blocking=True)


def upload(parts: Sequence[Ints], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """`parts`, flat, as int32 on the device: one copy from pinned memory on the current stream.

    Returns:
        A buffer, and each part's view of it, at a multiple of 16 bytes.
    """
    sizes = [part.size for part in parts]
    starts = places(sizes)
    sent = _on_host(parts, starts, device).to(device, non_blocking=True)
    return sent, _views(sent, starts, sizes)


def places(sizes: Sequence[int]) -> list[int]:
    """Return the offsets, multiples of 16 bytes, of parts of this many int32, and their end."""
    starts: list[int] = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
    return starts


def _views(memory: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _on_host(parts: Sequence[Ints], starts: Sequence[int], device: torch.device) -> Tensor:
    host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    values = host.numpy()
    for (start, end), part in zip(pairwise(starts), parts, strict=True):
        values[start : start + part.size] = part.ravel()
        values[start + part.size : end] = 0
    return host


def _check(
    segments: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    page_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
) -> None:
    if not segments or len(segments) != len(tables):
        raise ValueError(f"{len(segments)} segments and {len(tables)} tables")
    for (reused, new), table in zip(segments, tables, strict=True):
        if reused < 0 or new < 1:
            raise ValueError(f"segment ({reused}, {new}): reused >= 0 and new >= 1 are needed")
        if len(table) * page_size < reused + new:
            raise ValueError(f"{len(table)} pages of {page_size} do not cover {reused} + {new}")
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= 16:
        raise ValueError(f"heads={heads}, kv_heads={kv_heads}: groups of 1 to 16 are needed")
    if page_size not in (16, 32, 64):
        raise ValueError(f"page_size={page_size} must be 16, 32 or 64")
    if dim < 16 or dim > 512 or dim % 8:
        raise ValueError(f"dim={dim} must be a multiple of 8 from 16 to 512")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1")
