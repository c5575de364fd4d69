"""Collects finished launches: polls tickets, delivers their tokens, and frees what they used."""

from collections.abc import Sequence
from math import isfinite

import numpy as np
from msgspec.structs import replace

from twolane.engine.constrained.token_rule import TokenRule
from twolane.engine.kv.manager import Allocation
from twolane.engine.launches.overlap import OTHER, PartialOverlap, corunner_during
from twolane.engine.messages import Launched, Output
from twolane.engine.pacing import Scheduled
from twolane.engine.prompt_work import PromptWork
from twolane.engine.request import InFlightLaunch, Phase, PrefillBatch, Request
from twolane.engine.state import State
from twolane.estimate.query import Ints
from twolane.lanes.base import Sampled, Step
from twolane.systems.plan import DecodeSteps, PrefillSlice

BROKEN = (
    "the model's logits are NaN or infinite: its weights or number format do not serve this prompt"
)
"""The error message for a request whose logits are NaN or infinite."""

OVERDUE_SECONDS = 0.001
"""Tokens are awaited for this many seconds beyond their predicted time."""


def tokens_before(state: State, planning: float) -> float | None:
    """Return until when a plan should wait for tokens, in seconds; None: it need not.

    The next tokens come, by prediction, before a plan begun now would end, and would be sent after
    it. A plan does not wait if a busy lane would run dry meanwhile. A lane that is empty already
    waits too, for at most `planning` and `OVERDUE_SECONDS`, even beside waiting prompts: it
    makes no clear difference to them (docs/notes/host-h200.md).

    Args:
        state: the engine's.
        planning: the seconds that a plan may take.
    """
    at = _next_tokens(state)
    now = state.now()
    if at is None or not at - planning < now < at + OVERDUE_SECONDS:
        return None
    until = at + OVERDUE_SECONDS
    ends = [lane.until for lane in state.lane_views(now).values() if lane.queued]
    ready = all(end is not None and end > until for end in ends)
    return until if ready else None


def _next_tokens(state: State) -> float | None:
    """Return the predicted time in seconds of the next tokens of the decode launch under way."""
    for flight in state.in_flight:
        work, start = flight.launch.work, flight.ticket.start
        if isinstance(work, PrefillSlice):
            continue
        if start is None or flight.predicted is None:
            return None
        steps = work.k if isinstance(work, DecodeSteps) else 1
        if flight.taken < steps:
            return start + flight.predicted * (flight.taken + 1) / steps
    return None


def reap(state: State) -> bool:
    """Deliver finished steps and settle finished launches; return whether there were any.

    Raises:
        BaseException: the error of a lane.
    """
    state.lanes.check()
    # The lanes run on while they are polled, and launches wait only for earlier ones. Polling the
    # latest first shows the end of each launch that another one, seen to have begun, waited for.
    # Delivery goes in launch order.
    polled = [(flight, *_poll(flight)) for flight in reversed(state.in_flight)]
    found = False
    for flight, done, steps in reversed(polled):
        for step, at in steps:
            _deliver(state, flight, step, at)
        if done:
            _settle(state, flight)
        if done or steps:
            state.progressed[flight.launch.lane] = state.now()
            found = True
    return _deliver_held(state) or found


def _poll(flight: InFlightLaunch) -> tuple[bool, list[tuple[Step, float]]]:
    """Return whether a launch has ended, and its newly finished steps with their times in
    seconds."""
    ticket = flight.ticket
    done = ticket.done  # read first: the last step comes before the end
    if done:
        ticket.check()
    if len(ticket.steps) == flight.taken:
        return done, []
    steps = ticket.steps[flight.taken :]
    times = ticket.times[flight.taken : flight.taken + len(steps)]
    flight.taken += len(steps)
    return done, [*zip(steps, times, strict=True)]


def _deliver(state: State, flight: InFlightLaunch, step: Step, at: float) -> None:
    """Deliver the results of one step, which the device finished at `at` seconds."""
    for row, logprobs in step.prompt_logprobs:
        request, allocation = flight.rows[row]
        if not _expected(request, allocation):
            continue
        if all(isfinite(each.logprob) for each in logprobs):
            request.prompt_logprobs.extend(logprobs)
        else:
            _fail_broken(state, request)
    rows, sliced = flight.rows, isinstance(flight.launch.work, PrefillSlice)
    for row in step.broken:
        request, allocation = rows[row]
        if _expected(request, allocation):
            _fail_broken(state, request)
    if flight.slots is not None and len(step.sampled) > 1:
        _deliver_rows(state, flight, flight.slots, step.sampled, at)
        return
    for sampled in step.sampled:
        request, allocation = rows[sampled.row]
        if _expected(request, allocation):
            _receive(state, request, sampled, at, sliced=sliced)


