"""The points to measure, in order: anchors first, then rounds of random draws.

Every round has some of everything (solo prefill and decode on every level, both lanes at every
level, hybrid passes), so a plan that is cut off anywhere is a smaller plan of the same kind. Each
of its points is a draw of its own: a batch measured on one level shows nearly all that it would
show on the others, and another batch shows more. The anchors are the corners that nothing should
have to be extrapolated beyond; alone they are measured on every level, together each level and the
hybrid passes have pairs of them. They are never held out.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

from twolane.estimate.profile import ANCHOR, Run, runs_of
from twolane.estimate.query import Kind

ROUNDS = 100
"""Rounds of the whole plan."""
REVISION = 7
"""Raised when other points are planned, or they are measured in another way."""
CONTENDED_ROWS = (256, 1024, 4096, 8192)
"""Rows of the products beside which a copy is measured (sl of Bullet §3.2.3)."""
HYBRIDS_PER_ROUND = 4
"""Hybrid passes of a round."""


@dataclass(frozen=True, slots=True)
class LaneCapacity:
    """Limits of the lanes."""

    units: int
    levels: Sequence[tuple[int, int]]
    """Partitions (prefill units, decode units) on offer, the solo ones too."""
    pool_tokens: int
    page_size: int
    """Tokens; no two requests have one in common."""
    slots: int
    max_model_len: int
    batch_tokens: int
    """The largest prefill batch."""

    @property
    def prefill_units(self) -> list[int]:
        """Shares that prefill runs on."""
        return sorted({p for p, _ in self.levels if p})

    @property
    def decode_units(self) -> list[int]:
        """Shares that decode runs on."""
        return sorted({d for _, d in self.levels if d})

    @property
    def shares(self) -> list[int]:
        """Units that either lane may have, the whole device last."""
        return sorted({*self.prefill_units, *self.decode_units})

    @property
    def shared(self) -> list[tuple[int, int]]:
        """Levels at which both lanes run."""
        return [level for level in self.levels if all(level)]

    def fits(self, prompts: Sequence[Run], contexts: Sequence[Run]) -> bool:
        """Return whether the pool, the slots and the context length hold these at a time."""
        runs = [*prompts, *contexts]
        tokens = sum((n + r) * count for n, r, count in runs)
        pages = sum(-(-(n + r) // self.page_size) * count for n, r, count in runs)
        longest = max(n + r for n, r, _ in runs)
        new = sum(n * count for n, _, count in prompts)
        requests = sum(count for _, _, count in runs)
        return (
            tokens <= 0.85 * self.pool_tokens
            and pages <= self.pool_tokens // self.page_size
            and longest < self.max_model_len
            and new <= self.batch_tokens
            and requests <= self.slots
        )


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration to be measured."""

    name: str
    """Unique in the plan."""
    kind: Kind | None
    """Kind of the work; None: both lanes at once."""
    prompts: tuple[Run, ...]
    contexts: tuple[Run, ...]
    """Decode rows, (1, context, count)."""
    prefill_units: int
    """Units of the prefill lane, or of the whole pass if it is hybrid."""
    decode_units: int
    held_out: bool


PROMPT_ANCHORS: tuple[Run, ...] = (
    (8192, 0, 1), (64, 0, 1), (1024, 0, 1), (16_384, 0, 1), (1024, 32_000, 1), (64, 32_000, 1),
    (256, 0, 4), (2048, 4096, 1), (512, 1024, 8), (4096, 16_000, 2),
)  # fmt: skip
CONTEXT_ANCHORS: tuple[Run, ...] = (
    (1, 2048, 64), (1, 64, 1), (1, 512, 256), (1, 32_000, 1), (1, 8192, 16), (1, 1024, 8),
    (1, 2048, 200), (1, 128, 32), (1, 16_000, 24), (1, 1024, 128),
)  # fmt: skip
CROWDED_PROMPTS: tuple[Run, ...] = ((64, 0, 1), (1024, 0, 1))
"""Prompts whose hybrid passes are measured beside the decode rows with the most context in all.
Without such passes, those with much context have prompts on long prefixes or no graphs, and the
context seems to cost what these do."""
MIN_TOKENS, MAX_TOKENS = 16, 32_000
"""Bounds on the new tokens, contexts and prefixes that are drawn."""


def plan(limits: LaneCapacity, seed: int, rounds: int = ROUNDS) -> list[Point]:
    """Return the points in the order of measurement; those that do not fit are left out."""
    points = list(_anchors(limits))
    for number in range(rounds):
        points += _round(limits, random.Random(f"{seed}/{number}"), number)
    return points


