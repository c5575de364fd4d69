"""Forward passes for tests: sequences in scattered pages, cut wherever a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from twolane.model.attention import Batch, KVCache, Segment
from twolane.model.decoder import Decoder

if TYPE_CHECKING:
    from twolane.lanes.cpu.compiled import CompiledLayers

PAGE = 8
SLOTS = 16


class Pool:
    """A KV pool that hands out pages in random order, or in their own without a seed, full of NaN
    until they are written."""

    def __init__(
        self, decoder: Decoder, pages: int = 256, page_size: int = PAGE, seed: int | None = 0
    ):
        self.kv = KVCache(decoder.spec, pages, page_size, decoder.dtype, requests=SLOTS)
        for layer in (*self.kv.layers, *self.kv.states.conv, *self.kv.states.rule):
            layer.fill_(torch.nan)
        generator = torch.Generator().manual_seed(seed or 0)
        order = torch.randperm(pages, generator=generator).tolist()
        self._free = [*reversed(range(pages))] if seed is None else order
        self._page_size = page_size

    def take(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self._page_size))]


def forward(
    decoder: Decoder,
    pool: Pool,
    segments: Sequence[Segment],
    tokens: Sequence[torch.Tensor],
    compiled: CompiledLayers | None = None,
) -> list[torch.Tensor]:
    """Logits of every new token, one tensor [n, vocab] a segment."""
    batch = Batch.build(segments, PAGE)
    hidden = decoder.embed(torch.cat(list(tokens)))
    if compiled is not None:
        hidden = compiled.run(0, decoder.spec.layers, hidden, batch, pool.kv)
        return list(compiled.logits(hidden).split([s.n for s in segments]))
    for i in range(decoder.spec.layers):
        hidden = decoder.layer(i, hidden, batch, pool.kv)
    return list(decoder.head(hidden).split([s.n for s in segments]))


def in_chunks(
    decoder: Decoder,
    tokens: torch.Tensor,
    chunks: Sequence[int],
    seed: int | None = 0,
    compiled: CompiledLayers | None = None,
) -> torch.Tensor:
    """Logits [n, vocab] of one sequence that is computed in chunks of these sizes."""
    assert sum(chunks) == len(tokens)
    pool = Pool(decoder, seed=seed)
    pages = pool.take(len(tokens))
    start, logits = 0, []
    for n in chunks:
        segment = Segment(start, n, pages, slot=0)
        logits += forward(decoder, pool, [segment], [tokens[start : start + n]], compiled)
        start += n
    return torch.cat(logits)


def prompt(n: int, seed: int = 0, vocab: int = 256) -> torch.Tensor:
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(seed))


def expected(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The reference's logits [n, vocab]."""
    return model(tokens[None]).logits[0].float()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """No logit differs by more than 1e-5 of the largest one.

    Two computations in float32 differ by 1e-6 of it, in whatever order they add: both are as far
    from the same in float64 (`test_errors_are_those_of_float32`).
    """
    bound = 1e-5 * float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=0.0)


def cost_of(roundings: int) -> float:
    """Return the largest relative distance after this many independent roundings to e4m3.

    With three bits of mantissa, errors lie evenly within 2 ** -4 of a number or less.
    """
    return 2**-4 / 3**0.5 * roundings**0.5


def distance(ours: torch.Tensor, meant: torch.Tensor) -> float:
    """Return the relative distance of two tensors in the Euclidean norm."""
    return float((ours - meant).norm() / meant.norm())
