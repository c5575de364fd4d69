"""An open-loop load client for servers with OpenAI's HTTP interface.

Requests are sent when they are due, whether or not earlier ones have been answered. Every request
that was sent ends in exactly one `Record`.
"""

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from twolane.bench.http import Clock, ConnectError, Connections, HTTPError
from twolane.bench.sse import Event, SSEParser
from twolane.common.checked_json import UNREADABLE
from twolane.results import record as outcomes
from twolane.results.record import Record

MAX_EVENT = 16 << 20
"""Bytes that one event of a stream may have: what waits for its end costs time and memory."""


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Return the number of prompt tokens from the server's prefix cache; None: not stated."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _StreamChunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


_decode_chunk = msgspec.json.Decoder(_StreamChunk).decode
_NO_DELTA = _Delta()


class StreamError(Exception):
    """An invalid answer of the server; `outcome` is the kind of failure."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class StreamedAnswer:
    """A streamed answer in progress.

    Which chunks carry a token? Those with text (or reasoning, or a tool call). A chunk that
    announces the role or only ends the stream does not. A chunk without text in between is a token
    that prints nothing, or half a character; before the first text it may as well be a sign of
    life, so there it counts only if the whole answer has no text: TTFT is never flattered.

    How many tokens has a chunk? As many as the count in its usage grows by, where the server sends
    one with each chunk; tokens without text count with the next chunk that has text.

    Args:
        on_first: Called with the time of the first chunk with text.
    """

    def __init__(self, on_first: Callable[[float], None] = lambda at: None) -> None:
        self.text: list[str] = []
        self.usage = _Usage()
        self.finished = False
        self.done_at: float | None = None
        """Time at which `[DONE]` came."""
        self._on_first = on_first
        self._last = 0.0
        self._times: list[tuple[float, int | None]] = []
        """Arrival of each chunk, and the output tokens up to it by its usage, if it has one."""
        self._silent: list[tuple[float, int | None]] = []

    def add(self, event: Event, now: float) -> None:
        """Add an event that arrived at `now`.

        Raises:
            StreamError: it is an error, or not a chunk of the API.
        """
        self._last = now
        if event.data.strip() == "[DONE]":
            self.done_at = now
            return
        if event.type == "error":
            raise StreamError(outcomes.STREAM_ERROR, event.data[:500])
        try:
            chunk = _decode_chunk(event.data)
        except UNREADABLE as error:
            problem = f"not a chunk of the API ({error}): {event.data[:200]}"
            raise StreamError(outcomes.MALFORMED, problem) from error
        if chunk.error is not None:
            raise StreamError(outcomes.STREAM_ERROR, event.data[:500])
        if chunk.usage is not None:
            self.usage = chunk.usage
        count = chunk.usage.completion_tokens if chunk.usage else None
        for choice in chunk.choices or ():
            self._choice(choice, now, count)

    def token_times(self) -> tuple[float, ...]:
        """Return arrival times of the chunks with tokens."""
        return tuple(at for at, _ in self._times or self._silent)

    def chunk_tokens(self) -> tuple[int, ...]:
        """Return the number of tokens in each of these chunks; empty: the server does not tell."""
        each = self._times or self._silent
        counts = [0, *(count for _, count in each if count is not None)]
        tokens = tuple(after - before for before, after in pairwise(counts))
        known = len(tokens) == len(each) and min(tokens, default=0) >= 0
        return tokens if known and any(tokens) else ()

    def end(self) -> float:
        """Check that the answer is complete; return the time of its last event.

        Raises:
            StreamError: it broke off, or there was no token in it.
        """
        if self.done_at is None and not self.finished:
            raise StreamError(outcomes.DISCONNECT, "the stream ended before the answer did")
        if not self.token_times():
            raise StreamError(outcomes.MALFORMED, "the answer has no token in it")
        return self._last if self.done_at is None else self.done_at

    def _choice(self, choice: _Choice, now: float, count: int | None) -> None:
        # Values of `finish_reason` with which servers end an answer that they gave up.
        if choice.finish_reason in ("abort", "error"):
            problem = f"the answer ended with finish_reason {choice.finish_reason}"
            raise StreamError(outcomes.STREAM_ERROR, problem)
        delta = choice.delta or _NO_DELTA
        text = choice.text or delta.content or delta.reasoning_content or delta.reasoning
        self.finished = self.finished or choice.finish_reason is not None
        if text or delta.tool_calls:
            if not self._times:
                self._on_first(now)
            self._times.append((now, count))
            self.text.append(text or "")
        elif choice.finish_reason is None and delta.role is None:
            (self._times or self._silent).append((now, count))
        elif choice.finish_reason is not None and not self.token_times():
            self._silent.append((now, count))


class Job(msgspec.Struct, frozen=True):
    """A request ready to send."""

    index: int
    arrival: float
    """Seconds after the start of the run."""
    prompt_tokens: int
    output_tokens: int
    body: bytes


class RunCounts:
    """Counts of a run in progress."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.sent = 0
        self.ok = 0
        self.failed = 0

    @property
    def running(self) -> int:
        """Number of requests that were sent and have not ended."""
        return self.sent - self.ok - self.failed

    def end(self, record: Record) -> None:
        """Count a request that has ended."""
        if record.ok:
            self.ok += 1
        else:
            self.failed += 1


