"""Waiting for a replica that may be lost meanwhile."""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import aiohttp

T = TypeVar("T")
SILENT = "it does not answer any more"
"""Why a replica is given up that its pool has found lost."""


class ReplicaLost(Exception):
    """A replica was lost while it answered, or before."""


class ReplicaUnreachable(ReplicaLost):
    """No connection to a replica, which has therefore not seen the request."""


async def unless_lost(lost: asyncio.Event, work: Awaitable[T]) -> T:
    """Wait for work of a replica unless the replica is lost.

    Args:
        lost: is set when nothing more can be expected of it.
        work: The replica's work to wait for.

    Raises:
        ReplicaLost: it failed, or is lost.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(lost.wait())
    try:
        with errors_of_replica():
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ReplicaLost(SILENT)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def end_when(lost: asyncio.Event, content: aiohttp.StreamReader) -> None:
    """End an answer with `ReplicaLost` for whoever reads it once its replica is lost."""
    await lost.wait()
    content.set_exception(ReplicaLost(SILENT))


@contextlib.contextmanager
def errors_of_replica() -> Iterator[None]:
    """Raise errors of a replica's connection as `ReplicaLost`."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise ReplicaUnreachable(str(error)) from error
    except aiohttp.ClientPayloadError as error:  # whose message is of chunks and lengths
        raise ReplicaLost("its connection ended within the answer") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ReplicaLost(str(error) or type(error).__name__) from error
