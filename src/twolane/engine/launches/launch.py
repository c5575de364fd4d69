"""Carries plans out: admits requests, reserves KV pages, and launches work in the lanes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from twolane.devices import LANES, LaneName
from twolane.engine.decode_rows import ReadyRows
from twolane.engine.kv.manager import Allocation
from twolane.engine.launches.overlap import corunner_now
from twolane.engine.request import (
    MAX_AWAITING_MASKS,
    BatchChunk,
    InFlightLaunch,
    LateRow,
    Phase,
    PrefillBatch,
    Request,
)
from twolane.engine.state import State
from twolane.estimate.query import Ints, Load, decode_step, hybrid_pass, prefill_slice
from twolane.lanes.base import Ticket, launch_timeout
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Sampling,
    Scoring,
    SlotUpdate,
    TokenMask,
    Work,
    pack,
)
from twolane.systems.plan import Chunk, DecodeSteps, Hybrid, Launch, Plan, PlanError, PrefillSlice


def carry_out(state: State, plan: Plan) -> bool:
    """Carry a plan out in the order of its fields; return whether to plan again at once.

    The loop plans again if something changed, or if a launch found no pages and no launch in flight
    could free some, so that the system must find another plan.

    Raises:
        PlanError: the plan is illegal; the state may be half changed.
    """
    for refusal in plan.refuse:
        _refuse(state, refusal.request, refusal.message)
    if plan.preempt:
        _park(state)
    if plan.admit:
        _admit(state, plan.admit)
    if plan.resume:
        _resume(state)
    batch = state.open
    launched = [
        _launch(state, launch, plan.reason)
        for launch in plan.launches
        if not _has_no_prompts(batch, launch)
    ]
    changed = bool(plan.refuse or plan.preempt or plan.admit or plan.resume or any(launched))
    return changed or bool(plan.launches and not state.in_flight)


def joining(state: State, *lanes: LaneName) -> list[Request]:
    """Return the requests whose prompt is launched to its end in these lanes and not done.

    The next launch in the same lane runs after their first token is sampled.
    """
    return [
        chunk.request
        for batch in state.launched
        if batch.last_lane in lanes
        for chunk in batch.chunks
        if chunk.final and chunk.request.phase is Phase.PREFILL and chunk.request.decodes
    ]


def _has_no_prompts(batch: PrefillBatch | None, launch: Launch) -> bool:
    """Return whether a launch is of a batch whose prompts have all lost their pages to decode."""
    return batch is not None and not batch.chunks and not isinstance(launch.work, DecodeSteps)


def _refuse(state: State, request_id: str, message: str) -> None:
    request = state.requests.get(request_id)
    if request is None or request not in state.queue.new:
        raise PlanError(f"refuses {request_id}, which is not waiting in the queue")
    state.fail(request, message, "refused")


def _park(state: State) -> None:
    if state.open is None or state.parked is not None:
        raise PlanError("preempts without an open batch, or while another is parked")
    state.parked, state.open = state.open, None


def _resume(state: State) -> None:
    if state.parked is None or state.open is not None:
        raise PlanError("resumes without a parked batch, or while another is open")
    state.open, state.parked = state.parked, None


def _admit(state: State, chunks: Sequence[Chunk]) -> None:
    if state.open is not None:
        raise PlanError("admits while a batch is open")
    admitted = [_admit_one(state, chunk) for chunk in chunks]
    # Pages and snapshots are taken when all have what they found: a plan counts on the prefixes
    # that it saw.
    for request, allocation, _ in admitted:
        if not state.kv.fill(allocation, len(request.tokens)):
            raise PlanError(f"admits {request.id}, for which there is no room")
    members = [_member(state, *each) for each in admitted]
    state.open = PrefillBatch(state.batches, members)
    state.batches += 1


def _admit_one(state: State, chunk: Chunk) -> tuple[Request, Allocation, int]:
    """Return the request of a chunk, with its allocation, and the number of tokens."""
    request = state.requests.get(chunk.request)
    if request is None or request.phase is not Phase.WAITING:
        raise PlanError(f"admits {chunk.request}, which is not waiting")
    if not 1 <= chunk.n <= request.new:
        raise PlanError(f"admits {chunk.n} tokens of {chunk.request}, which has {request.new}")
    state.queue.dequeue(request)
    allocation = request.allocation or _allocate(state, request)
    request.phase = Phase.PREFILL
    return request, allocation, chunk.n


def _member(state: State, request: Request, allocation: Allocation, count: int) -> BatchChunk:
    start, tokens = request.context, len(request.tokens)
    state.kv.plan_saves(allocation, tokens, start, count)
    saves = tuple([(border - start, s) for border, s in allocation.saves if border > start])
    source, allocation.source = allocation.source, -1  # later chunks begin where this one ends
    row = PromptRow(allocation.slot, start, count, start + count == tokens, source, saves)
    return BatchChunk(request, allocation, start, count, row)


def _allocate(state: State, request: Request) -> Allocation:
    kv, reuse = state.kv, not request.scores_prompt
    if not kv.free_slots:
        raise PlanError(f"admits {request.id}, for which there is no slot")
    found = kv.lookup(request.tokens, reuse=reuse, before=request.looked_up, salt=request.salt)
    allocation = kv.begin(found, request.salt)
    allocation.adapter = request.adapter
    request.allocation = allocation
    request.context = len(allocation.path) * state.kv.page_size
    if request.cached is None:
        request.cached = request.context
        request.admitted_at = state.now()
        state.queue.note_admission(request)
        state.counters.prefix_queries += 0 if request.scores_prompt else len(request.tokens)
        state.counters.prefix_hits += request.context
    state.trace.request_event(request.id, "admitted", state.now(), reused=request.context)
    return allocation


def _launch(state: State, launch: Launch, reason: str) -> bool:
    """Launch one part of the plan; return whether it had any rows."""
    if launch.lane not in LANES or launch.units not in state.offered:
        levels = state.lanes.levels
        raise PlanError(f"launches on {launch.units} units of {launch.lane!r}; on offer: {levels}")
    if isinstance(launch.work, PrefillSlice):
        return _launch_slice(state, launch, launch.work, reason)
    if isinstance(launch.work, Hybrid):
        return _launch_hybrid(state, launch, reason)
    return _launch_decode(state, launch, launch.work, reason)


def _launch_slice(state: State, launch: Launch, part: PrefillSlice, reason: str) -> bool:
    batch = state.open
    if batch is None or part.first != batch.layers_launched:
        raise PlanError(f"launches {part}, but that is not where the open batch is")
    if not part.first < part.last <= state.layers:
        raise PlanError(f"launches {part} of a model with {state.layers} layers")
    chunks = batch.chunks
    late = _late_chunks(chunks) if part.last == state.layers else ()
    work = PrefillWork(
        batch=batch.id,
        rows=tuple([chunk.row for chunk in chunks]),
        first=part.first,
        last=part.last,
        finishes=part.last == state.layers,
        chunks=() if part.first else _inputs(chunks),
        slots=() if part.first else _chunk_updates(chunks),
        masks=_chunk_masks(chunks) if part.last == state.layers else (),
        late=_slots_of(late),
    )
    shape = prefill_slice(_load(chunks), part.last - part.first, finishes=work.finishes)
    shape = shape._replace(adapters=_adapters(chunks))
    corunner = corunner_now(state, launch.lane)
    predicted = state.estimator.predict(shape, launch.units, corunner)
    rows = [(chunk.request, chunk.allocation) for chunk in chunks]
    flight = InFlightLaunch(launch, rows, shape, predicted, reason, batch, late=late)
    _submit(state, work, flight, [chunk.allocation for chunk in chunks])
    _advance(state, batch, chunks, launch.lane, part.last)
    return True


def _advance(
    state: State, batch: PrefillBatch, chunks: Sequence[BatchChunk], lane: LaneName, layers: int
) -> None:
    """Move the batch's launched frontier, and its requests' when the last layer is launched."""
    batch.layers_launched = layers
    if layers < state.layers:
        return
    batch.last_lane = lane
    state.open = None
    state.launched.append(batch)
    for chunk in chunks:
        request = chunk.request
        request.context = chunk.start + chunk.n
        if chunk.final:
            request.to_generate -= 1
        else:
            state.queue.enqueue(request)


def _launch_decode(state: State, launch: Launch, steps: DecodeSteps, reason: str) -> bool:
    if steps.k < 1:
        raise PlanError(f"launches {steps.k} decode steps")
    ready = _ready(state, _joined(launch.lane, steps.waits))
    apart = _apart(state, ready)
    if any(request.awaiting_masks == MAX_AWAITING_MASKS for request in apart):
        return False
    constrained = any(request.masked for request in (*apart, *state.rows.special))
    reserved = _reserve(state, ready, 1 if constrained else steps.k)
    rows = reserved.rows
    if not rows.requests:
        return False
    apart = _apart(state, rows)
    late = _late(apart)
    updates = _updates(state, rows)
    work = DecodeWork(_decode_rows(reserved), reserved.k, updates, _masks(apart), _slots_of(late))
    shape = decode_step(Load.decode(reserved.positions))
    shape = shape._replace(adapters=_adapters((), rows))
    corunner = corunner_now(state, launch.lane)
    step = state.estimator.predict(shape, launch.units, corunner)
    predicted = step * reserved.k if step is not None else None
    flight = InFlightLaunch(
        launch, rows.pairs, shape, predicted, reason + reserved.note, slots=rows.slots, late=late
    )
    _submit(state, work, flight, rows.allocations)
    state.rows.advance(rows, reserved.steps)
    return True


def _launch_hybrid(state: State, launch: Launch, reason: str) -> bool:
    batch = state.open
    if batch is None or batch.layers_launched:
        raise PlanError("launches a hybrid without an open batch, or one begun in slices")
    ready = _ready(state, _joined(launch.lane))
    if any(request.awaiting_masks == MAX_AWAITING_MASKS for request in _apart(state, ready)):
        kept = [each for each in ready.requests if each.awaiting_masks < MAX_AWAITING_MASKS]
        ready = ReadyRows.of(kept)
    reserved = _reserve(state, ready, 1)
    chunks = batch.chunks
    if not chunks:
        return False
    rows = reserved.rows
    apart = _apart(state, rows)
    late = (*_late(apart), *_late_chunks(chunks))
    work = HybridWork(
        decode=_decode_rows(reserved),
        prompts=tuple([chunk.row for chunk in chunks]),
        chunks=_inputs(chunks),
        slots=(*_updates(state, rows), *_chunk_updates(chunks)),
        masks=(*_masks(apart), *_chunk_masks(chunks)),
        late=_slots_of(late),
    )
    decode = Load.decode(reserved.positions)
    shape = hybrid_pass(Load.hybrid(decode, _load(chunks)))
    shape = shape._replace(adapters=_adapters(chunks, rows))
    named = [*rows.pairs, *((chunk.request, chunk.allocation) for chunk in chunks)]
    predicted = state.estimator.predict(shape, launch.units)
    slots = np.append(rows.slots, [chunk.allocation.slot for chunk in chunks])
    flight = InFlightLaunch(
        launch, named, shape, predicted, reason + reserved.note, batch, slots=slots, late=late
    )
    _submit(state, work, flight, [allocation for _, allocation in named])
    state.rows.advance(rows, reserved.steps)
    _advance(state, batch, chunks, launch.lane, state.layers)
    return True


def _joined(lane: LaneName, waits: bool = False) -> Sequence[LaneName]:
    """Return the lanes whose joining requests a decode launch in this lane serves."""
    return LANES if waits or lane == "device" else (lane,)


def _submit(
    state: State, work: Work, flight: InFlightLaunch, allocations: Sequence[Allocation]
) -> None:
    launch = flight.launch
    flight.after = _tickets_elsewhere(launch.lane, allocations)
    flight.launched_at = state.now()
    after = tuple([ticket.number for ticket in flight.after])
    flight.ticket = state.lanes.launch(launch.lane, launch.units, work, after)
    flight.ticket.timeout = launch_timeout(flight.predicted)
    state.kv.launched(allocations, flight.ticket)
    state.in_flight.append(flight)
    if flight.late:
        state.awaiting_masks.append(flight)
        for row in flight.late:
            row.request.awaiting_masks += 1


def _tickets_elsewhere(lane: LaneName, allocations: Iterable[Allocation]) -> list[Ticket]:
    """Return the tickets of other lanes that must end before a launch may use these allocations.

    A lane runs in order, so only launches in other lanes count. The last launch that names an
    allocation begins after all earlier ones have ended. Launches that are done count, too: another
    rank may not have ended them.
    """
    last = dict.fromkeys([allocation.last_ticket for allocation in allocations])
    return [t for t in last if t is not None and t.lane != lane]


def _inputs(chunks: Sequence[BatchChunk]) -> tuple[PromptChunk, ...]:
    """Return the tokens of a batch that this launch opens."""
    return tuple([_input(chunk.request, chunk.start, chunk.start + chunk.n) for chunk in chunks])


def _input(request: Request, start: int, end: int) -> PromptChunk:
    """Return a chunk's tokens, with the targets to score if the prompt's log-probabilities are
    wanted."""
    top, targets = request.sampling.params.prompt_logprobs, request.tokens[start + 1 : end + 1]
    scored = request.scores_prompt and top is not None and targets
    scoring = Scoring(pack(targets), top or 0) if scored else None
    return PromptChunk(pack(request.tokens[start:end]), scoring)


def _chunk_updates(chunks: Sequence[BatchChunk]) -> tuple[SlotUpdate, ...]:
    """Return the slot updates of a batch that this launch opens."""
    return tuple(
        [
            _update(chunk.allocation, _sampling(chunk.request) if chunk.final else None)
            for chunk in chunks
            if chunk.final or chunk.allocation.pages_sent < len(chunk.allocation.pages)
        ]
    )


def _sampling(request: Request) -> Sampling:
    """Return the sampling of a request whose prompt ends, with its tokens if penalties need
    them."""
    sampling = request.sampling
    return replace(sampling, known=pack(request.tokens)) if sampling.params.penalises else sampling


def _updates(state: State, rows: ReadyRows) -> tuple[SlotUpdate, ...]:
    """Return the slot updates of decode rows whose latest pages the lanes do not know."""
    unsent = state.rows.unsent
    grown = [held for held in rows.allocations if held in unsent] if unsent else ()
    unsent.difference_update(grown)
    return tuple([_update(held) for held in grown])


def _update(held: Allocation, sampling: Sampling | None = None) -> SlotUpdate:
    first, held.pages_sent = held.pages_sent, len(held.pages)
    pages, windows = tuple(held.pages[first:]), tuple(zip(*held.windows[first:], strict=True))
    return SlotUpdate(held.slot, first, pages, sampling, held.adapter, windows)


def _apart(state: State, rows: ReadyRows) -> list[Request]:
    """Return the rows of a launch that may have masks, in its order."""
    ended = (chunk.request for batch in state.launched for chunk in batch.chunks)
    if not state.rows.special and all(request.plain for request in ended):
        return []
    return [request for request in rows.requests if not request.plain]


def _masks(rows: Sequence[Request]) -> tuple[TokenMask, ...]:
    """Return the known token masks of these decode rows."""
    known = [(request.held.slot, request.next_mask) for request in rows]
    return tuple([TokenMask(slot, mask) for slot, mask in known if mask is not None])


def _late(rows: Sequence[Request]) -> Sequence[LateRow]:
    """Return the decode rows whose masks depend on tokens in flight, or are being computed."""
    return [
        LateRow(request, request.held, request.context + 1)
        for request in rows
        if request.mask_changes and request.next_mask is None
    ]


def _late_chunks(chunks: Sequence[BatchChunk]) -> Sequence[LateRow]:
    """Return the constrained prompts that end here and whose masks are still being computed.

    Only requests that have just been preempted have such prompts.
    """
    return [
        LateRow(chunk.request, chunk.allocation, len(chunk.request.tokens))
        for chunk in chunks
        if chunk.final and chunk.request.mask_changes and chunk.request.mask is None
    ]


def _slots_of(late: Sequence[LateRow]) -> tuple[int, ...]:
    return tuple([row.allocation.slot for row in late])


def _chunk_masks(chunks: Sequence[BatchChunk]) -> tuple[TokenMask, ...]:
    """Return the known token masks for the first tokens of prompts that end here."""
    return tuple(
        [
            TokenMask(chunk.allocation.slot, chunk.request.mask)
            for chunk in chunks
            if chunk.final and chunk.request.mask is not None
        ]
    )


def _load(chunks: Sequence[BatchChunk]) -> Load:
    """Return the load of a prefill batch."""
    return Load([chunk.n for chunk in chunks], [chunk.start for chunk in chunks])


def _adapters(chunks: Sequence[BatchChunk], rows: ReadyRows | None = None) -> int:
    """Return the number of different adapters in a launch."""
    slots = {chunk.allocation.adapter for chunk in chunks}
    if rows is not None:
        slots |= {held.adapter for held in rows.allocations}
    return len(slots - {-1})


def _decode_rows(reserved: "_Reserved") -> tuple[DecodeRow, ...]:
    slots, steps = reserved.rows.slots.tolist(), reserved.steps.tolist()
    return tuple(map(DecodeRow, slots, reserved.positions, steps))


class _Reserved(NamedTuple):
    """Rows of a decode launch that have pages for their steps."""

    rows: ReadyRows
    steps: Ints
    """Number of steps of each row."""
    positions: list[int]
    """Number of tokens of each row in the KV cache before the launch."""
    k: int
    note: str


def _reserve(state: State, rows: ReadyRows, k: int) -> _Reserved:
    """Reserve pages for up to k decode steps of each of these requests.

    The pages for all steps are reserved before the launch. If there are too few, k is reduced. If
    there are too few for one step, requests lose theirs in this order: the parked prefill, decoding
    requests from the lowest priority and the youngest on, prompts between two chunks, prompts of
    the open batch. Their pages return when the launches that name them have ended; rows without a
    page are left out of this launch.
    """
    clipped, note = k, ""
    # Every row has pages for its context, so it needs at most the pages of its k steps.
    if len(rows.requests) * state.kv.pages_for(k) * state.kv.page_cost > _available(state):
        while clipped > 1 and _missing(state, rows.requests, clipped) > _available(state):
            clipped -= 1
        note = f" (k clipped from {k} to {clipped})" if clipped < k else ""
        if _missing(state, rows.requests, 1) > _available(state):
            _make_room(state, rows.requests)
            rows = ReadyRows.of([request for request in rows.requests if request.started])
    columns, slots = state.rows, rows.slots
    steps = np.minimum(columns.left[slots], clipped)
    positions = columns.context[slots]
    short = np.flatnonzero(positions + steps > columns.capacity[slots]).tolist()
    lacking = []
    for row in short:
        held = rows.allocations[row]
        if state.kv.grow(held, int(positions[row] + steps[row])):
            columns.note_pages(held)
            columns.unsent.add(held)
        else:
            lacking.append(row)
    if lacking:
        without = set(lacking)
        kept = [each for row, each in enumerate(rows.requests) if row not in without]
        rows = ReadyRows.of(kept)
        steps, positions = np.delete(steps, lacking), np.delete(positions, lacking)
    longest = int(steps.max()) if len(steps) else 0
    return _Reserved(rows, steps, positions.tolist(), longest, note)


def _ready(state: State, lanes: Sequence[LaneName]) -> ReadyRows:
    """Return the rows of the decoding requests and of those that join from these lanes."""
    ready = state.rows.ready
    coming = joining(state, *lanes) if state.launched else ()
    for request in coming:
        state.rows.note_coming(request)
    return ReadyRows.of([*ready.requests, *coming]) if coming else ready


def _make_room(state: State, rows: Sequence[Request]) -> None:
    """Preempt requests until one step of the remaining rows fits, now or when pages have
    returned."""
    if state.parked is not None:
        for chunk in state.parked.chunks:
            state.send_back(chunk.request)
    # The first in rank is never sent back: with the pool to itself it fits, so there is progress.
    # Those that sit out this launch hold pages, too.
    victims = [request for request in state.decoding if request.to_generate > 0][1:]
    left = list(rows)
    while _missing(state, left, 1) > _available(state) + state.kv.returning_pages:
        if victims:
            victim = victims.pop()
            left = [request for request in left if request is not victim]
        elif state.queue.started:
            victim = state.queue.started[-1]
            state.queue.dequeue(victim)
        elif (prompt := _last_open(state)) is not None and prompt.rank > min(r.rank for r in left):
            victim = prompt
        else:
            break
        state.send_back(victim)
    state.drop_empty_batches()


def _last_open(state: State) -> Request | None:
    """Return the open batch's prompt that is last in rank."""
    chunks = state.open.chunks if state.open else ()
    return max((chunk.request for chunk in chunks), key=lambda r: r.rank, default=None)


def _available(state: State) -> int:
    return state.kv.free_pages + state.kv.reclaimable_pages


def _missing(state: State, rows: Sequence[Request], k: int) -> int:
    """Return the number of pages that k steps of these rows need beyond those that they have."""
    return sum(state.kv.missing(r.held, r.context + min(k, r.to_generate)) for r in rows)
