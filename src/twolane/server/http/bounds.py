"""The latency bounds that a request brings in its headers."""

import sys
from typing import Annotated

from fastapi import Depends, Header, Request

from twolane.server.http.calls import Call, call_of
from twolane.slo import Slo

Milliseconds = Annotated[float | None, Header(gt=0, allow_inf_nan=False)]


async def bounded_call(
    request: Request,
    x_slo_ttft_ms: Milliseconds = None,
    x_slo_tbt_ms: Milliseconds = None,
    x_slo_tpot_ms: Milliseconds = None,
) -> Call:
    """Return the call of a request, with what its headers say."""
    call = call_of(request)
    own = Slo(ttft=seconds(x_slo_ttft_ms), tbt=seconds(x_slo_tbt_ms), tpot=seconds(x_slo_tpot_ms))
    call.slo = own.over(call.slo)
    call.headers = request.headers
    return call


BoundedCall = Annotated[Call, Depends(bounded_call)]


def seconds(milliseconds: float | None) -> float | None:
    """Return seconds, which stay above 0."""
    return None if milliseconds is None else max(milliseconds / 1e3, sys.float_info.min)
