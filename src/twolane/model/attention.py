"""The paged KV pool, and which tokens of a forward pass see which slots of it.

A *slot* is one token's place in the pool: page * page_size + offset in the page. Rotated keys are
stored in the decoder's own order of dimensions (see `decoder.py`); attention does not care.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from twolane.kernels.delta_rule.rule import StatePart
from twolane.model import fp8, int8
from twolane.model.linear_attention import SequenceStates, StatePool, StateRows
from twolane.model.page_layout import PageLayout
from twolane.model.rope import Rotation
from twolane.model.spec import ModelSpec, RopeSpec

_Ints = npt.NDArray[np.int64]

_GROUP_SLACK = 64
"""Tokens by which contexts of one group may differ, however short they are."""
_GROUP_SHARE = 0.75
"""Decode rows share one padded attention call when the shortest has this share of the longest's
tokens, or lacks at most `_GROUP_SLACK` of them: padding costs less than another call."""


@dataclass(frozen=True, eq=False)
class CpuRoundedPool:
    """A layer's keys and values in e4m3, with a power of two for each token and head."""

    values: Tensor
    """e4m3 [slots, 2 * kv_heads, head_dim]"""
    exponents: Tensor
    """Base-2 logarithms of the factors of the values, int8 [slots, 2 * kv_heads]."""
    dtype: torch.dtype
    """The type in which attention sees them."""

    def index_select(self, dim: int, slots: Tensor) -> Tensor:
        """Keys and values of some slots, in the type that attention wants."""
        values = self.values.view(torch.int8).index_select(dim, slots).view(fp8.E4M3)
        return fp8.dequantise_heads(values, self.exponents.index_select(dim, slots), self.dtype)


Pool = Tensor | CpuRoundedPool
"""A layer's keys and values, [slots, 2 * kv_heads, head_dim]."""


Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor of a shape and a type, uninitialised."""


class KVCache:
    """Keys and values of all layers, in pages that the engine hands out. Layers with the same place
    in pages have one pool (`model/page_layout.py`), as have those that read what another one wrote.

    `k[i]` and `v[i]` are [pages * page_size, kv_heads, head_dim]: the two halves of `layers[i]`,
    which is [pages * page_size, 2 * kv_heads, head_dim] so that one call writes or gathers both.
    The pool starts uninitialised; nothing reads a slot before it was written. Layers of linear
    attention have no pages: `states` has theirs.

    Args:
        spec: Spec of the model.
        pages: Number of pages in each layer.
        page_size: tokens in a page.
        dtype: Type in which attention computes.
        requests: The most requests at a time, each of which has a state in `states`, and snapshots.
        rounded: keep numbers in e4m3.
        allocate: makes the pool's tensors.
        layout: The layers' pages; None: all layers share one table.
    """

    layer_by_layer: ClassVar[bool] = False
    """Whether `note_written` must be called after each layer, and not once after several."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        *,
        requests: int = 0,
        rounded: bool = False,
        allocate: Allocate = lambda shape, dtype: torch.empty(shape, dtype=dtype),
        layout: PageLayout | None = None,
    ) -> None:
        self.page_size = page_size
        self.layout = layout or PageLayout.whole(spec)
        self.states = StatePool(spec, requests, dtype)

        def layer(i: int, at: ModelSpec) -> Pool:
            count = 0 if spec.is_linear(i) else pages
            shape = (count * page_size, 2 * at.kv_heads, at.head_dim)
            values = allocate(shape, fp8.E4M3 if rounded else dtype)
            if not rounded:
                return values
            return CpuRoundedPool(values, allocate(shape[:2], torch.int8), dtype)

        places = self.layout.places
        first = {place: i for i, place in reversed([*enumerate(places)])}
        own = {place: layer(i, spec.each[i]) for place, i in sorted(first.items())}
        self.layers = [own[place] for place in places]
        stored = [pool if isinstance(pool, Tensor) else pool.values for pool in self.layers]
        self.k, self.v = zip(*(values.chunk(2, dim=1) for values in stored), strict=True)

    def write(self, layer: int, slots: Tensor, new: Tensor) -> Tensor:
        """Put keys, then values, [T, 2 * kv_heads, head_dim], of tokens into their slots, [T].

        Returns:
            What the pool holds of them, which attention is to see, so that it makes no difference
            whether a token is new or reused.
        """
        pool = self.layers[layer]
        if isinstance(pool, Tensor):
            pool.index_copy_(0, slots, new)
            return new
        values, exponents = fp8.quantise_heads(new)
        pool.values.view(torch.int8).index_copy_(0, slots, values.view(torch.int8))
        pool.exponents.index_copy_(0, slots, exponents)
        return fp8.dequantise_heads(values, exponents, new.dtype)

    def note_written(self, layers: Sequence[int], slots: Tensor) -> None:
        """Take note that compiled code, which writes into the pool without `write`, has put tokens
        into their slots, [T], in some layers."""


