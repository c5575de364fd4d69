"""Life of an HTTP call, as metrics count it.

A *call* is one POST to a path that generates; a *request* is one answer that it asks for. A call
counts as one request when it arrives, and as many as it has answers once it is admitted, so that
at every moment

    requests_received = request_success + requests_refused + requests_aborted + requests_in_flight
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twolane.engine.messages import FinishReason, Times
from twolane.slo import Slo

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CLIENT_GONE = 499
"""Status, as in nginx, of a call whose client left before an answer."""


class CountedRequest(Protocol):
    """An admitted request in flight, until it ends. It ends once."""

    def tokens(self, count: int, now: float, cached: int | None, due: float | None = None) -> None:
        """Count tokens that arrived together.

        Args:
            count: number of new tokens.
            now: time of their arrival in seconds.
            cached: number of prompt tokens from the prefix cache, with the first tokens.
            due: time at which pacing wanted them delivered, in seconds; None: at once.
        """

    def finish(self, reason: FinishReason, now: float, times: Times | None) -> None:
        """Count a complete answer."""

    def refuse(self, reason: str, message: str, *, overload: bool) -> None:
        """Count a request that the engine refused; see `Call.refuse`."""

    def fail(self, reason: str) -> None:
        """Count a request that the server aborted."""

    def give_up(self, reason: str, now: float) -> None:
        """Count a request that its client aborted."""


class Call(Protocol):
    """A call that asks for answers. It is admitted, refused or aborted, once."""

    arrival: float
    """Time at which its last byte was read, in seconds."""
    headers: Mapping[str, str]
    """Its HTTP headers, once they are read."""
    key: int | None
    """Index of its API key; None: the server has no keys."""
    slo: Slo
    """Its latency bounds; the server's until its headers are read."""
    on_parsed: Callable[[], None]
    """Is called when its body has been parsed."""

    def admit(self, prompts: Sequence[list[int]]) -> Sequence[CountedRequest]:
        """Count the call as one request for each of `prompts`, given once for each answer; they end
        separately."""

    def refuse(self, reason: str, message: str, *, overload: bool) -> None:
        """Count the call as refused, unless it has ended.

        Args:
            reason: why, for a program.
            message: why, for a person.
            overload: true if a good request was refused, which misses its SLO.
        """

    def abort(self, reason: str) -> None:
        """Count the call as aborted, unless it has ended."""


class CallObserver(Protocol):
    """Counts the calls and HTTP requests of a server."""

    def begin_call(self) -> Call:
        """Count a call that arrives."""

    def count_http(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP request that has its status."""


def call_of(request: Request) -> Call:
    """Return the call that `CallMiddleware` made of a request."""
    call: Call = request.state.call
    return call


def set_key(scope: Scope, key: int | None) -> None:
    """Set the index of a request's API key; None: the server has no keys."""
    state = scope.setdefault("state", {})
    state["key"] = key
    if (call := state.get("call")) is not None:
        call.key = key


def key_of(request: Request) -> int | None:
    """Return the index of a request's API key; None: the server has no keys."""
    key: int | None = request.state.key
    return key


def set_reason(request: Request, code: str, message: str) -> None:
    """Set the reason of a request's refusal, which is otherwise its status."""
    request.state.reason = code, message


def set_refusal(state: dict[str, Any], status: int, code: str, message: str) -> None:
    """Record that the connection itself refused a request; the application only sees its client
    gone.

    No effect on a request that is settled.

    Args:
        state: the state of the request's ASGI scope.
        status: HTTP status of the answer.
        code: why, for a program.
        message: why, for a person.
    """
    state["refused"] = status, (code, message)


@dataclass(frozen=True, eq=False)
class CallMiddleware:
    """Outermost ASGI middleware: counts every HTTP request, and settles every call."""

    app: ASGIApp
    """The ASGI application that this one wraps."""
    observer: CallObserver
    """Counts requests and calls."""
    paths: Container[str]
    """Paths whose POSTs are calls."""
    quiet: Callable[[], Awaitable[None]]
    """Awaited before an arrived call is handled, so that due tokens leave first."""
    unread: Callable[[Scope], float] = lambda scope: 0.0
    """Returns the seconds for which the latest bytes of a request waited to be read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_call = scope["method"] == "POST" and scope["path"] in self.paths
        tracked = TrackedRequest(
            self.observer, self.observer.begin_call() if is_call else None, scope
        )
        receive = tracked.receiving(receive, self.quiet, self.unread)
        try:
            await self.app(scope, receive, tracked.sending(send))
        except asyncio.CancelledError:
            tracked.settle(503, broken_off="shutdown")
            raise
        finally:
            # An answer that was never begun: the client has left, or an error was not foreseen.
            tracked.settle(CLIENT_GONE if tracked.gone else 500)


class TrackedRequest:
    """An HTTP request in progress, counted before its status is sent, or else at its end."""

    def __init__(self, observer: CallObserver, call: Call | None, scope: Scope) -> None:
        self.gone = False
        self._observer = observer
        self._call = call
        self._scope = scope
        self._state = scope.setdefault("state", {})
        self._state["call"] = call
        self._settled = False

    def receiving(
        self,
        receive: Receive,
        quiet: Callable[[], Awaitable[None]],
        unread: Callable[[Scope], float],
    ) -> Receive:
        """Wrap `receive`: record when the body is complete, then await `quiet`; record whether the
        client left."""

        async def wrapped() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone = True
            elif self._call is not None and not message.get("more_body"):
                self._call.arrival = time.monotonic() - unread(self._scope)
                await quiet()
            return message

        return wrapped

    def sending(self, send: Send) -> Send:
        """Wrap `send`: settle the request when its status is known."""

        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.settle(message["status"])
            await send(message)

        return wrapped

    def settle(self, status: int, *, broken_off: str | None = None) -> None:
        """Count the request, once."""
        if self._settled:
            return
        self._settled = True
        if "refused" in self._state:
            status, self._state["reason"] = self._state["refused"]
        elif self.gone and status >= 400:
            status, broken_off = CLIENT_GONE, "disconnect"
        self._count(status)
        if self._call is None:
            return
        if broken_off is not None:
            self._call.abort(broken_off)
        elif status >= 400:
            reason, message = self._state.get("reason") or (f"http_{status}", "")
            self._call.refuse(reason, message, overload=status == 429 or status >= 500)

    def _count(self, status: int) -> None:
        """Count the request by method, endpoint and status; labels are never taken from unknown
        paths."""
        path = self._scope["path"]
        if self._call is not None:  # it may be refused before it is routed
            route = path
        elif "route" in self._scope:
            route = self._scope["route"].path
        else:  # FastAPI's own pages have an endpoint, no parameters, and no route here
            route = path if "endpoint" in self._scope else "none"
        method = self._scope["method"]
        method = method if method in METHODS else "OTHER"
        self._observer.count_http(method, route, status)
