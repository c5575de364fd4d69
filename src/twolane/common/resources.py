"""Cores, memory and open files that this process may use."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
OPENED = Path("/dev/fd")
PR_SET_PDEATHSIG = 1
SECRET = re.compile(r"(KEYS?|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|HEADERS)$", re.I)
"""Ends of the names of environment variables that have secrets."""
MAX_FILES = 1 << 20
"""Most open files that a process asks the system for."""
MEMORY_NAMES = ("memory.max", "memory.current", "inactive_file")
"""Files of a control group with its limit and what it uses, and the field of memory.stat with the
inactive page cache."""
OLD_MEMORY_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""The same of groups of version 1."""
SHORT_SLICE = 0.0001
"""Seconds of the shortest time slice that Linux grants (sched_setattr(2))."""
SLICE_CALLS = {"x86_64": (315, 314), "aarch64": (275, 274)}
"""Numbers of the system calls sched_getattr and sched_setattr, by kind of machine."""
SLICE_FIELDS = struct.Struct("IIQiIQQQII")
"""`struct sched_attr`, whose sixth field is the slice in nanoseconds."""


def allowed_cores() -> list[int]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[int]:
    """Return as many of the allowed cores as control groups grant time for, as with `docker run
    --cpus` and limits of Kubernetes: more threads would be throttled in turns, and the others wait
    for them."""
    cores = allowed_cores()
    shares = (_cores_of(group, old) for group, old in _groups("cpu", proc, cgroups))
    time = min((share for share in shares if share is not None), default=float(len(cores)))
    return cores[: max(1, int(time))]


def cpu_name() -> str:
    """Return the CPU's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def pin_thread(cores: Sequence[int]) -> None:
    """Pin this thread, and those that it starts, to these cores. Where control groups bound the
    time and not the cores, the system chooses: others may be busy on these."""
    if not hasattr(os, "sched_setaffinity") or len(usable_cores()) < len(allowed_cores()):
        return
    with contextlib.suppress(OSError):  # a core was taken away: unpinned is still served
        os.sched_setaffinity(0, cores)  # 0 is the calling thread


def yield_processor(niceness: int) -> None:
    """Add `niceness` to this thread's own (nice(2)), so that others get the processor before it.

    Where threads have no niceness of their own, or may not change it, nothing changes.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        more = os.getpriority(os.PRIO_PROCESS, thread) + niceness
        os.setpriority(os.PRIO_PROCESS, thread, more)


def ask_for_slice(seconds: float) -> None:
    """Ask Linux for time slices of so many seconds for this thread and those that it starts; 0: the
    system's own.

    A thread that wakes up preempts one with a longer slice at once, and otherwise waits until that
    slice ends, for up to 3 ms (EEVDF, Linux 6.12). Its share of the processor stays the same, so
    that this needs no privilege. Other systems and earlier kernels ignore it.
    """
    calls = SLICE_CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None:
        return
    get, set_ = calls
    libc, held = ctypes.CDLL(None), ctypes.create_string_buffer(SLICE_FIELDS.size)
    if libc.syscall(get, 0, held, SLICE_FIELDS.size, 0):  # 0 is the calling thread
        return
    fields = list(SLICE_FIELDS.unpack(held.raw))
    if fields[1] == os.SCHED_OTHER:
        fields[5] = round(seconds * 1e9)
        libc.syscall(set_, 0, SLICE_FIELDS.pack(*fields), 0)  # a sandbox may forbid it


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send this process a signal when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def end_group(process: "subprocess.Popen[str]", patience: float) -> None:
    """Ask a process to end, and wait; kill it and what it started after `patience` seconds, or at
    Ctrl-C."""
    try:
        if patience > 0:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def processor_seconds(pid: int) -> float | None:
    """Return the seconds of processor time that a process has had; None where nothing tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # proc(5): utime, stime


def without_secrets() -> dict[str, str]:
    """Return the environment without variables whose names are those of secrets."""
    return {name: value for name, value in os.environ.items() if not SECRET.search(name)}


def raise_file_limit() -> int:
    """Raise the limit on open files as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a system that bounds it elsewhere, too
        return soft
    return wanted


def open_files(opened: Path = OPENED) -> int:
    """Return the number of files that this process has open; 0: unknown, as in a container without
    /proc."""
    try:
        return len(list(opened.iterdir()))
    except OSError:
        return 0


def open_standard_files() -> None:
    """Open those of standard input, output and error that are closed: else the next connection
    would get their number, and with it what libraries print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def total_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes of memory that this process and those beside it in its control groups can
    have: what is installed, or the least of the groups' limits."""
    limits = (_limit(group / names[0]) for group, names in _memory_groups(proc, cgroups))
    return min([_installed_memory(), *(limit for limit in limits if limit is not None)])


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that this process can allocate without swapping and within the memory limits
    of its control groups."""
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        free = _installed_memory() // 2
    left = (_left(group, *names) for group, names in _memory_groups(proc, cgroups))
    return max(0, min([free, *(bytes for bytes in left if bytes is not None)]))


def _installed_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the groups that may limit this process's memory, each with its version's names."""
    for group, old in _groups("memory", proc, cgroups):
        yield group, OLD_MEMORY_NAMES if old else MEMORY_NAMES


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the control groups that may limit this process, and whether they are of
    version 1 (Linux: cgroup-v2.rst; v1 cgroups.rst)."""
    try:
        lines = (proc / "self" / "cgroup").read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*os.fsdecode(line).split(":", 2), "", "", ""][:3]
        if not path or (controllers and controller not in controllers.split(",")):
            continue  # names may have any bytes, and lines of their own
        root = cgroups / controller if controllers else cgroups
        # A container may see its own group as the root, under the name that the host has for it.
        inside = root / path.strip("/")
        for group in {root, inside, *(p for p in inside.parents if p.is_relative_to(root))}:
            yield group, bool(controllers)


def _limit(file: Path) -> int | None:
    """Return the bytes that a file of a control group states; None: no such group, or "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _left(group: Path, limit: str, used: str, cache: str) -> int | None:
    """Return the bytes that a group has left; inactive page cache counts as free, since it is
    reclaimed on demand."""
    try:
        most, taken = (int((group / name).read_text()) for name in (limit, used))
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return most - taken + int(stats.get(cache, 0))
    except (OSError, ValueError):  # there is no such group here, or it is "max"
        return None


def _cores_of(group: Path, old: bool) -> float | None:
    """Return the number of cores that a group's CPU quota amounts to; None: no such group, or no
    quota."""
    try:
        if old:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (int((group / name).read_text()) for name in names)
        else:
            quota, period = map(int, (group / "cpu.max").read_text().split())
    except (OSError, ValueError):  # "max"
        return None
    return quota / period if quota > 0 and period > 0 else None
