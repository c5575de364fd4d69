"""Makes a workload from options: which requests are sent, their lengths and their arrival times.

The HTTP client and the simulator both use it.
"""

import math
from pathlib import Path
from typing import Annotated

import msgspec

from twolane.common.errors import FieldError
from twolane.common.files import is_file
from twolane.common.options import MAX_SEED, Option, check_ranges
from twolane.workload import traces
from twolane.workload.arrivals import arrivals
from twolane.workload.lengths import TABLES, LengthTable
from twolane.workload.papers import WORKLOADS, Single
from twolane.workload.sessions import Sessions
from twolane.workload.traces import TraceRequest

WHAT, WHEN = "Requests", "Arrivals"
"""Panels of options in the help."""
RANDOM = "random"
DRAWN: dict[str, LengthTable | Single | Sessions] = {**TABLES, **WORKLOADS}
"""Built-in workloads."""


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A workload as options describe it. Fields have the names of options of `twolane bench
    serve`."""

    dataset: Annotated[str, Option(WHAT)] = RANDOM
    """Workload: random (fixed lengths); azure-code, azure-conv, sharegpt, sharegpt-1k, loogle,
    openthoughts, conversation, toolagent or arxiv-sum (drawn; see `twolane bench workloads`); or a
    trace file: Azure CSV, Mooncake JSONL, either gzipped."""
    num_prompts: Annotated[int | None, Option(WHAT, positive=True)] = None
    """Number of requests; by default all of a trace, else 1000."""
    request_rate: Annotated[float | None, Option(WHEN, infinite=True, positive=True)] = None
    """Requests per second; inf sends all at once. By default the trace's own times, else inf."""
    burstiness: Annotated[float, Option(WHEN, infinite=True, positive=True)] = 1.0
    """Shape of the gaps between arrivals: 1 is Poisson, less is burstier, more is smoother, inf is
    evenly spaced."""
    seed: Annotated[int, Option(WHAT, least=0, most=MAX_SEED)] = 0
    """Seed of lengths, arrivals and prompts."""
    random_input_len: Annotated[int | None, Option(WHAT, "TOKENS", positive=True)] = None
    """Prompt tokens of each request of random; by default 1024."""
    random_output_len: Annotated[int | None, Option(WHAT, "TOKENS", positive=True)] = None
    """Output tokens of each request of random; by default 128."""
    trace_offset: Annotated[float | None, Option(WHEN, "SECONDS", least=0)] = None
    """Seconds of the trace to skip."""
    trace_duration: Annotated[float | None, Option(WHEN, "SECONDS", positive=True)] = None
    """Seconds of the trace to replay."""
    scale_rate: Annotated[float | None, Option(WHEN, positive=True)] = None
    """Factor on the speed at which the trace's own times are replayed."""
    continue_blocks: Annotated[bool, Option(WHAT)] = False
    """Whether the partial last block of a prompt begins the block with which the next turn of its
    conversation goes on; traces give both an id of their own, so that a turn shares whole blocks
    with the one before alone."""
    scale_lengths: Annotated[float | None, Option(WHAT, positive=True)] = None
    """Factor on all lengths, shared prefixes included."""
    max_input_len: Annotated[int | None, Option(WHAT, "TOKENS", positive=True)] = None
    """Number of tokens to which longer prompts are cut."""
    max_output_len: Annotated[int | None, Option(WHAT, "TOKENS", positive=True)] = None
    """Number of tokens to which longer replies are cut."""

    def build(self) -> list[TraceRequest]:
        """Return the requests with arrival times, in order of arrival.

        Raises:
            FieldError: an option is out of range or contradicts another.
            TraceError: the trace file is bad.
        """
        self.check()
        requests = self._adapt(self._select())
        if self.continue_blocks:
            requests = traces.continued(requests)
        if self._uses_trace_times(requests):
            return traces.scale_rate(requests, self.scale_rate or 1.0)
        self._check_untimed()
        rate = math.inf if self.request_rate is None else self.request_rate
        if math.isinf(rate) and self.burstiness != 1:
            raise FieldError("burstiness", "has no meaning when everything is sent at once")
        times = arrivals(len(requests), rate, burstiness=self.burstiness, seed=self.seed)
        return [
            msgspec.structs.replace(request, arrival=time)
            for request, time in zip(requests, times, strict=True)
        ]

    def check(self) -> None:
        """Check the settings before a trace is read.

        Raises:
            FieldError: naming the first wrong field.
        """
        check_ranges(self)
        self._check_dataset()

    def _select(self) -> list[TraceRequest]:
        # Default number of requests without a trace.
        count = 1000 if self.num_prompts is None else self.num_prompts
        if self.dataset == RANDOM:
            # Default prompt tokens of each request of `random`.
            prompt = self.random_input_len or 1024
            # Default output tokens of each request of `random`.
            output = self.random_output_len or 128
            return [TraceRequest(None, prompt, output)] * count
        if self.dataset in DRAWN:
            return DRAWN[self.dataset].draw(count, self.seed)
        requests = self._cut(self._read())
        if self.num_prompts is not None and self.num_prompts > len(requests):
            raise FieldError("num_prompts", f"is {self.num_prompts}, but there are {len(requests)}")
        return requests[: self.num_prompts]

    def _read(self) -> list[TraceRequest]:
        if not is_file(Path(self.dataset)):
            known = ", ".join([RANDOM, *DRAWN])
            raise FieldError("dataset", f"{self.dataset!r} is neither a file nor one of {known}")
        return traces.read_trace(self.dataset)

    def _cut(self, requests: list[TraceRequest]) -> list[TraceRequest]:
        if self.trace_offset is None and self.trace_duration is None:
            return requests
        if not traces.has_arrivals(requests):
            field = "trace_duration" if self.trace_offset is None else "trace_offset"
            raise FieldError(field, f"has no meaning: {self.dataset} has no arrival times")
        cut = traces.window(requests, self.trace_offset or 0.0, self.trace_duration)
        if not cut:
            raise FieldError(
                "trace_offset", "leaves a window in which no request of the trace arrives"
            )
        return cut

    def _adapt(self, requests: list[TraceRequest]) -> list[TraceRequest]:
        if self.scale_lengths is not None:
            requests = traces.scale_lengths(requests, self.scale_lengths)
        return traces.clip_lengths(requests, self.max_input_len, self.max_output_len)

    def _uses_trace_times(self, requests: list[TraceRequest]) -> bool:
        if not traces.has_arrivals(requests) or self.request_rate is not None:
            return False
        if self.burstiness != 1:
            raise FieldError("burstiness", "needs --request-rate: the trace has its own times")
        return True

    def _check_untimed(self) -> None:
        """Refuse settings of a trace that is replayed at its own times."""
        if self.scale_rate is not None:
            why = "has no arrival times" if self.request_rate is None else "is sent at a given rate"
            raise FieldError("scale_rate", f"scales a trace's own times, but {self.dataset} {why}")

    def _check_dataset(self) -> None:
        """Refuse settings without effect on this data set."""
        for field in ("random_input_len", "random_output_len"):
            if getattr(self, field) is not None and self.dataset != RANDOM:
                raise FieldError(field, f"needs --dataset random, not {self.dataset}")
        for field in ("trace_offset", "trace_duration"):
            if getattr(self, field) is not None and self.dataset in (RANDOM, *DRAWN):
                raise FieldError(field, f"has no meaning: {self.dataset} is not a trace file")