def _deliver_rows(
    state: State, flight: InFlightLaunch, slots: Ints, sampled: Sequence[Sampled], at: float
) -> None:
    """Deliver one token of each row of a decode step, in the order of the rows.

    What only has to be appended and sent is found by comparing columns, and scheduled in them.
    """
    columns, page_size = state.rows, state.kv.page_size
    slots = slots[[each.row for each in sampled]]
    quick = columns.quick[slots]
    # A slot whose request has left is not quick, and is given to no other before this launch ends.
    times: Sequence[Scheduled | None] = state.pacer.schedule_rows(columns, slots[quick], at)
    if len(times) < len(slots):
        quick_times = iter(times)
        times = [next(quick_times) if each else None for each in quick.tolist()]
    count = columns.tokens[slots] + 1
    columns.tokens[slots[quick]] += 1
    tokens = np.array([each.token for each in sampled])
    ended = (columns.stops[slots] == tokens[:, None]).any(axis=1) | (count >= columns.limit[slots])
    look = ended | ((count - 1) % page_size == 0)
    rows, outputs = flight.rows, state.outputs
    merges = bool(outputs)  # tokens of an earlier step, or of one that is due at the same time
    for each, scheduled, to_look in zip(sampled, times, look.tolist(), strict=True):
        token, (request, allocation) = each[1], rows[each[0]]
        if scheduled is None:
            if _expected(request, allocation):
                _receive(state, request, each, at, sliced=False)
            continue
        request.tokens.append(token)
        request.last_token_at, request.due, request.slack, due = scheduled
        if to_look:
            _share_full_pages(state, request)
        key = request.id, scheduled[1]
        before = outputs.get(key) if merges else None
        if before is None:
            outputs[key] = Output(request.id, [token], due=due)
        else:
            outputs[key] = replace(before, tokens=[*before.tokens, token])
        if to_look and (token in request.stops or len(request.tokens) >= request.limit):
            state.finish(request, "stop" if token in request.stops else "length")


def _fail_broken(state: State, request: Request) -> None:
    """End a request whose logits are NaN or infinite; the others of its batch go on."""
    state.fail(request, BROKEN, "broken")
    state.counters.broken += 1
    state.drop_empty_batches()


def _expected(request: Request, allocation: Allocation) -> bool:
    """Return whether the request still has the allocation that it was launched with.

    A request that was stopped, aborted or preempted after the launch has another allocation or
    none; results for the old one are dropped.
    """
    return request.allocation is allocation


def _receive(state: State, request: Request, sampled: Sampled, at: float, *, sliced: bool) -> None:
    held = state.pacer.release(request)
    if held is not None:  # the second token came before the first was found ready
        _send(state, request, held, at)
    request.tokens.append(sampled.token)
    if request.constraint is not None:
        request.constraint.take(sampled.token)
        request.mask = None
        state.masks_to_compute.append(request)
    elif request.rule is not None:
        _follow_rule(request, request.rule)
    elif request.unmasks and not request.awaiting_masks:
        request.mask, request.unmasks = None, False
    first = request.last_token_at is None
    if request.phase is not Phase.DECODE:
        state.start_decode(request)
    _share_full_pages(state, request)
    if first:
        state.queue.release(request.id)
    stopped = sampled.token in request.stops  # the sampler bans these before min_tokens
    ended = stopped or len(request.tokens) >= request.limit
    if sliced and first and not ended and state.pacer.hold(request, sampled):
        return
    _send(state, request, sampled, at)
    if ended:
        state.finish(request, "stop" if stopped else "length")


def _follow_rule(request: Request, rule: TokenRule) -> None:
    """Set the mask of a request's next token, and forget a rule that changes nothing any more."""
    request.mask = rule.mask(request.tokens, request.prompt_tokens)
    if not rule.changes:
        request.rule, request.unmasks = None, rule.free


def _send(state: State, request: Request, sampled: Sampled, at: float) -> None:
    state.pacer.schedule(request, at)
    state.add_output(request, sampled)
    state.rows.note_sent(request)


def _deliver_held(state: State) -> bool:
    """Send the first tokens whose hold is over; return whether there were any."""
    ready = list(state.pacer.release_ready(state.now(), state.in_flight))
    for request, sampled in ready:
        _send(state, request, sampled, state.now())
    return bool(ready)


def _share_full_pages(state: State, request: Request) -> None:
    """Share a request's full pages through the prefix tree.

    The KV cache has all of its tokens but the last one, which is the next step's input.
    """
    allocation, written = request.held, len(request.tokens) - 1
    if written // state.kv.page_size > len(allocation.path):
        state.kv.share(allocation, request.tokens, written)


