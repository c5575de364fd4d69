"""A timer of an event loop with a resolution of microseconds.

An event loop on Linux sleeps whole milliseconds. Polling through the rest of a wait takes a core.
"""

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

ABSOLUTE = 1
"""Flag of `timerfd_settime` (TFD_TIMER_ABSTIME): the time is on the timer's clock."""
NANOSECONDS = 1_000_000_000


class PreciseTimer:
    """One time at which an event loop calls back.

    Args:
        loop: the event loop.
        callback: called on the loop when the time has come.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._file: int | None = None
        """Descriptor of the kernel's timer (timerfd_create(2)), made when it is first needed."""
        self._set = False
        """Whether the time is still to come, for all that is known."""
        self._handle: asyncio.TimerHandle | None = None
        """The loop's own timer, on systems whose loops do not round."""

    def set(self, at: float) -> None:
        """Call back at a time on the loop's clock, in seconds, instead of the one set before."""
        if sys.platform != "linux":
            self._cancel()
            self._handle = self._loop.call_at(at, self._callback)
            return
        self._set = True
        if self._file is None:
            self._file = libc_call("timerfd_create", 1, os.O_NONBLOCK | os.O_CLOEXEC)  # monotonic
            self._loop.add_reader(self._file, self._ring)
        seconds, rest = divmod(max(1, int(at * NANOSECONDS)), NANOSECONDS)
        libc_call("timerfd_settime", self._file, ABSOLUTE, TimerSpec(0, 0, seconds, rest), None)

    def close(self) -> None:
        """Free the timer; nothing is called back any more."""
        self._cancel()
        if self._file is not None:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = None

    def _cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _ring(self) -> None:
        self._set = False
        self._callback()
        if not self._set and self._file is not None:  # a timer that is set again tells no more
            with contextlib.suppress(BlockingIOError):
                os.read(self._file, 8)


TimerSpec = ctypes.c_long * 4
"""Type of `struct itimerspec`: seconds and nanoseconds of the interval and of the time."""
libc = ctypes.CDLL(None, use_errno=True)


def libc_call(name: str, *arguments: object) -> int:
    """Return the result of a function of the C library.

    Raises:
        OSError: the function failed.
    """
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")
    return result
