"""Print what a program finds as it starts: `python -m tests.found PARENT [child]`; or end in a way,
with a thread and a function that outlive it: `python -m tests.found ends WAY`."""

import atexit
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests import zygote


def about(stream: Any) -> tuple[Any, ...]:
    """Return how a standard stream was opened."""
    ways = (stream.line_buffering, stream.write_through, stream.seekable())
    return (stream.mode, stream.encoding, stream.errors, type(stream.buffer).__name__, *ways)


def found(parent: int) -> dict[str, Any]:
    """Return what a program finds; an exec and a fork are to leave the same."""
    opened = {}
    for number in sorted(int(file.name) for file in Path("/proc/self/fd").iterdir()):
        try:
            status = os.fstat(number)
        except OSError:  # that of the folder itself
            continue
        if stat.S_ISSOCK(status.st_mode) and number > 2:  # the zygote's
            continue
        opened[number] = stat.S_IFMT(status.st_mode)
    return {
        "argv": sys.argv[2:],
        "orig_argv": sys.orig_argv[:3],
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")[:3],
        "name": Path("/proc/self/comm").read_text(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "path": sys.path,
        "opened": opened,
        "limits": [resource.getrlimit(each) for each in zygote.LIMITS],
        "signals": {number: repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "child_of_parent": os.getppid() == parent,
        "leads_group": os.getpgrp() == os.getpid(),
        "in_parents_group": os.getpgrp() == os.getpgid(parent),
        "leads_session": os.getsid(0) == os.getpid(),
        "umask": os.umask(0o22),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "streams": {stream.name: about(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)},
    }


def end(way: str) -> None:
    """End in this way."""
    atexit.register(print, "at the exit")
    threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread"))).start()
    if way == "a fault":
        raise ValueError(way)
    if way == "an interrupt":
        raise KeyboardInterrupt
    if way != "no code":
        sys.exit({"none": None, "a code": 7, "a text": way}[way])


def main() -> None:
    text = sys.stdin.readline()
    result = {"read": text, "forked": "twolane.cli.main" in sys.modules, **found(int(sys.argv[1]))}
    if "child" in sys.argv:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        command = [sys.executable, "-m", "tests.found", str(os.getpid())]
        ran = subprocess.run(command, input="below\n", capture_output=True, text=True, check=False)
        result["child"] = json.loads(ran.stdout)
        assert ran.returncode == 3
    print(json.dumps(result))
    sys.exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "ends":
        end(sys.argv[2])
    else:
        main()
