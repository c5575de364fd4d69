"""Latency bounds in a request's headers."""

import sys
from collections.abc import Mapping
from typing import Annotated

from fastapi import Depends, Header, Request
from pydantic import TypeAdapter

from twolane.server.http.calls import Call, call_of
from twolane.slo import Slo

TTFT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
"""Headers with a bound in milliseconds on the time to the first token."""
Milliseconds = Annotated[float | None, Header(gt=0, allow_inf_nan=False)]
_MILLISECONDS: TypeAdapter[float | None] = TypeAdapter(Milliseconds)


async def bounded_call(
    request: Request,
    x_slo_ttft_ms: Milliseconds = None,
    x_slo_tbt_ms: Milliseconds = None,
    x_slo_tpot_ms: Milliseconds = None,
    x_llm_d_slo_ttft_ms: Milliseconds = None,
    x_llm_d_slo_tpot_ms: Milliseconds = None,
) -> Call:
    """Return a request's call with the latency bounds of its headers.

    llm-d and the gateway API inference extension send TTFT and TPOT by the names with and without
    `llm-d`; where a request has both, the tighter bound holds.
    """
    call = call_of(request)
    own = Slo(
        ttft=tighter(x_slo_ttft_ms, x_llm_d_slo_ttft_ms),
        tbt=tighter(x_slo_tbt_ms),
        tpot=tighter(x_slo_tpot_ms, x_llm_d_slo_tpot_ms),
    )
    call.slo = own.over(call.slo)
    call.headers = request.headers
    return call


BoundedCall = Annotated[Call, Depends(bounded_call)]


def names_ttft(data: bytes) -> bool:
    """Return whether the head of a request that some bytes begin with has a bound on TTFT."""
    return b"slo-ttft-ms:" in data[: data.find(b"\r\n\r\n")].lower()


def ttft_of(headers: Mapping[str, str]) -> float | None:
    """Return the bound in seconds on the time to the first token; None: there is none.

    Raises:
        ValueError: a header is wrong, as `bounded_call` would say.
    """
    named = (headers.get(name) for name in TTFT_HEADERS)
    return tighter(*(_MILLISECONDS.validate_python(text) for text in named))


def tighter(*milliseconds: float | None) -> float | None:
    """Return the tightest of the given bounds in seconds, above 0; None: none is given."""
    present = [value for value in milliseconds if value is not None]
    return max(min(present) / 1e3, sys.float_info.min) if present else None
