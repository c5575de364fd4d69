"""Events of a request that have not been read yet."""

import asyncio
import sys
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from twolane.frontend.text.output_reader import Delta

T = TypeVar("T")


def ignore_growth(_: int) -> None:
    """Do nothing."""


class Backlog(Generic[T]):
    """A queue of the deltas and other events of a request.

    Deltas that wait after others are encoded: a reader that falls behind holds a fraction of the
    memory that their objects would take, and how much it holds is known.
    """

    def __init__(self) -> None:
        self.held = 0
        """Bytes of the encoded deltas in the queue."""
        self.on_growth: Callable[[int], None] = ignore_growth
        """Called with the bytes that a delta adds to `held`."""
        self._events: asyncio.Queue[bytes | Delta | T] = asyncio.Queue()

    @property
    def empty(self) -> bool:
        """Whether the queue is empty."""
        return self._events.empty()

    def put(self, event: Delta | T) -> None:
        """Add an event."""
        if self._events.empty() or not isinstance(event, Delta):
            self._events.put_nowait(event)
            return
        packed = msgspec.msgpack.encode(event)
        self._events.put_nowait(packed)
        size = sys.getsizeof(packed)
        self.held += size
        self.on_growth(size)

    async def take(self) -> Delta | T:
        """Return the next event when there is one."""
        event = await self._events.get()
        if not isinstance(event, bytes):
            return event
        self.held -= sys.getsizeof(event)
        return msgspec.msgpack.decode(event, type=Delta)