class Client:
    """Sends requests to one endpoint of one server. Use as `async with`.

    Args:
        url: the endpoint.
        headers: sent with each request.
        timeout: seconds that one request may take from sending to its last event.
        clock: Clock of the timestamps, in monotonic seconds.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout: float, clock: Clock = time.perf_counter
    ) -> None:
        self._connections = Connections(url, {"Content-Type": "application/json", **headers}, clock)
        self._timeout = timeout
        self.clock = clock

    async def __aenter__(self) -> "Client":
        _raise_open_files()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connections.close()

    async def send(
        self,
        job: Job,
        start: float,
        scheduled: float,
        waited: float,
        on_first: Callable[[int, float], None] = lambda index, ttft: None,
    ) -> Record:
        """Send one request now and record its outcome.

        `start` is the clock at the start of the run; the record counts from there. A cancelled
        send returns a record too, with the outcome `interrupted`. `on_first`: see `LoadRun`.
        """
        sent = self.clock()
        answer = StreamedAnswer(lambda at: on_first(job.index, at - sent))
        outcome, error = outcomes.OK, ""
        try:
            await self._exchange(job.body, answer)
            ended = answer.end()
        except StreamError as failure:
            outcome, error, ended = failure.outcome, str(failure), self.clock()
        except TimeoutError:
            outcome, error = outcomes.TIMEOUT, f"no whole answer in {self._timeout:g} s"
            ended = self.clock()
        except ConnectError as failure:
            outcome, error, ended = outcomes.CONNECT, str(failure), self.clock()
        except HTTPError as failure:
            outcome, error, ended = outcomes.DISCONNECT, str(failure), self.clock()
        except asyncio.CancelledError:
            outcome, error, ended = outcomes.INTERRUPTED, "the run was stopped", self.clock()
        return Record(
            index=job.index,
            asked_prompt=job.prompt_tokens,
            asked_output=job.output_tokens,
            scheduled=scheduled,
            waited=waited,
            sent=sent - start,
            ended=ended - start,
            outcome=outcome,
            error=error,
            token_times=tuple(at - start for at in answer.token_times()),
            chunk_tokens=answer.chunk_tokens(),
            usage_prompt=answer.usage.prompt_tokens or None,
            usage_output=answer.usage.completion_tokens or None,
            usage_cached=answer.usage.cached_tokens,
            text="".join(answer.text),
        )

    async def _exchange(self, body: bytes, answer: StreamedAnswer) -> None:
        reply = _Reply(answer)
        try:
            async with asyncio.timeout(self._timeout) as reply.deadline:
                await self._connections.request(body, reply)
        except TimeoutError:
            if answer.done_at is None:
                raise
        except HTTPError:
            if answer.done_at is None and not reply.refused:
                raise
        reply.check()


class _Reply:
    """Receives the server's answer to one request: a `Receiver`."""

    def __init__(self, answer: StreamedAnswer) -> None:
        self.deadline: asyncio.Timeout
        self._answer = answer
        self._parser = SSEParser()
        self._status = 200
        self._refusal = b""
        self._draining = False

    @property
    def refused(self) -> bool:
        """Whether the answer is an error."""
        return self._status != 200

    def on_head(self, status: int, content_type: str) -> None:
        self._status = status
        if status == 200 and content_type != "text/event-stream":
            problem = f"answered with {content_type}, not a stream of events"
            raise StreamError(outcomes.MALFORMED, problem)

    def on_data(self, data: bytes, now: float) -> None:
        if self.refused:
            # Bytes of an error answer that are kept to be shown.
            self._refusal = (self._refusal + data)[:500]
            return
        for event in self._parser.feed(data):
            self._answer.add(event, now)
        if self._parser.held > MAX_EVENT:
            problem = f"an event has more than {MAX_EVENT >> 20} MiB"
            raise StreamError(outcomes.MALFORMED, problem)
        if self._answer.done_at is not None:
            self._drain()

    def on_end(self, now: float) -> None:
        for event in self._parser.close():
            self._answer.add(event, now)

    def check(self) -> None:
        """Raise the server's error, if it sent one."""
        if self.refused:
            text = self._refusal.decode("utf-8", "replace")
            raise StreamError(outcomes.status_outcome(self._status), text)

    def _drain(self) -> None:
        """Read to the end so that the connection can be reused, but do not wait for a server that
        leaves it open."""
        if not self._draining:
            self._draining = True
            # Seconds for which the end of an answer is awaited so that its connection can be used
            # again.
            drained = asyncio.get_running_loop().time() + 1.0
            self.deadline.reschedule(min(drained, self.deadline.when() or drained))


