"""Checks large request bodies in a sandbox before the API process parses them.

Parsing holds Python's lock, and no stream goes on meanwhile. A refused body costs the API process
nothing; an accepted one has few enough parts to be parsed in some milliseconds.
"""

from collections.abc import Sequence

import msgspec
from pydantic import BaseModel

from twolane.frontend import sandbox
from twolane.frontend.body import IGNORED
from twolane.server.http.errors import ApiError, queue_full, worker_lost
from twolane.server.http.gate import CLIENT

LARGE_BODY = 1 << 16
"""Bodies of at least this many bytes are checked first; smaller ones parse in a few
milliseconds."""
IGNORING = " ignoring"
"""Suffix of a model's name if unknown fields have no effect."""
MODULE = "twolane.server.http.body_check_worker"
LIMITS = sandbox.Limits(seconds=10.0, memory=1 << 30)


class BodyRefusal(msgspec.Struct, frozen=True):
    """The refusal of a body, as arguments of `ApiError`."""

    status: int
    message: str
    code: str
    param: str | None


class BodyChecker:
    """Checks bodies, with clients in rotation, in a process that starts with the first body."""

    def __init__(self) -> None:
        self._sandbox = sandbox.Sandbox(MODULE, b"", LIMITS, "large bodies wait to be read")
        self._queue = self._sandbox.queue(sandbox.LONG_WORK_NICENESS)
        self._closed = False

    async def check(self, model: type[BaseModel], body: Sequence[bytes]) -> None:
        """Refuse a body that is not JSON, does not match the model, or has too many values.

        Raises:
            ApiError: 400 or 413 for such a body, 429 when too many wait, 503.
        """
        unknown = "" if IGNORED.get() is None else IGNORING
        name = f"{model.__module__}:{model.__qualname__}{unknown}\n".encode()
        try:
            reply = await self._queue.run([name, *body], CLIENT.get())
        except sandbox.QueueFull as error:
            raise queue_full(str(error)) from error
        except sandbox.WorkerLost as error:
            raise worker_lost(str(error)) from error
        except (sandbox.SandboxError, OSError, EOFError) as error:
            if self._closed:
                message = "the server is shutting down"
                raise ApiError(503, message, code="unavailable") from error
            raise ApiError(413, f"reading the body: {error}", code="body_too_large") from error
        refusal = msgspec.msgpack.decode(reply, type=BodyRefusal | None)
        if refusal is not None:
            raise ApiError(refusal.status, refusal.message, code=refusal.code, param=refusal.param)

    @property
    def problem(self) -> str | None:
        """See `Sandbox.problem`."""
        return self._sandbox.problem

    async def close(self) -> None:
        """Stop the process."""
        self._closed = True
        await self._sandbox.close()
