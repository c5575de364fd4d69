"""What control groups leave a process, its claim on the processor, and its open files."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_native_id

import pytest

from tests.common.slices import needs_slices, slice_and_niceness
from twolane.common import resources
from twolane.common.resources import (
    SHORT_SLICE,
    ask_for_slice,
    free_memory,
    open_files,
    total_memory,
    usable_cores,
    yield_processor,
)

GIB = 2**30


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def machine(tmp_path):
    """8 GiB free; the groups of this process are given as the kernel tells them."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal: 16777216 kB\nMemAvailable: 8388608 kB")

    def free(own):
        write(proc / "self", cgroup=own)
        return free_memory(proc, groups)

    return groups, free


def limit(folder, most, current, cache):
    stat = f"anon 1\ninactive_file {cache}"
    write(folder, memory__max=most, memory__current=current, memory__stat=stat)


def test_without_limits_what_is_available_is_free(machine):
    groups, free = machine
    assert free("0::/") == 8 * GIB
    limit(groups, "max", GIB, 0)
    assert free("0::/") == 8 * GIB


def test_a_containers_limit_counts_whatever_the_host_calls_its_group(machine):
    groups, free = machine
    limit(groups, 4 * GIB, 3 * GIB, GIB)
    assert free("0::/") == 2 * GIB
    assert free("0::/docker/0123") == 2 * GIB


def test_every_group_around_a_service_counts(machine):
    groups, free = machine
    limit(groups / "outer.slice", 2 * GIB, GIB, 0)
    limit(groups / "outer.slice" / "own.service", 3 * GIB, GIB, 0)
    assert free("0::/outer.slice/own.service") == GIB
    assert free("0::/other.slice") == 8 * GIB


def test_more_than_the_limit_leaves_nothing(machine):
    groups, free = machine
    limit(groups, GIB, 2 * GIB, 0)
    assert free("0::/") == 0


def test_the_first_version_of_control_groups_counts_too(machine):
    groups, free = machine
    files = {"memory__limit_in_bytes": 3 * GIB, "memory__usage_in_bytes": 2 * GIB}
    write(groups / "memory" / "docker" / "x", **files, memory__stat="total_inactive_file 1024")
    assert free("5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/") == GIB + 1024
    assert free("4:memory:/docker/y") == 8 * GIB


