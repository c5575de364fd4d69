"""Waiting for a replica that may be lost meanwhile."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import aiohttp

T = TypeVar("T")


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
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ReplicaLost("it does not answer any more")
    except aiohttp.ClientConnectorError as error:
        raise ReplicaUnreachable(str(error)) from error
    except aiohttp.ClientPayloadError as error:  # whose message is of chunks and lengths
        raise ReplicaLost("its connection ended within the answer") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ReplicaLost(str(error) or type(error).__name__) from error
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
