"""Sampling points of a pass, scored rows and the rows that are left: the same in all lanes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twolane.lanes.work import DecodeRow, PromptChunk, PromptRow, unpack


class SamplingPoint(NamedTuple):
    """The place of a token to sample."""

    row: int
    """Row of the logits."""
    slot: int
    position: int
    """Index of the token in its sequence."""


class ScoredRow(NamedTuple):
    """A prompt row whose tokens' log-probabilities are asked for."""

    row: int
    """Row of the work."""
    first: int
    """Row of the pass, one a token, that the first target follows."""
    targets: Sequence[int]
    top: int
    """Number of alternatives that are reported for each target."""

    def parts(self, most: int) -> Iterator[tuple[slice, Sequence[int]]]:
        """Rows of the pass and the targets that follow them, at most this many at a time."""
        for done in range(0, len(self.targets), most):
            targets = self.targets[done : done + most]
            first = self.first + done
            yield slice(first, first + len(targets)), targets


@dataclass(frozen=True, slots=True)
class SamplingPoints:
    """The sampling points of one pass, whose decode rows come first."""

    rows: list[int]
    """Rows of the work, decode rows and then prompts, that a token is sampled after."""
    where: list[int]
    """The row of the pass, one a token, that each is sampled at."""
    points: list[SamplingPoint]
    """The points, by row of the logits."""
    decoding: int
    """Number of decode rows."""
    scored: list[ScoredRow]

    @classmethod
    def of(
        cls,
        decode: Sequence[DecodeRow],
        prompts: Sequence[PromptRow],
        chunks: Sequence[PromptChunk],
    ) -> "SamplingPoints":
        """Return the points of a pass with these rows and chunks."""
        rows, where = list(range(len(decode))), list(range(len(decode)))
        points = [next_point(i, row, 0) for i, row in enumerate(decode)]
        scored: list[ScoredRow] = []
        end = len(decode)
        for i, (prompt, chunk) in enumerate(zip(prompts, chunks, strict=True), start=len(decode)):
            if (scoring := chunk.scoring) is not None:
                scored.append(ScoredRow(i, end, unpack(scoring.targets), scoring.top))
            end += prompt.count
            if prompt.samples:
                points.append(SamplingPoint(len(rows), prompt.slot, prompt.start + prompt.count))
                rows.append(i)
                where.append(end - 1)
        return cls(rows, where, points, len(decode), scored)

    @property
    def needed(self) -> list[int]:
        """Rows of the pass whose hidden states are read, ascending."""
        scored = [range(row.first, row.first + len(row.targets)) for row in self.scored]
        return sorted({*self.where, *chain.from_iterable(scored)})

    @property
    def begun(self) -> list[SamplingPoint]:
        """Points of prompts: their slots are these requests' from now on."""
        return self.points[self.decoding :]


def next_point(i: int, row: DecodeRow, step: int) -> SamplingPoint:
    """Return the point at which a decode row samples in this step of a launch."""
    return SamplingPoint(i, row.slot, row.position + step + 1)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a prefill batch between two slices, and their chunks."""

    rows: Sequence[PromptRow]
    chunks: Sequence[PromptChunk]

    def left(self, rows: Sequence[PromptRow]) -> "tuple[BatchRows, npt.NDArray[np.bool_]]":
        """Return the batch with these rows alone, and a mask of the tokens that are left, [T]."""
        alive = {row.slot for row in rows}
        stays = [row.slot in alive for row in self.rows]
        chunks = [chunk for chunk, each in zip(self.chunks, stays, strict=True) if each]
        return BatchRows(rows, chunks), np.repeat(stays, [row.count for row in self.rows])