@dataclass(frozen=True)
class Segment:
    """Consecutive new tokens of one sequence in a forward pass."""

    start: int
    """Tokens of this sequence already in the KV pool."""
    n: int
    """New tokens."""
    pages: Sequence[int]
    """Physical pages that cover positions [0, start + n), in order."""
    slot: int = -1
    """The slot of the sequence's states in layers of linear attention; -1: it has none."""
    parts: Sequence[StatePart] = ()
    """The tokens by those states, where some are taken from elsewhere or saved."""
    windows: Sequence[Sequence[int]] = ()
    """Pages of further tables, which layers with a window have, as `pages`."""


Slots = Tensor | slice
"""Slots to read, one after the other in memory where they are a slice."""


def _read(pool: Pool, slots: Slots) -> Tensor:
    """Return keys and values of some slots; a slice shares the pool's memory."""
    if isinstance(slots, Tensor):
        return pool.index_select(0, slots)
    if isinstance(pool, Tensor):
        return pool[slots]
    return pool.index_select(0, torch.arange(slots.start, slots.stop))


@dataclass(frozen=True)
class _PromptSegment:
    """Attention of one segment with several new tokens."""

    rows: slice
    slots: Slots | None
    """Slots read, [L]; None: only the segment's own new keys are seen."""
    mask: Tensor | None
    """Added to the scores, [n, L]; None: causal."""

    def attend(self, q: Tensor, new: Tensor, pool: Pool, sinks: Tensor | None) -> Tensor:
        """[n, heads, head_dim]; arguments as in `Batch.attend`."""
        kv = new[self.rows] if self.slots is None else _read(pool, self.slots)
        k, v = kv.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        query = q[self.rows].transpose(0, 1).unsqueeze(0)
        own = None if sinks is None else sinks[:, None]
        out = _attended(query, k, v, self.mask, own, causal=self.mask is None)
        return out[0].transpose(0, 1)


