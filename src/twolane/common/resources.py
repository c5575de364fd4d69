"""What of this machine a process may use: cores, memory and files."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
OPENED = Path("/dev/fd")
PR_SET_PDEATHSIG = 1
MOST_FILES = 1 << 20
"""A process asks the system for no more open files than this many."""


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def yield_processor(niceness: int) -> None:
    """Have this thread yield to others in its claim on the processor, by so much more than now; see
    nice(2). Where threads have no claims of their own, or may not change them, nothing changes."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        more = os.getpriority(os.PRIO_PROCESS, thread) + niceness
        os.setpriority(os.PRIO_PROCESS, thread, more)


def die_with_parent(wanted: bool = True) -> None:
    """Have the system kill this process, whatever it does, when the thread that started it ends; or
    no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if wanted else 0)


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows; return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a system that bounds it elsewhere, too
        return soft
    return wanted


def open_files(opened: Path = OPENED) -> int:
    """Return how many files this process has open; 0: this system does not say, as in a container
    without /proc."""
    try:
        return len(list(opened.iterdir()))
    except OSError:
        return 0


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that can be allocated without swapping, and that its control groups leave this process:
    those of a container, or of a service."""
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        free = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min([free, *_left_by_groups(proc, cgroups)]))


def _left_by_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Bytes that each group with a limit leaves (Linux: cgroup-v2.rst, v1 memory.rst).

    Page cache that is not in use counts as used there, and is given up on demand.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        root = cgroups / "memory" if controllers else cgroups
        # A container may see its own group as the root, under the name that the host has for it.
        inside = root / path.strip("/")
        for group in {root, inside, *(p for p in inside.parents if p.is_relative_to(root))}:
            left = _left(group, *names)
            if left is not None:
                yield left


def _left(group: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        most, taken = (int((group / name).read_text()) for name in (limit, used))
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return most - taken + int(stats.get(cache, 0))
    except (OSError, ValueError):  # there is no such group here, or it is "max"
        return None
