"""Work for clients that may disconnect before it is done."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for `work`, but give it up when the client closes the connection.

    Raises:
        ClientGone: it did.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (watching, working):
            task.cancel()
            task.add_done_callback(_forget)
        # Awaiting each would take a cancellation of the caller for the task's own.
        await asyncio.wait({watching, working})


def _forget(task: asyncio.Future[Any]) -> None:
    """Retrieve a task's exception, which nobody asks for."""
    if not task.cancelled():
        task.exception()
