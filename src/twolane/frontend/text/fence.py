"""Bounds for programs that come with a model: in time, and for failures of native libraries."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TookTooLong(BaseException):
    """A program that came with a model did not end within its time.

    No `Exception`: whoever tries several things after each other shall not go on.
    """


def within(seconds: float, work: Callable[[], T]) -> T:
    """Run Python code in this thread, and break it off when it takes longer than `seconds`.

    A call into a native library is broken off only when it returns.

    Raises:
        TookTooLong: it was broken off.
    """
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def break_off() -> None:
        with lock:
            if not over:
                raise_in(thread, TookTooLong)

    alarm = threading.Timer(seconds, break_off)
    alarm.daemon = True
    alarm.start()
    try:
        return work()
    finally:
        with lock:
            over = True
            raise_in(thread, None)  # what has been raised in it since, and has not arrived
        alarm.cancel()


def raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in another thread at its next step of Python; None takes it back."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
