"""Refuses requests whose first token would come too late, before they wait.

Whatever the system, a server that takes all requests serves each of them late once more arrive than
it can compute. The guard predicts the first token from the work that waits and from the pace that
the engine measures, and corrects the prediction by what first tokens took.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from twolane.engine.prompt_work import PromptWork
from twolane.frontend.engine_client import EngineClient
from twolane.frontend.prepare import Prepared
from twolane.router.correction import TtftCorrection
from twolane.server.http.calls import Call
from twolane.server.http.errors import ApiError
from twolane.server.http.slo_headers import TTFT_HEADERS, tighter
from twolane.server.service.admission import Admission
from twolane.slo import Slo


class Expected(NamedTuple):
    """A predicted first token."""

    seconds: float
    """Predicted seconds, without the correction."""
    bound: float
    """Seconds within which it is wanted."""
    at: float
    """Time of the prediction, in seconds on the monotonic clock."""


class LateGuard:
    """Predicts first tokens and refuses requests with a TTFT bound that would miss it.

    While nothing waits, nothing is refused: a prompt that cannot be in time even alone is served
    then.

    Args:
        engine: a running engine.
        admission: the requests that wait.
        on: Whether requests are refused; if not, only the correction is learnt.
    """

    def __init__(self, engine: EngineClient, admission: Admission, *, on: bool) -> None:
        self._engine, self._admission, self._on = engine, admission, on
        self._correction = TtftCorrection()

    def check_arrival(self, headers: Mapping[str, str], call: Call, key: int | None) -> None:
        """Refuse a request by its headers alone if the queue decides, before its body is read.

        Raises:
            ApiError: 429.
        """
        length = headers.get("content-length")
        if length is None or not self._watches:
            return
        with contextlib.suppress(ValueError):  # the endpoint says what is wrong
            named = [headers.get(name) for name in TTFT_HEADERS]
            own = Slo(ttft=tighter(*(float(text) for text in named if text is not None)))
            # No prompt has more tokens than its body has bytes.
            bound = own.over(call.slo).first_token(int(length))
            if bound is not None and (wait := self._wait(key, 0)) * self._correction.factor > bound:
                raise self._late(wait, bound)

    def check(
        self, prepared: Prepared, call: Call, reused: Callable[[list[int]], int]
    ) -> Expected | None:
        """Return when a request's first token is expected; None: it has no bound, or the pace is
        not known.

        Args:
            prepared: the request.
            call: the HTTP call, with its latency bounds.
            reused: Returns how many tokens of a prompt the prefix cache has.

        Raises:
            ApiError: 429, it would be late.
        """
        now, lengths = time.monotonic(), [len(tokens) for tokens in prepared.tokens]
        expected = self._expected(lengths, [0] * len(lengths), call, now)
        if expected is not None and self._watches and self._is_late(expected):
            cached = [reused(tokens) for tokens in prepared.tokens]
            expected = self._expected(lengths, cached, call, now)
            assert expected is not None
            if self._is_late(expected):
                raise self._late(expected.seconds, expected.bound)
        return expected

    def note(self, expected: Expected, now: float) -> None:
        """Learn from a first token that came at `now`."""
        self._correction.note(expected.seconds, expected.at, now, expected.bound)

    @property
    def _watches(self) -> bool:
        return self._on and self._admission.waiting > 0

    def _wait(self, key: int | None, tokens: int) -> float:
        """Return the predicted seconds of the work that is served before `tokens` more of a key."""
        share = self._admission.share_before(key, tokens)
        return share * self._engine.stats.prompt_pace.seconds(self._engine.queued())

    def _expected(
        self, lengths: Sequence[int], reused: Sequence[int], call: Call, now: float
    ) -> Expected | None:
        pace, own = self._engine.stats.prompt_pace, PromptWork()
        for length, cached in zip(lengths, reused, strict=True):
            own = own.plus(PromptWork.of(max(1, length - cached), cached))
        new = max(length - cached for length, cached in zip(lengths, reused, strict=True))
        bound = call.slo.first_token(max(1, new))
        if bound is None or not pace:
            return None
        seconds = self._wait(call.key, sum(lengths)) + pace.seconds(own)
        return Expected(seconds, max(0.0, bound - (now - call.arrival)), now)

    def _is_late(self, expected: Expected) -> bool:
        return self._correction.factor * expected.seconds > expected.bound

    def _late(self, seconds: float, bound: float) -> ApiError:
        seconds *= self._correction.factor
        return ApiError(
            429,
            f"overloaded: the first token would come after {seconds:.2f} s by prediction; "
            f"it is wanted within {bound:.2f} s",
            code="overloaded",
            headers={"Retry-After": str(self._admission.retry_after())},
        )
