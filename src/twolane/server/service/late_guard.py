"""Refuses requests whose first token would come too late, before they wait.

Whatever the system, a server that takes all requests serves each of them late once more arrive than
it can compute. The guard predicts the first token from the work that waits and from the pace that
the engine measures, and corrects the prediction by what first tokens took. Where the system serves
prompts by deadline, only the work counts that is due earlier: what waits, and what is expected to
come.

To read a request takes several times as long as to refuse it by its headers, time that the engine
lacks on the same cores. So the guard learns from what the bodies of late requests came to, and
predicts most of the next ones by their length alone.
"""

import heapq
import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from twolane.engine.messages import Stats
from twolane.engine.prompt_work import PromptWork
from twolane.frontend.engine_client import EngineClient
from twolane.router.correction import TtftCorrection
from twolane.router.replica_queue import ReplicaQueue
from twolane.server.http.calls import Call
from twolane.server.http.errors import ApiError
from twolane.server.http.slo_headers import ttft_of
from twolane.server.service.admission import Admission
from twolane.slo import Slo

MIN_BODIES, MAX_BODIES = 8, 32
"""Bodies of a key from which the work of its next ones is predicted, and the most that count."""
READ_SECONDS = 0.25
"""Seconds after which a key's request that only the length of its body refuses is read all the
same, so that the prediction follows what the bodies hold. To read one takes about 3 ms."""
ARRIVING_SECONDS = 1.0
"""Seconds after which a body that is being read counts no more as work."""
OVERTAKING_SECONDS, OVERTAKING_REQUESTS = 10.0, 256
"""Seconds and requests of the past from which later ones are expected: the latest of them, as far
back as the shorter of both reaches."""
OVERTAKING_FRACTION = 0.75
"""Fraction of the work that is expected to come and be due earlier that counts. With all of it, the
guard refuses requests that are served in time at the highest rate that a server can hold."""


class OwnWork(NamedTuple):
    """What a request adds to the work before others."""

    at: float = 0.0
    """Time of the prediction, in seconds on the monotonic clock."""
    bound: float = 0.0
    """Seconds from its arrival within which its first token is wanted."""
    seconds: float = 0.0
    """Predicted seconds of its prefill."""


class Expected(NamedTuple):
    """A predicted first token."""

    seconds: float
    """Predicted seconds, without the correction."""
    bound: float
    """Seconds within which it is wanted."""
    at: float
    """Time of the prediction, in seconds on the monotonic clock."""
    own: OwnWork = OwnWork()
    overtaken: bool = False
    """Whether later requests are expected to go first."""


class Arriving(NamedTuple):
    """A request that its head has not refused and whose body is not known yet."""

    work: PromptWork
    """The least work that its body is expected to be."""
    at: float
    """Time of its arrival, in seconds on the monotonic clock."""


class ArrivingRequests:
    """The requests of one key that arrive, oldest first.

    Those that came more than `ARRIVING_SECONDS` ago are forgotten: some end without being known.
    """

    def __init__(self) -> None:
        self._each: dict[object, Arriving] = {}
        self._work = PromptWork()

    def add(self, request: object, work: PromptWork) -> None:
        """Add a request that arrives now."""
        self._forget_old()
        self._each[request] = Arriving(work, time.monotonic())
        self._work = self._work.plus(work)

    def take(self, request: object) -> None:
        """Remove a request, if it is still there."""
        if request in self._each:
            self._work = self._work.plus(self._each.pop(request).work, -1.0)

    def take_oldest(self) -> PromptWork | None:
        """Remove the oldest request and return its work; None: there is none."""
        if not self._each:
            return None
        request, (work, _) = next(iter(self._each.items()))
        self.take(request)
        return work

    @property
    def work(self) -> PromptWork:
        """The work of all of them."""
        self._forget_old()
        return self._work

    def _forget_old(self) -> None:
        oldest = time.monotonic() - ARRIVING_SECONDS
        while self._each and next(iter(self._each.values())).at < oldest:
            self.take_oldest()
        if not self._each:
            self._work = PromptWork()


class BodyWork:
    """Prefill work per byte of the bodies of one key's late requests."""

    def __init__(self) -> None:
        self._noted: deque[PromptWork] = deque(maxlen=MAX_BODIES)
        # Until bodies are known: a prompt has no more tokens than its body has bytes.
        self._range = PromptWork(), PromptWork(tokens=1.0)
        self.read_at = -math.inf
        """Time at which one was last read that its length refuses, in seconds."""

    @property
    def known(self) -> bool:
        """Whether there were enough bodies to predict the work of others."""
        return len(self._noted) >= MIN_BODIES

    def note(self, length: int, own: PromptWork) -> None:
        """Add a body of a length in bytes and the work of its prompts."""
        self._noted.append(PromptWork().plus(own, 1 / length))
        if self.known:
            ranked = sorted(self._noted, key=lambda work: work.tokens)
            self._range = ranked[0], ranked[-1]

    def range(self, length: int) -> Sequence[PromptWork]:
        """Return the least and the most work that a body of a length in bytes is expected to be."""
        return [PromptWork().plus(per_byte, length) for per_byte in self._range]