def _anchors(limits: LaneCapacity) -> Iterator[Point]:
    prompts = _shrunk(PROMPT_ANCHORS, lambda run: limits.fits((run,), ()))
    contexts = _shrunk(CONTEXT_ANCHORS, lambda run: limits.fits((), (run,)))
    for i, (prompt, context) in enumerate(zip(prompts, contexts, strict=False)):
        for units in limits.prefill_units:
            yield Point(f"{ANCHOR}/{i}/prefill/{units}", "prefill", (prompt,), (), units, 0, False)
        yield from _alone(limits, i, context)
        if limits.fits((prompt,), (context,)):
            whole = limits.units
            name = f"{ANCHOR}/{i}/hybrid"
            yield Point(name, "hybrid", (prompt,), (context,), whole, whole, False)
        for shift, (p, d) in enumerate(limits.shared):
            j = (i + shift) % len(contexts)
            if limits.fits((prompt,), (contexts[j],)):
                name = f"{ANCHOR}/{i}+{j}/both/{p}+{d}"
                yield Point(name, None, (prompt,), (contexts[j],), p, d, False)
    for i in range(len(prompts), len(contexts)):
        yield from _alone(limits, i, contexts[i])
    crowd = max(contexts, key=lambda run: run[1] * run[2])
    for prompt in CROWDED_PROMPTS:
        if limits.fits((prompt,), (crowd,)):
            name = f"{ANCHOR}/crowded+{prompt[0]}/hybrid"
            yield Point(name, "hybrid", (prompt,), (crowd,), limits.units, limits.units, False)


def _alone(limits: LaneCapacity, number: int, context: Run) -> Iterator[Point]:
    """Steps of an anchor on every level."""
    for units in limits.decode_units:
        name = f"{ANCHOR}/{number}/decode/{units}"
        yield Point(name, "decode", (), (context,), 0, units, False)


def _shrunk(anchors: Sequence[Run], fits: Callable[[Run], bool]) -> list[Run]:
    """Return the anchors with lengths halved until one request fits, then with fewer requests until
    all fit; those that become alike are one."""
    shrunk: dict[Run, None] = {}
    for n, r, count in anchors:
        while not fits((n, r, 1)) and (n, r) != (1, 0):
            n, r = max(1, n // 2), r // 2
        while not fits((n, r, count)) and count > 1:
            count = 3 * count // 4
        if fits((n, r, count)):
            shrunk[n, r, count] = None
    return list(shrunk)


def _round(limits: LaneCapacity, draw: random.Random, number: int) -> Iterator[Point]:
    def point(name: str, kind: Kind | None, p: int, d: int) -> Iterator[Point]:
        drawn = _drawn(draw, limits, prompts=kind != "decode", contexts=kind != "prefill")
        if drawn is not None:
            # Share of the points beside the anchors that estimators are not fitted on.
            yield Point(f"{number}/{name}", kind, *drawn, p, d, draw.random() < 0.2)

    for units in limits.prefill_units:
        yield from point(f"prefill/{units}", "prefill", units, 0)
    for units in limits.decode_units:
        yield from point(f"decode/{units}", "decode", 0, units)
    for p, d in limits.shared:
        yield from point(f"both/{p}+{d}", None, p, d)
    for i in range(HYBRIDS_PER_ROUND):
        yield from point(f"hybrid/{i}", "hybrid", limits.units, limits.units)


def _drawn(
    draw: random.Random, limits: LaneCapacity, *, prompts: bool, contexts: bool
) -> tuple[tuple[Run, ...], tuple[Run, ...]] | None:
    """Draw a prefill batch, a decode batch, or both, that fit; None if none were found."""
    # Draws of a batch before the planner gives up finding one that fits.
    for _ in range(20):
        pair = (
            _prompts(draw, limits) if prompts else (),
            _contexts(draw, limits) if contexts else (),
        )
        if limits.fits(*pair):
            return pair
    return None


def _prompts(draw: random.Random, limits: LaneCapacity) -> tuple[Run, ...]:
    """Draw a prefill batch: one to eight prompts alike or not, with a prefix or not."""
    total = _log_uniform(draw, MIN_TOKENS, limits.batch_tokens)
    count = min(draw.choice((1, 1, 1, 2, 4, 8)), max(1, total // MIN_TOKENS))
    longest = min(MAX_TOKENS, limits.max_model_len - 2 * total // count - 1)
    reused = 0 if draw.random() < 0.4 else _log_uniform(draw, MIN_TOKENS, max(MIN_TOKENS, longest))
    spread = draw.choice((0.0, 0.0, 0.8))
    pairs = [
        (_near(draw, total // count, spread), _near(draw, reused, spread)) for _ in range(count)
    ]
    return tuple(runs_of((max(1, n), r) for n, r in pairs))


def _contexts(draw: random.Random, limits: LaneCapacity) -> tuple[Run, ...]:
    """Draw a decode batch: requests with contexts alike or not."""
    rows = _log_uniform(draw, 1, limits.slots - 8)
    longest = min(MAX_TOKENS, limits.max_model_len // 2, int(0.6 * limits.pool_tokens) // rows)
    context = _log_uniform(draw, MIN_TOKENS, max(MIN_TOKENS, longest))
    spread = draw.choice((0.0, 0.8))
    contexts = sorted(max(1, _near(draw, context, spread)) for _ in range(rows))
    return tuple(runs_of((1, each) for each in contexts))


def _near(draw: random.Random, value: int, spread: float) -> int:
    return int(value * draw.uniform(1 - spread, 1 + spread)) if spread else value


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(exp(draw.uniform(log(least), log(max(least, most)))))
