"""Large bodies are judged in a process of their own before they are parsed here.

Parsing holds Python's lock, and no stream goes on meanwhile. What is refused costs the API process
nothing; what is accepted has few enough parts to be parsed by it in some milliseconds.
"""

from collections.abc import Sequence

import msgspec
from pydantic import BaseModel

from twolane.frontend.body import IGNORED
from twolane.frontend.fence import LONG_WORK_NICENESS, Crowded, Fence, FenceError, Limits
from twolane.server.http.errors import ApiError, crowded
from twolane.server.http.gate import CLIENT

LARGE_BODY = 1 << 16
"""Bodies of this many bytes and more are judged: smaller ones take at most some milliseconds."""
IGNORING = " ignoring"
"""Behind the name of a model whose unknown fields have no effect."""
MODULE = "twolane.server.http.judging"
LIMITS = Limits(seconds=10.0, memory=1 << 30)


class BodyRefusal(msgspec.Struct, frozen=True):
    """Why a body is refused: the arguments of `ApiError`."""

    status: int
    message: str
    code: str
    param: str | None


class Judge:
    """Judges bodies, those of all clients in turn. Its process starts with the first of them."""

    def __init__(self) -> None:
        self._fence = Fence(MODULE, b"", LIMITS)
        self._lane = self._fence.lane(LONG_WORK_NICENESS)
        self._closed = False

    async def check(self, model: type[BaseModel], body: Sequence[bytes]) -> None:
        """Refuse a body that is no JSON, does not fit the model, or has too many values.

        Raises:
            ApiError: 400 or 413 for such a body, 429 when too many wait, 503.
        """
        unknown = "" if IGNORED.get() is None else IGNORING
        name = f"{model.__module__}:{model.__qualname__}{unknown}\n".encode()
        try:
            said = await self._lane.run([name, *body], CLIENT.get())
        except Crowded as error:
            raise crowded("large bodies wait to be read") from error
        except (FenceError, OSError, EOFError) as error:
            if self._closed:
                message = "the server is shutting down"
                raise ApiError(503, message, code="unavailable") from error
            raise ApiError(413, f"reading the body: {error}", code="body_too_large") from error
        refusal = msgspec.msgpack.decode(said, type=BodyRefusal | None)
        if refusal is not None:
            raise ApiError(refusal.status, refusal.message, code=refusal.code, param=refusal.param)

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        await self._fence.close()