def _settle(state: State, flight: InFlightLaunch) -> None:
    """Settle a launch that has ended: free its pages, advance its batch, and count its seconds."""
    state.in_flight.remove(flight)
    ticket, lane = flight.ticket, flight.launch.lane
    if flight.batch is not None:
        _advance(state, flight, flight.batch)
    if state.kv.windowed:
        _slide_windows(state, flight)
    state.kv.reaped([allocation for _, allocation in flight.rows])
    state.counters.seconds[ticket.lane, ticket.units] += ticket.seconds
    state.launch_costs.note(flight.launch.work, ticket.host_seconds, state.now())
    if lane in OTHER:
        state.finished[lane].append(flight)
    state.unobserved.append(flight)
    if not state.trace.silent:
        _trace(state, flight)
    if state.now() < state.watched_until:
        state.launches.append(_launched(state, flight))
    flight.batch = None  # `finished` keeps the flight, which must not keep hidden states


def _slide_windows(state: State, flight: InFlightLaunch) -> None:
    """Let go of the pages that have left the windows of requests whose launch has ended.

    The launch may have computed the whole context but for the last token, which is delivered.
    """
    for request, allocation in flight.rows:
        if request.phase is Phase.DECODE and _expected(request, allocation):
            state.kv.slide(allocation, len(request.tokens) - 1)


def _advance(state: State, flight: InFlightLaunch, batch: PrefillBatch) -> None:
    """Advance a batch past the layers of a launch; share the pages of chunks that have passed
    all."""
    work = flight.launch.work
    first, last = (work.first, work.last) if isinstance(work, PrefillSlice) else (0, state.layers)
    batch.layers_done = last
    if last == state.layers:
        state.launched.remove(batch)
        for chunk in batch.chunks:
            if not chunk.final:
                state.kv.share(chunk.allocation, chunk.request.tokens, chunk.start + chunk.n)
            state.kv.slide(chunk.allocation, chunk.start + chunk.n)
        named = {id(allocation) for _, allocation in flight.rows}
        for chunk in batch.members:  # a request that ended with its first token leaves a snapshot
            if id(chunk.allocation) in named:
                state.kv.saved(chunk.allocation, chunk.start + chunk.n)
    computed = PromptWork().plus(batch.work, (last - first) / state.layers)
    state.counters.note_prompts(flight.ticket.seconds, computed)


def learn(state: State) -> None:
    """Let the estimator learn from the reaped launches. `reap` leaves that out: tokens come
    first."""
    for flight in state.unobserved:
        _observe(state, flight)
    state.unobserved.clear()


def _observe(state: State, flight: InFlightLaunch) -> None:
    """Let the estimator learn from a launch.

    An estimator that promises bounds predicts device time: profiles leave out launches that may
    have waited for the host, and learning from such launches would lengthen all predictions.
    """
    shape, seconds = flight.shape, flight.ticket.seconds
    if flight.ticket.waited and state.estimator.promises:
        return
    try:
        corunner = corunner_during(state, flight)
    except PartialOverlap:
        return
    if shape.kind == "decode":
        steps = flight.ticket.steps
        seconds /= len(steps)
        if (experts_read := steps[0].experts_read) is not None:
            state.estimator.observe_experts(shape.load.requests, experts_read)
    state.estimator.observe(shape, flight.launch.units, seconds, corunner)


def _trace(state: State, flight: InFlightLaunch) -> None:
    ticket, work = flight.ticket, flight.launch.work
    assert ticket.start is not None
    assert ticket.end is not None
    state.trace.launch(
        ticket.lane,
        _name(flight),
        ticket.start,
        ticket.end,
        units=ticket.units,
        work=type(work).__name__,
        requests=[request.id for request, _ in flight.rows],
        tokens=flight.shape.load.new,
        context=flight.shape.load.reused,
        predicted=flight.predicted,
        waited=ticket.start - flight.launched_at,
        launching=ticket.host_seconds,
        reason=flight.reason,
    )


def _name(flight: InFlightLaunch) -> str:
    work = flight.launch.work
    if isinstance(work, PrefillSlice):
        return f"layers {work.first}:{work.last}"
    if isinstance(work, DecodeSteps):
        return f"decode x{len(flight.ticket.steps)}"
    return "hybrid"


def _launched(state: State, flight: InFlightLaunch) -> Launched:
    ticket, work, batch = flight.ticket, flight.launch.work, flight.batch
    assert ticket.start is not None
    assert ticket.end is not None
    chunks = {id(chunk.allocation) for chunk in batch.members} if batch is not None else ()
    prompts = [request.id for request, allocation in flight.rows if id(allocation) in chunks]
    layers = (0, state.layers if prompts else 0)
    if isinstance(work, PrefillSlice):
        layers = (work.first, work.last)
    return Launched(
        lane=ticket.lane,
        units=ticket.units,
        start=ticket.start,
        end=ticket.end,
        layers=layers,
        prompts=prompts,
        new=flight.shape.load.new,
        reused=flight.shape.load.reused,
        decoding=len(flight.rows) - len(prompts),
        steps=0 if isinstance(work, PrefillSlice) else len(ticket.steps),
        predicted=flight.predicted,
        reason=flight.reason,
    )
