"""What Linux says of a thread's time slice."""

import ctypes
import platform
import sys

import pytest

from twolane.common import resources

needs_slices = pytest.mark.skipif(
    sys.platform != "linux"
    or platform.machine() not in resources.SLICE_CALLS
    or tuple(map(int, platform.release().split(".")[:2])) < (6, 12),
    reason="threads have no slices of their own there",
)


def slice_and_niceness(thread: int = 0) -> tuple[int, int]:
    """The slice of a thread in nanoseconds and its niceness, as sched_getattr(2) tells; 0: of this
    one."""
    get, held = resources.SLICE_CALLS[platform.machine()][0], ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(get, thread, held, 56, 0) == 0
    fields = resources.SLICE_FIELDS.unpack(held.raw)
    return fields[5], fields[3]
