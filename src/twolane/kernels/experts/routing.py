"""Routing of tokens to experts, and the rows of every expert, worked out on the device.

Rows of a batch that are padding or done go nowhere, so that they wake no expert. The rows of an
expert lie in the order of the batch: a result never depends on which program was first. Nothing
comes back to the host, so that all of this can be in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.experts.rule import RoutingRule
from twolane.kernels.fused import Out, launch_options, parts, quantised, rms_normal, warps
from twolane.kernels.runtime.launch import launch, power_of_2

_ELEMENTS = 2048
"""Elements that one program copies or sums."""
MIN_GROUP = 16
"""The fewest rows that a group is made for, which bounds the length of the list."""


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """Marks of the rows of a batch that are neither padding nor done."""

    marks: Tensor
    """int32 [T]"""
    least: int
    """A row is active where its mark is at least this."""

    def part(self, rows: slice) -> "ActiveRows":
        """Return the marks of some rows."""
        return ActiveRows(self.marks[rows], self.least)


@dataclass(frozen=True, slots=True)
class Routing:
    """Buffers for the routing of up to `rows` tokens. An entry is one expert of one token."""

    experts: int
    weights: Tensor
    """Weight of each entry, float32 [rows, per_token], the likeliest expert first."""
    chosen: Tensor
    """The expert of each entry, int32 [rows, per_token]; `experts` where a row is not active."""
    positions: Tensor
    """Index of each entry among those sorted by expert, int32 [rows, per_token]; -1: inactive."""
    tokens: Tensor
    """The row of each sorted entry, int32 [rows * per_token]."""
    ends: Tensor
    """End of each expert's sorted entries, int32 [experts]."""
    groups: Tensor
    """Number of groups, a counter of programs that is 0 between launches, the sum of active experts
    (`experts_read`), padding, and for each group its expert, its first sorted entry, their number,
    and a mask of rows or padding: int32."""

    @classmethod
    def of(cls, experts: int, per_token: int, rows: int, device: torch.device) -> "Routing":
        """Allocate buffers for up to this many tokens."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        entries = (rows, per_token)
        groups = experts + rows * per_token // MIN_GROUP
        weights = torch.zeros(entries, dtype=torch.float32, device=device)
        # Numbers in front of the list of groups.
        return cls(
            experts,
            weights,
            ints(*entries),
            ints(*entries),
            ints(rows * per_token),
            ints(experts),
            ints(4 + 4 * groups),
        )

    def first(self, rows: int) -> "Routing":
        """Return these buffers cut to `rows` tokens."""
        return Routing(
            self.experts,
            self.weights[:rows],
            self.chosen[:rows],
            self.positions[:rows],
            self.tokens[: rows * self.per_token],
            self.ends,
            self.groups,
        )

    @property
    def per_token(self) -> int:
        """Experts of each token."""
        return self.chosen.shape[1]

    @property
    def experts_read(self) -> Tensor:
        """Number of experts that had rows, summed over launches since it was set to 0: int32
        [1]."""
        return self.groups[2:3]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        parts = self.weights, self.chosen, self.positions, self.tokens, self.ends, self.groups
        return sum(part.nbytes for part in parts)


@triton.jit
def _choose(
    logits, bias, marks, chosen, weights, positions, least, scale,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, NORMALISED: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    RANKS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    active = tl.load(marks + row) >= least
    at = logits + row * (EXPERTS + GATED)
    value = tl.load(at + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        wide = tl.exp(value - tl.max(value, axis=0))
        score = wide / tl.sum(wide, axis=0)
    liked = score
    if BIASED:
        liked += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
    left = tl.where(expert < EXPERTS, liked, float("-inf"))
    picks = EXPERTS + rank - CHOSEN  # of those that are shared
    shares = tl.zeros((RANKS,), tl.float32)
    for i in tl.static_range(CHOSEN):
        best = tl.max(left, axis=0)
        pick = tl.min(tl.where(left == best, expert, EXPERTS), axis=0)
        picks = tl.where(rank == i, pick, picks)
        share = tl.sum(tl.where(expert == pick, score, 0.0), axis=0)
        shares = tl.where(rank == i, share, shares)
        left = tl.where(expert == pick, float("-inf"), left)
    if NORMALISED:
        shares = shares / tl.sum(shares, axis=0)
    shares = shares * scale
    if SHARED:
        counted = 1.0
        if GATED:
            counted = 1.0 / (1.0 + tl.exp(-tl.load(at + EXPERTS).to(tl.float32)))
        shares = tl.where(rank >= CHOSEN, counted, shares)
    entry = row * (CHOSEN + SHARED) + rank
    inside = rank < CHOSEN + SHARED
    tl.store(chosen + entry, tl.where(active, picks, EXPERTS + SHARED), mask=inside)
    tl.store(weights + entry, shares, mask=inside)
    tl.store(positions + entry, -1, mask=inside)


@triton.jit
def _list_groups(groups, expert, first, count, GROUP: tl.constexpr) -> None:
    """List the groups of all experts, by the first sorted entry of each and how many it has."""
    parts = (count + GROUP - 1) // GROUP
    slot = tl.cumsum(parts, axis=0) - parts
    tl.store(groups, tl.sum(parts, axis=0))
    tl.store(groups + 2, tl.load(groups + 2) + tl.sum((count > 0).to(tl.int32), axis=0))
    for i in range(0, tl.max(parts, axis=0)):
        place = groups + 4 + 4 * (slot + i)
        tl.store(place, expert, mask=i < parts)
        tl.store(place + 1, first + i * GROUP, mask=i < parts)
        tl.store(place + 2, tl.minimum(count - i * GROUP, GROUP), mask=i < parts)


@triton.jit
def _sort(
    chosen, positions, tokens, ends, groups, count,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ALL: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    own = tl.program_id(0)
    step = tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    before = 0
    mine = 0
    for start in range(0, count, BLOCK):
        at = start + step
        expert = tl.load(chosen + at, mask=at < count, other=EXPERTS)
        before += tl.sum((expert < own).to(tl.int32), axis=0)
        mine += tl.sum((expert == own).to(tl.int32), axis=0)
    tl.store(ends + own, before + mine)
    for start in range(0, count, BLOCK):
        at = start + step
        expert = tl.load(chosen + at, mask=at < count, other=EXPERTS)
        ours = (expert == own).to(tl.int32)
        place = before + tl.cumsum(ours, axis=0) - ours
        tl.store(positions + at, place, mask=ours > 0)
        tl.store(tokens + place, at // PER_TOKEN, mask=ours > 0)
        before += tl.sum(ours, axis=0)
    # The last program to come here knows where the entries of all experts end.
    tl.debug_barrier()
    arrived = tl.atomic_add(groups + 1, 1, sem="acq_rel")
    if arrived == EXPERTS - 1:
        tl.store(groups + 1, 0)  # for the next launch
        expert = tl.arange(0, ALL)
        known = expert < EXPERTS
        end = tl.load(ends + expert, mask=known, other=0, cache_modifier=".cg")
        first = tl.load(ends + expert - 1, mask=known & (expert > 0), other=0, cache_modifier=".cg")
        _list_groups(groups, expert, first, tl.where(known, end - first, 0), ROWS)


@triton.jit
def _gather(
    x, tokens, ends, out, scales,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, QUANTISED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    there = entry < tl.load(ends + EXPERTS - 1)
    row = tl.load(tokens + entry, mask=there, other=0).to(tl.int64)
    inside = there & (column < HIDDEN)
    value = tl.load(x + row * HIDDEN + column, mask=inside, other=0.0)
    if QUANTISED:
        value, scale = quantised(value)
        tl.store(scales + entry, scale, mask=there)
    tl.store(out + entry * HIDDEN + column, value, mask=inside)


@triton.jit
def _combine(
    outs, positions, weights, residual, norm, out, scales, eps,
    PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, QUANTISED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if NORM:
        scale = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        place = tl.load(positions + row * PER_TOKEN + rank).to(tl.int64)
        weight = tl.load(weights + row * PER_TOKEN + rank)
        value = tl.load(outs + place * HIDDEN + column, mask=inside & (place >= 0), other=0.0)
        total += weight * value.to(tl.float32)
    at = residual + row * HIDDEN + column
    total = total.to(residual.dtype.element_ty)
    if ADD:
        old = tl.load(at, mask=inside, other=0.0)
        total = (total.to(tl.float32) + old.to(tl.float32)).to(old.dtype)
    tl.store(at, total, mask=inside)
    if NORM:
        normal = rms_normal(total, scale, eps, HIDDEN)
        if QUANTISED:
            normal, row_scale = quantised(normal)
            tl.store(scales + row, row_scale)
        tl.store(out + row * HIDDEN + column, normal, mask=inside)


def route(
    logits: Tensor,
    active: ActiveRows,
    routing: Routing,
    group_rows: int,
    rule: RoutingRule,
    bias: Tensor | None = None,
) -> None:
    """Choose each token's experts as `model.routing.route` does, and sort the rows by expert.

    Args:
        logits: [T, rule.logits], of the router.
        active: the T rows.
        routing: buffers of T tokens, which are filled.
        group_rows: the most rows of a group, at least `MIN_GROUP`; an expert with more gets
            several groups.
        rule: How experts are chosen.
        bias: float32 [rule.experts], if the rule has one.
    """
    launch(
        _choose, (len(logits),), logits, logits if bias is None else bias, active.marks,
        routing.chosen, routing.weights, routing.positions, active.least, rule.scale,
        EXPERTS=rule.experts, CHOSEN=rule.chosen, SHARED=rule.shared, NORMALISED=rule.normalised,
        SIGMOID=rule.sigmoid, BIASED=rule.biased, GATED=rule.gated, BLOCK=power_of_2(rule.experts),
        RANKS=power_of_2(rule.entries), num_warps=1, **launch_options(logits.device),
    )  # fmt: skip
    _sort_entries(routing, len(logits) * rule.entries, group_rows)


def _sort_entries(routing: Routing, count: int, group_rows: int) -> None:
    """Sort the first `count` entries by expert, and list the groups."""
    launch(
        _sort, (routing.experts,), routing.chosen, routing.positions, routing.tokens, routing.ends,
        routing.groups, count,
        EXPERTS=routing.experts, PER_TOKEN=routing.per_token, ROWS=group_rows, BLOCK=1024,
        ALL=power_of_2(routing.experts), num_warps=4, **launch_options(routing.chosen.device),
    )  # fmt: skip


def gather(x: Tensor, routing: Routing, out: Activations) -> None:
    """`out` [T * per_token, hidden] = the row of `x` [T, hidden] of each sorted entry."""
    hidden, whole = x.shape[1], isinstance(out, Quantised)
    block = power_of_2(hidden) if whole else min(_ELEMENTS, power_of_2(hidden))
    launch(
        _gather, (len(out), -(-hidden // block)), x, routing.tokens, routing.ends, *parts(out),
        EXPERTS=routing.experts, HIDDEN=hidden, BLOCK=block, QUANTISED=whole,
        num_warps=warps(block) if whole else 4, **launch_options(x.device),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Combination:
    """The outputs of all tokens' experts, which are not yet in the residual stream.

    They are summed in float32 in the order of rank, whatever other tokens there are.
    """

    outs: Tensor
    """[T * per_token, hidden], sorted by expert."""
    routing: Routing
    """Positions and weights of the outputs of each of the T tokens."""

    def add_into(self, residual: Tensor) -> None:
        """Add each token's outputs, times their weights, to `residual` [T, hidden] in place."""
        self._launch(residual, None, 0.0, residual)

    def write_into(self, out: Tensor) -> None:
        """Write the sums of each token's outputs, times their weights, to `out` [T, hidden]."""
        self._launch(out, None, 0.0, out, add=False)

    def add_and_norm(self, residual: Tensor, weight: Tensor, eps: float, out: Out) -> Out:
        """`add_into`, then `out` [T, hidden] = the RMS norm of `residual`."""
        self._launch(residual, weight, eps, out)
        return out

    def _launch(
        self,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        out: Activations,
        *,
        add: bool = True,
    ) -> None:
        rows, hidden = residual.shape
        block = power_of_2(hidden)
        values, scales = parts(out)
        launch(
            _combine, (rows,), self.outs, self.routing.positions, self.routing.weights, residual,
            residual if weight is None else weight, values, scales, eps,
            PER_TOKEN=self.routing.per_token, HIDDEN=hidden, BLOCK=block, ADD=add,
            NORM=weight is not None, QUANTISED=isinstance(out, Quantised), num_warps=warps(block),
            **launch_options(residual.device),
        )  # fmt: skip