class LateGuard:
    """Predicts first tokens and refuses requests with a TTFT bound that would miss it.

    While nothing waits and no body is being read, nothing is refused: a prompt that cannot be in
    time even alone is served then.

    Args:
        engine: a running engine.
        admission: the requests that wait.
        on: Whether requests are refused; if not, only the correction is learnt.
    """

    def __init__(self, engine: EngineClient, admission: Admission, *, on: bool) -> None:
        self._engine, self._admission, self.on = engine, admission, on
        self._correction = TtftCorrection()
        self._bodies = defaultdict[int | None, BodyWork](BodyWork)
        """By API key."""
        self._awaited: dict[int, Expected] = {}
        """First tokens that are awaited and not overdue, by number."""
        self._due: list[tuple[float, int]] = []
        """Heap of their numbers by the time at which they are due."""
        self._numbers = itertools.count()
        self._early = defaultdict[int | None, ArrivingRequests](ArrivingRequests)
        """By API key, requests that `check_early` let pass and whose calls are not made yet."""
        self._reading = defaultdict[int | None, ArrivingRequests](ArrivingRequests)
        """By API key, calls whose bodies are being read."""
        self._line: tuple[Stats, ReplicaQueue] | None = None
        """What the queue by deadline was formed of, and the queue."""
        self._taken: deque[OwnWork] = deque(maxlen=OVERTAKING_REQUESTS)
        """The latest requests that were not refused, oldest first."""

    def check_early(
        self, headers: Mapping[str, str], slo: Slo, key: int | None, unread: float
    ) -> None:
        """Refuse a request as `check_head` does, before its call is made, or let it pass for
        `check_arrival`, too.

        Raises:
            ApiError: 429.
        """
        work = self._passed(self.check_head(headers, slo, key, unread), key)
        self._early[key].add(object(), work)

    def check_arrival(self, headers: Mapping[str, str], call: Call, key: int | None) -> None:
        """Refuse a request as `check_head` does, or count what its body is expected to be until
        `check` knows.

        Raises:
            ApiError: 429.
        """
        work = self._early[key].take_oldest()
        if work is None:
            work = self._passed(self.check_head(headers, call.slo, key), key)
        self._reading[key].add(call, work)

    def _passed(self, work: PromptWork | None, key: int | None) -> PromptWork:
        """Return the work that counts of a request of a key that `check_head` has not refused."""
        if work is None:
            self._bodies[key].read_at = time.monotonic()
        return work or PromptWork()

    def check_head(
        self, headers: Mapping[str, str], slo: Slo, key: int | None, unread: float = 0.0
    ) -> PromptWork | None:
        """Refuse a request by its headers, before its body is read, if it would be late whichever
        work its body is expected to be.

        Args:
            headers: Its headers.
            slo: The server's latency bounds.
            key: The index of its API key.
            unread: Seconds for which it waited to be read.

        Returns:
            The least work that its body is expected to be; None: it would be late, and is read to
            learn what such bodies are.

        Raises:
            ApiError: 429.
        """
        length = headers.get("content-length")
        if length is None or not self.on:
            return PromptWork()
        bodies, now = self._bodies[key], time.monotonic()
        try:
            own = Slo(ttft=ttft_of(headers)).over(slo)
            works = bodies.range(int(length))
        except ValueError:  # the endpoint says what is wrong
            return PromptWork()
        if own.ttft is None:
            return works[0]
        self._learn_from_overdue()
        before = self._early[key].work.plus(self._reading[key].work)
        arrival = now - unread
        if not (self.watches or before.tokens):
            return works[0]
        least, most = (
            self._expected(work.plus(before), int(work.tokens), int(work.tokens), key, own, arrival)
            for work in works
        )
        if least is None or most is None or not (self._is_late(least) and self._is_late(most)):
            return works[0]
        if not bodies.known or now < bodies.read_at + READ_SECONDS:
            raise self._late(least)
        return None

    def check(
        self, prompts: Sequence[list[int]], call: Call, reused: Callable[[list[int]], int]
    ) -> Expected | None:
        """Return when a request's first token is expected; None: it has no bound, or the pace is
        not known.

        Args:
            prompts: tokens of each prompt of the request.
            call: the HTTP call, with its latency bounds.
            reused: Returns how many tokens of a prompt the prefix cache has.

        Raises:
            ApiError: 429, it would be late.
        """
        self._reading[call.key].take(call)
        self._learn_from_overdue()
        expected = self._expected_of(prompts, call)
        if expected is not None and self.watches and self._is_late(expected):
            expected = self._expected_of(prompts, call, reused)
            assert expected is not None
            if self._is_late(expected):
                raise self._late(expected)
        if expected is not None:
            self._taken.append(expected.own)
        return expected

    def await_first(self, expected: Expected) -> Callable[[float | None], None]:
        """Return what is to be called at the time of the first token, or with None if none comes.

        A system may serve those last that are late already, so that their first tokens come long
        after others were admitted by the same prediction. The guard learns from them when they are
        overdue.
        """
        number = next(self._numbers)
        self._awaited[number] = expected
        heapq.heappush(self._due, (expected.at + expected.bound, number))
        return partial(self._ended, number)

    def _ended(self, number: int, now: float | None) -> None:
        expected = self._awaited.pop(number, None)
        if expected is not None and now is not None:
            self._learn(expected, now)

    def _learn_from_overdue(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, number = heapq.heappop(self._due)
            self._ended(number, due)

    def _learn(self, expected: Expected, now: float) -> None:
        predicted, bound, at, _, overtaken = expected
        self._correction.note(predicted, at, now, bound, overtaken=overtaken)

    @property
    def watches(self) -> bool:
        """Whether a request may be refused now, though none is being read."""
        return self.on and self._admission.waiting > 0

    def _before(self, due: float, now: float) -> float:
        """Return the predicted seconds of the waiting work that is due earlier than a time, on the
        monotonic clock; only of a system that gives prompts up, which serves by deadline."""
        stats, line = self._engine.stats, self._line
        assert stats.yielding is not None
        pace = stats.prompt_pace
        if line is None or line[0] is not stats:
            at, queued = self._engine.stats_at, stats.queued
            line = self._line = stats, ReplicaQueue.of(at, queued, stats.yielding, pace)
        # The engine has computed nothing yet of what it has not counted, however long it idled.
        uncounted = pace.seconds(self._engine.queued().plus(stats.queued, -1))
        return max(0.0, line[1].ahead(due).until - now) + uncounted

    def _overtaking(self, bound: float, left: float, now: float) -> float:
        """Return the seconds of the work that is expected to come later and be due earlier than a
        request whose bound is `bound` seconds, of which `left` are left."""
        taken = self._taken
        while taken and taken[0].at < now - OVERTAKING_SECONDS:
            taken.popleft()
        sooner = [each for each in taken if each.bound < min(bound, left)]
        full = len(taken) == OVERTAKING_REQUESTS
        seconds = max(now - taken[0].at, 0.001) if full else OVERTAKING_SECONDS
        work = sum((left - each.bound) * each.seconds for each in sooner)
        return OVERTAKING_FRACTION * work / seconds

    def _expected_of(
        self,
        prompts: Sequence[list[int]],
        call: Call,
        reused: Callable[[list[int]], int] | None = None,
    ) -> Expected | None:
        """Return when a request is expected; what the cache has of it counts only with `reused`."""
        own, longest = PromptWork(), 1
        for tokens in prompts:
            cached = reused(tokens) if reused is not None else 0
            own = own.plus(PromptWork.of(max(1, len(tokens) - cached), cached))
            longest = max(longest, len(tokens) - cached)
        whole = sum(map(len, prompts))
        if reused is not None and (length := int(call.headers.get("content-length", "0"))):
            self._bodies[call.key].note(length, own)
        return self._expected(own, whole, longest, call.key, call.slo, call.arrival)

    def _expected(
        self,
        own: PromptWork,
        tokens: int,
        longest: int,
        key: int | None,
        slo: Slo,
        arrival: float,
    ) -> Expected | None:
        """Return when a request is expected that arrived at a time.

        Args:
            own: Prefill work of its prompts.
            tokens: Tokens of its prompts, cached ones included.
            longest: New tokens of its longest prompt, which its bound depends on.
            key: The index of its API key.
            slo: Its latency bounds.
            arrival: Time of its arrival, in seconds on the monotonic clock.
        """
        pace, bound = self._engine.stats.prompt_pace, slo.first_token(max(1, longest))
        if bound is None or not pace:
            return None
        now = time.monotonic()
        left, overtaking, mine = arrival + bound - now, 0.0, OwnWork(now, bound, pace.seconds(own))
        if self._engine.stats.yielding is not None and self._admission.is_alone(key):
            overtaking = self._overtaking(bound, left, now)
            seconds = self._before(arrival + bound, now) + overtaking + mine.seconds
        else:  # several keys take turns, in which all that came before may be served first
            before = self._admission.share_before(key, tokens) * pace.seconds(self._engine.queued())
            seconds = before + mine.seconds
        return Expected(seconds, max(0.0, left), now, mine, overtaking > 0)

    def _is_late(self, expected: Expected) -> bool:
        return self._correction.factor * expected.seconds > expected.bound

    def _late(self, expected: Expected) -> ApiError:
        seconds = self._correction.factor * expected.seconds
        return ApiError(
            429,
            f"overloaded: the first token would come after {seconds:.2f} s by prediction; "
            f"it is wanted within {expected.bound:.2f} s",
            code="overloaded",
            headers={"Retry-After": str(self._admission.retry_after())},
        )