def test_containers_have_the_memory_of_their_limits(tmp_path):
    """On a host that has more, with both versions of control groups; "max" and the number that
    version 1 has for it are no limits."""
    (tmp_path / "self").mkdir()
    own, groups = tmp_path / "self" / "cgroup", tmp_path / "cgroup"
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def total(lines):
        own.write_text(lines)
        return total_memory(tmp_path, groups)

    write(groups, memory__max="max")
    write(groups / "outer", memory__max=GIB)
    write(groups / "outer" / "inner", memory__max="max")
    write(groups / "memory", memory__limit_in_bytes=2**63 - 4096)
    write(groups / "memory" / "docker", memory__limit_in_bytes=GIB // 2)
    assert total("0::/") == total("4:memory:/") == total("3:cpu:/docker") == installed
    assert total("0::/outer/inner") == GIB
    assert total("4:memory:/docker\n0::/outer") == GIB // 2


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_suite_runs_as_many_files_at_a_time_as_memory_holds():
    """`make` asks for what control groups leave of the machine's memory."""
    command = ["make", "--dry-run", "unit", f"BIN={Path(sys.executable).parent}"]
    root = Path(__file__).parents[2]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert f"pytest -n {3 if total_memory() > 15e9 else 2} " in printed


def test_this_machine_has_some():
    assert 0 < free_memory() <= total_memory()
    assert set(usable_cores()) <= set(resources.allowed_cores())


@pytest.mark.parametrize(
    ("own", "group", "files", "count"),
    [
        ("0::/", "", {"cpu__max": "max 100000"}, 8),
        ("0::/", "", {"cpu__max": "250000 100000"}, 2),
        ("0::/", "", {"cpu__max": "50000 100000"}, 1),
        ("0::/", "", {"cpu__max": "1600000 100000"}, 8),
        ("0::/a/b", "a", {"cpu__max": "400000 100000"}, 4),
        ("3:cpu,cpuacct:/x", "cpu/x", {"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100000}, 8),
        ("3:cpu,cpuacct:/x", "cpu", {"cpu__cfs_quota_us": 765000, "cpu__cfs_period_us": 100000}, 7),
        ("0::/a:b", "a:b", {"cpu__max": "400000 100000"}, 4),
        ("0::/\xe9\nb", "", {"cpu__max": "400000 100000"}, 4),
        ("0::/\n\n", "", {"cpu__max": "50000"}, 8),
        ("3:cpuset:/x", "cpu", {"cpu__cfs_quota_us": 100000, "cpu__cfs_period_us": 100000}, 8),
    ],
)
def test_no_more_cores_are_used_than_control_groups_have_time_for(
    tmp_path, monkeypatch, own, group, files, count
):
    """As with `docker run --cpus`, where the system chooses the cores; names may be odd."""
    write(tmp_path / "proc" / "self", cgroup="")
    (tmp_path / "proc" / "self" / "cgroup").write_bytes(own.encode("latin-1") + b"\n")
    write(tmp_path / "cgroup" / group, **files)
    monkeypatch.setattr(resources, "allowed_cores", lambda: [*range(2, 10)])
    cores = usable_cores(tmp_path / "proc", tmp_path / "cgroup")
    assert cores == [*range(2, 2 + count)]
    pinned = []
    monkeypatch.setattr(resources, "usable_cores", lambda: cores)
    monkeypatch.setattr(
        resources.os, "sched_setaffinity", lambda _, to: pinned.append(to), raising=False
    )
    resources.pin_thread(cores)
    assert pinned == ([cores] if count == 8 else [])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only processes have a niceness")
def test_a_thread_alone_yields_the_processor():
    with ThreadPoolExecutor(1, initializer=yield_processor, initargs=(3,)) as thread:
        other = thread.submit(lambda: os.getpriority(os.PRIO_PROCESS, get_native_id())).result()
    assert other == min(19, os.getpriority(os.PRIO_PROCESS, get_native_id()) + 3)


@needs_slices
def test_a_thread_and_those_it_starts_have_the_slice_that_it_asked_for():
    with ThreadPoolExecutor(1, initializer=yield_processor, initargs=(3,)) as thread:
        own, nice = thread.submit(slice_and_niceness).result()
        thread.submit(ask_for_slice, SHORT_SLICE).result()
        assert thread.submit(slice_and_niceness).result() == (100_000, nice)
        with thread.submit(ThreadPoolExecutor, 1).result() as other:
            started = thread.submit(lambda: other.submit(slice_and_niceness)).result()
            assert started.result() == (100_000, nice)
        thread.submit(ask_for_slice, 0.0).result()
        assert thread.submit(slice_and_niceness).result() == (own, nice)


def test_open_files_are_counted_where_the_system_shows_them(tmp_path):
    script = (
        "from twolane.common.resources import open_files; before = open_files(); "
        f"file = open({str(tmp_path / 'one')!r}, 'w'); assert open_files() == before + 1"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # no thread of other tests is there
    assert open_files(tmp_path / "no such folder") == 0


CLOSED = """
import os, subprocess, sys
from twolane.common.resources import open_standard_files
os.closerange(0, 3)
sys.stdin = sys.stdout = sys.stderr = None
open_standard_files()
print(1, file=sys.stderr, flush=True)
assert os.open(os.devnull, os.O_RDONLY) > 2
child = "import sys; print(1, file=sys.stderr, flush=True); sys.exit(sys.stdout is None)"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


def test_what_is_opened_gets_no_number_of_a_closed_standard_file():
    """A server's next connection got what libraries print, and its engine's too."""
    assert subprocess.run([sys.executable, "-c", CLOSED]).returncode == 0