def _raise_open_files() -> None:
    """Raise the limit on open files, since every running request has a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class LoopLag:
    """Measures the lag of the client's event loop, which is the error of its timestamps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._due = 0.0
        self._next: asyncio.TimerHandle

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Measure within the block."""
        self._schedule()
        try:
            yield
        finally:
            self._next.cancel()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        # Seconds between two measurements of the event loop's lag.
        self._due = loop.time() + 0.01
        self._next = loop.call_at(self._due, self._probe)

    def _probe(self) -> None:
        self.seconds.append(max(0.0, asyncio.get_running_loop().time() - self._due))
        self._schedule()


class LoadRun:
    """One pass of a workload over a client.

    Args:
        jobs: The jobs, in order of arrival.
        max_concurrency: requests in flight at once; the others wait their turn. None: no bound.
        on_change: called with the tally whenever it changes.
        on_record: called with each outcome as it comes.
        on_first: called with a request's index and its TTFT in seconds when its first text comes.
        on_sent: Called with a request's index when it is sent.
    """

    def __init__(
        self,
        client: Client,
        jobs: Sequence[Job],
        *,
        max_concurrency: int | None = None,
        on_change: Callable[[RunCounts], None] = lambda tally: None,
        on_record: Callable[[Record], None] = lambda record: None,
        on_first: Callable[[int, float], None] = lambda index, ttft: None,
        on_sent: Callable[[int], None] = lambda index: None,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._slots = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
        self._on_change = on_change
        self._on_record = on_record
        self._on_first, self._on_sent = on_first, on_sent
        self._clock = client.clock
        self._tally = RunCounts(len(jobs))
        self._tasks: list[asyncio.Task[None]] = []
        self.records: list[Record] = []
        """Records of the requests sent, in order of their ends."""
        self.duration = 0.0
        self.loop_lag = LoopLag()
        self.lags: Sequence[float] = self.loop_lag.seconds
        """Seconds that the event loop was late, at each look."""

    async def run(self, stop: asyncio.Event, start: float | None = None) -> None:
        """Send everything and wait for the answers, or until `stop` is set.

        `start` is the client's clock at the start of the run; None: it starts now.

        A stopped run cancels what is in flight; what was not sent leaves no record. To close
        hundreds of streams takes the event loop a while, in which it measures nothing.
        """
        if stop.is_set():
            return
        start = self._clock() if start is None else start
        work = asyncio.create_task(self._send_all(start))
        stopped = asyncio.create_task(stop.wait())
        try:
            with self.loop_lag.watch():
                await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            stopped.cancel()
            for task in self._tasks:
                task.cancel()
            ends = await asyncio.gather(work, stopped, *self._tasks, return_exceptions=True)
            self.duration = self._clock() - start
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _send_all(self, start: float) -> None:
        for job in self._jobs:
            await asyncio.sleep(0)
            while (early := start + job.arrival - self._clock()) > 0:
                await asyncio.sleep(early)
            self._tasks.append(asyncio.create_task(self._send(job, start)))
        await asyncio.gather(*self._tasks)

    async def _send(self, job: Job, start: float) -> None:
        due = self._clock()
        async with self._slots:
            waited = self._clock() - due
            self._tally.sent += 1
            self._on_change(self._tally)
            self._on_sent(job.index)
            record = await self._client.send(job, start, job.arrival, waited, self._on_first)
        self.records.append(record)
        self._on_record(record)
        self._tally.end(record)
        self._on_change(self._tally)
