"""Accounting of each request: its place in the queue, its metrics and its traces."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from twolane.engine.messages import Output, Refused
from twolane.frontend.engine_client import EngineGone, Event
from twolane.frontend.prepare import Prepared
from twolane.server.http.calls import Call
from twolane.server.service.admission import Admission
from twolane.server.service.availability import Availability

log = logging.getLogger("twolane.server")


class AdmissionObserver(Protocol):
    """Counts what is admitted."""

    def count_adapter(self, name: str, requests: int) -> None:
        """Count requests that an adapter answers."""


class TracedRequest(Protocol):
    """The trace of a request in progress."""

    def tokens(self, count: int, now: float, cached: int | None) -> None:
        """See `Observer.tokens`."""

    def ended(self, event: Event | None, outcome: str, now: float) -> None:
        """Handle the request's last event, and its outcome as the metrics call it."""


class Tracer(Protocol):
    """Traces requests."""

    def begin(
        self, headers: Mapping[str, str], arrival: float, attributes: Mapping[str, Any]
    ) -> TracedRequest:
        """Begin the trace of a request.

        Args:
            headers: HTTP headers of the request's call.
            arrival: time of arrival in seconds on the monotonic clock.
            attributes: attributes of the request's span.
        """


class RequestAccounting:
    """Keeps admission, metrics and traces of the prompts of one request.

    Invariant: each prompt leaves the queue once and ends once in the metrics.

    Args:
        admission: the queue, in which each prompt has a place.
        availability: tells why a request is broken off.
        prompts: tokens of each prompt, once for each answer to it.
        call: the HTTP call, which is admitted here.
        traces: one for each prompt; empty: nothing is traced.
    """

    def __init__(
        self,
        admission: Admission,
        availability: Availability,
        prompts: Sequence[list[int]],
        call: Call,
        traces: Sequence[TracedRequest] = (),
    ) -> None:
        self._admission = admission
        self._availability = availability
        self._traces = traces
        self._metrics = call.admit(prompts)
        self._queued = [True] * len(prompts)
        self._lengths = [len(prompt) for prompt in prompts]
        self._arrival, self._key = call.arrival, call.key
        self.on_first: Callable[[float | None], None] | None = None
        """Is told the time of each first token; None: it does not come."""

    def tokens(
        self, index: int, count: int, now: float, cached: int | None, due: float | None
    ) -> None:
        """See `Observer.tokens`."""
        if self._queued[index]:
            self._leave(index, now, served=True)
        self._metrics[index].tokens(count, now, cached, due)
        if self._traces:
            self._traces[index].tokens(count, now, cached)

    def ended(self, index: int, event: Event | None, now: float) -> None:
        """See `Observer.ended`."""
        self._leave(index, now, served=False)
        metrics = self._metrics[index]
        outcome: str
        match event:
            case Output(finish="stop" | "length" as outcome):
                metrics.finish(outcome, now, event.times)
            case Refused(code="broken", message=message):
                outcome = "model"
                metrics.fail(outcome)
                log.warning("a prompt of %d tokens failed: %s", self._lengths[index], message)
            case Refused(code=outcome, message=message):
                metrics.refuse(outcome, message, overload=outcome == "refused")
            case Output() | EngineGone():
                outcome = "shutdown" if self._availability.draining else "engine"
                metrics.fail(outcome)
            case None:
                outcome = "disconnect"
                metrics.give_up(outcome, now)
        if self._traces:
            self._traces[index].ended(event, outcome, now)
        log.debug(
            "%d prompt tokens: %s after %.3f s", self._lengths[index], outcome, now - self._arrival
        )

    def _leave(self, index: int, now: float, *, served: bool) -> None:
        if self._queued[index]:
            self._queued[index] = False
            if self.on_first is not None:
                self.on_first(now if served else None)
            self._admission.leave(served=served, key=self._key, tokens=self._lengths[index])


def begin_traces(
    tracer: Tracer, prepared: Prepared, model_name: str, prompts: Sequence[list[int]], call: Call
) -> Sequence[TracedRequest]:
    """Begin the trace of each answer.

    Args:
        tracer: traces them.
        prepared: the request.
        model_name: the name of the model or adapter that answers.
        prompts: tokens of each prompt, once for each answer to it.
        call: the HTTP call.
    """
    same = span_attributes(prepared, model_name)
    lengths = [{"gen_ai.usage.input_tokens": len(prompt)} for prompt in prompts]
    return [tracer.begin(call.headers, call.arrival, {**same, **each}) for each in lengths]


def span_attributes(
    prepared: Prepared, model_name: str
) -> dict[str, str | int | float | bool | list[str]]:
    """Return a request's parameters under OpenTelemetry's names, without those that are not set."""
    request, params = prepared.request, prepared.params
    chat = request.conversation is not None
    attributes = {
        "operation.name": "chat" if chat else "text_completion",
        "provider.name": "twolane",
        "request.model": model_name,
        "response.model": model_name,
        "request.choice.count": request.n if request.n > 1 else None,
        "request.stream": request.stream,
        "request.max_tokens": params.max_tokens,
        "request.temperature": params.temperature,
        "request.top_p": params.top_p,
        "request.top_k": params.top_k if params.top_k > 0 else None,
        "request.seed": params.seed,
        "request.frequency_penalty": params.frequency_penalty,
        "request.presence_penalty": params.presence_penalty,
        "request.stop_sequences": list(request.text.stop) or None,
    }
    return {f"gen_ai.{name}": value for name, value in attributes.items() if value is not None}