@dataclass(frozen=True)
class _SingleTokenRows:
    """Attention of several segments with one new token each, padded to the longest."""

    rows: Tensor
    """Rows of the batch, [R]."""
    slots: Slots
    """Slots read, [R * L]; padding repeats a row's last slot, so that it reads finite numbers."""
    mask: Tensor | None
    """Added to the scores, [R, 1, 1, L]; None: no padding."""

    def attend(self, q: Tensor, new: Tensor, pool: Pool, sinks: Tensor | None) -> Tensor:
        """[R, heads, head_dim]; arguments as in `Batch.attend`."""
        count, (_, heads, dim), kv_heads = len(self.rows), q.shape, new.shape[1] // 2
        query = q if count == len(q) else q.index_select(0, self.rows)
        kv = _read(pool, self.slots)
        if sinks is None:
            return _rows_attended(query, kv, self.mask, kv_heads)
        # The query heads that share keys become the rows of one small product.
        query = query.view(count, kv_heads, heads // kv_heads, dim)
        k, v = kv.view(count, -1, 2 * kv_heads, dim).transpose(1, 2).chunk(2, dim=1)
        return _attended(query, k, v, self.mask, sinks.view(kv_heads, -1)).flatten(1, 2)


_Part = _PromptSegment | _SingleTokenRows


@int8.scripted
def _rows_attended(q: Tensor, kv: Tensor, mask: Tensor | None, kv_heads: int) -> Tensor:
    """Return the attention of rows with the queries `q` [R, heads, head_dim] over keys and values
    [R * L, 2 * kv_heads, head_dim], [R, heads, head_dim]."""
    rows, heads, dim = q.size(0), q.size(1), q.size(2)
    query = q.view(rows, kv_heads, heads // kv_heads, dim)
    k, v = kv.view(rows, -1, 2 * kv_heads, dim).transpose(1, 2).chunk(2, dim=1)
    out = functional.scaled_dot_product_attention(query, k, v, mask, enable_gqa=True)
    return out.flatten(1, 2)


def _attended(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    causal: bool = False,
) -> Tensor:
    """Return softmax(query · kᵀ / sqrt(dim) + mask) · v of each batch and head.

    A sink is one more score without a value: it scales what the other scores give by their share of
    all weights, exp(lse) / (exp(lse) + exp(sink)), with their log-sum-exp (Xiao et al. 2024,
    arXiv:2309.17453, learnt as in gpt-oss).

    Args:
        query: [batch, heads, n, dim].
        k: [batch, heads that share keys, L, dim].
        v: The same.
        mask: Added to the scores, or None.
        sinks: Score of each head's sink, for each query or one for all of them, [heads, n or 1].
        causal: Whether query i sees the keys up to i alone.
    """
    if sinks is None:
        return functional.scaled_dot_product_attention(
            query, k, v, mask, is_causal=causal, enable_gqa=True
        )
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(query, k, v, 0.0, causal, attn_mask=mask)
    return cast(Tensor, out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype))


@dataclass(eq=False)
class Batch:
    """The tokens of one forward pass and everything that its layers share.

    Tokens are in segment order; a row is a token's place in that order. Index tensors, masks and
    rotations are made once, when the first layer asks for them. A batch belongs to one thread at a
    time and to one model.
    """

    segments: Sequence[Segment]
    page_size: int
    device: torch.device
    offsets: tuple[int, ...]
    """First row of each segment, and the number of rows, [segments + 1]."""
    positions: Tensor
    """Place of each token in its sequence, int64 [T]."""
    write_slots: Sequence[Tensor]
    """Slot of each token in each table, int64 [T]."""
    _tables: Sequence[_Ints]
    """For each table the pages of each segment, [segments, most pages]; padded with zeros."""
    _parts: dict[tuple[int | None, int, torch.dtype], tuple[_Part, ...]] = field(
        default_factory=dict
    )
    _turns: dict[RopeSpec, Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls, segments: Sequence[Segment], page_size: int, device: torch.device | str = "cpu"
    ) -> "Batch":
        """Lay out a forward pass.

        Raises:
            ValueError: a segment is empty or its pages do not cover its tokens.
        """
        counts = np.array([s.n for s in segments], dtype=np.int64)
        starts = np.array([s.start for s in segments], dtype=np.int64)
        if not len(segments) or counts.min() < 1 or starts.min() < 0:
            raise ValueError("a batch needs segments, and each of them new tokens")
        lists = [[s.pages, *s.windows] for s in segments]
        tables = [_page_tables(segments, pages, page_size) for pages in zip(*lists, strict=True)]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        owner = np.repeat(np.arange(len(segments)), counts)
        positions = np.arange(offsets[-1]) + (starts - offsets[:-1])[owner]
        where, rest = (owner, positions // page_size), positions % page_size
        device = torch.device(device)
        return cls(
            segments,
            page_size,
            device,
            tuple(offsets.tolist()),
            torch.from_numpy(positions).to(device),
            [torch.from_numpy(table[where] * page_size + rest).to(device) for table in tables],
            tables,
        )

    def __len__(self) -> int:
        """New tokens."""
        return self.offsets[-1]

    @cached_property
    def state_rows(self) -> StateRows:
        """The rows by the states that they move on in layers of linear attention."""
        return StateRows.of(SequenceStates(s.slot, s.start, s.n, s.parts) for s in self.segments)

    def rotation(self, rotation: Rotation, rope: RopeSpec) -> Tensor:
        """Scale * e^(i * angle) of each token and pair, complex64 [T, 1, head_dim / 2].

        Args:
            rotation: The rotation of a layer.
            rope: The spec of that rotation; layers that have the same share the result.
        """
        turn = self._turns.get(rope)
        if turn is None:
            angles, scales = self.positions[:, None].float() * rotation.frequencies, rotation.scales
            turn = torch.complex(angles.cos() * scales, angles.sin() * scales).unsqueeze(1)
            self._turns[rope] = turn
        return turn

    def attend(
        self,
        q: Tensor,
        new: Tensor,
        pool: Pool,
        window: int | None,
        sinks: Tensor | None = None,
        table: int = 0,
    ) -> Tensor:
        """Causal attention of every token over its own sequence.

        Args:
            q: rotated queries [T, heads, head_dim].
            new: rotated keys, then values of the new tokens [T, 2 * kv_heads, head_dim].
            pool: a layer of the KV pool, into which `new` was written.
            window: tokens seen by each token, itself included; None: all.
            sinks: Score of a further token of value 0 that each head sees, float32 [heads], or
                None.
            table: The table whose pages the layer has.

        Returns:
            [T, heads * head_dim]
        """
        key = (window, table, q.dtype)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = self._plan(window, table, q.dtype)
        if len(parts) == 1:
            return parts[0].attend(q, new, pool, sinks).flatten(1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in parts:
            out[part.rows] = part.attend(q, new, pool, sinks)
        return out.flatten(1)

    def _plan(self, window: int | None, table: int, dtype: torch.dtype) -> tuple[_Part, ...]:
        single = np.array([i for i, s in enumerate(self.segments) if s.n == 1], dtype=np.int64)
        parts: list[_Part] = [
            self._chunk(i, window, table, dtype) for i, s in enumerate(self.segments) if s.n > 1
        ]
        lengths = np.array([self.segments[i].start + 1 for i in single], dtype=np.int64)
        if window is not None:
            lengths = np.minimum(lengths, window)
        parts += [
            self._rows(single[group], lengths[group], table, dtype) for group in _similar(lengths)
        ]
        return tuple(parts)

    def _chunk(
        self, index: int, window: int | None, table: int, dtype: torch.dtype
    ) -> _PromptSegment:
        segment = self.segments[index]
        rows = slice(self.offsets[index], self.offsets[index + 1])
        end = segment.start + segment.n
        if window is not None and end <= window:
            window = None
        if segment.start == 0 and window is None:
            return _PromptSegment(rows, None, None)
        first = 0 if window is None else max(0, segment.start - window + 1)
        query = torch.arange(segment.start, end)[:, None]
        key = torch.arange(first, end)[None, :]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        slots = self._slots(np.array([index]), np.arange(first, end)[None, :], table)
        return _PromptSegment(rows, self._sequence(slots), mask.to(self.device))

    def _rows(
        self, indices: _Ints, lengths: _Ints, table: int, dtype: torch.dtype
    ) -> _SingleTokenRows:
        ends = np.array([self.segments[i].start + 1 for i in indices], dtype=np.int64)
        steps = np.arange(lengths.max())
        positions = np.minimum((ends - lengths)[:, None] + steps, (ends - 1)[:, None])
        mask = None
        if lengths.min() < lengths.max():
            padding = torch.from_numpy(steps >= lengths[:, None])
            mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, -torch.inf)
            mask = mask[:, None, None, :].to(self.device)
        rows = np.array([self.offsets[i] for i in indices], dtype=np.int64)
        slots = self._slots(indices, positions, table)
        read = self._sequence(slots) if len(indices) == 1 else self._put(slots)
        return _SingleTokenRows(self._put(rows), read, mask)

    def sequence_slots(self, table: int) -> _Ints:
        """Return the slots of each segment's sequence in a table, [segments, most tokens]; the last
        one of a shorter sequence is repeated."""
        ends = np.array([s.start + s.n for s in self.segments], dtype=np.int64)
        positions = np.minimum(np.arange(ends.max()), ends[:, None] - 1)
        return self._slots(np.arange(len(ends)), positions, table).reshape(len(ends), -1)

    def _slots(self, indices: _Ints, positions: _Ints, table: int) -> _Ints:
        """Slots of `positions` [R, L] of the segments `indices` [R] in a table, flattened."""
        pages = self._tables[table][indices[:, None], positions // self.page_size]
        return cast(_Ints, (pages * self.page_size + positions % self.page_size).reshape(-1))

    def _sequence(self, slots: _Ints) -> Slots:
        """Return the slots of one sequence, which are neighbours where its pages are."""
        apart = bool((np.diff(slots) != 1).any())
        return self._put(slots) if apart else slice(int(slots[0]), int(slots[-1]) + 1)

    def _put(self, values: _Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _page_tables(
    segments: Sequence[Segment], pages: Sequence[Sequence[int]], page_size: int
) -> _Ints:
    """Return one table's pages of each segment."""
    needed = [-(-(s.start + s.n) // page_size) for s in segments]
    tables = np.zeros((len(segments), max(needed)), dtype=np.int64)
    for table, segment, known, count in zip(tables, segments, pages, needed, strict=True):
        if len(known) < count:
            raise ValueError(
                f"{len(known)} pages of {page_size} tokens do not cover "
                f"{segment.start} + {segment.n}"
            )
        table[:count] = known[:count]
    return tables


def _similar(lengths: _Ints) -> list[_Ints]:
    """Indices of `lengths`, in groups of similar length."""
    if not len(lengths):
        return []
    if lengths.min() >= min(_GROUP_SHARE * lengths.max(), lengths.max() - _GROUP_SLACK):
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    borders, longest = [0], int(lengths[order[0]])
    for place, length in enumerate(lengths[order].tolist()):
        if length < min(_GROUP_SHARE * longest, longest - _GROUP_SLACK):
            borders.append(place)
            longest = length
    borders.append(len(order))
    return [np.sort(order[a:b]) for a, b in pairwise(borders)]
