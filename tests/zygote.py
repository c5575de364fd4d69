"""Programs of this project, forked from a process that has imported what they import.

`python -m twolane serve` and its engine take four seconds of processor time to start, nearly all of
it for imports, and tests start some 200 servers. A *zygote* imports once. After `install`,
`subprocess` asks it for each `python -m twolane…`, and so do programs that such a program starts. A
forked program is a child of who asked; arguments, environment, folder, files, limits, signals and
groups are its own as after an exec, and its `main` runs as it would. It ends as it would, too, but
nothing clears its modules away.

Executed is what a fork cannot do alike (an environment that libraries read as they are loaded,
`preexec_fn`, another niceness or other processors), and all in tests with the mark `executed`, in
the long form, and where there is a GPU.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from twolane.common.resources import SECRET
from twolane.fleet.process import LAUNCH

PROGRAMS = (
    *(("-m", "twolane"), ("-m", "twolane.engine"), ("-c", LAUNCH)),
    *(("-m", "twolane.lanes.ranks.cpu_follower"), ("-m", "tests.found")),
)
"""What is forked: the first words after the interpreter."""
PRELOADED = (
    *("twolane.cli.main", "twolane.cli.serve", "twolane.server.run", "twolane.server.app"),
    *("pydantic.v1", "uvicorn.middleware.wsgi", "twolane.engine.process"),
    *("twolane.lanes.cpu.lanes", "twolane.lanes.ranks.log_reader"),
)
"""Modules that the zygote imports, none of them a program."""
NAME = "zygote"
"""Name of zygotes in /proc."""
COMMAND = "from tests import zygote; zygote.main()"
COMMAND_BYTES = 4096
"""Most bytes of a forked program's command line."""
OWN = (
    *("TWOLANE_", "PYTEST_"),
    *("TOKENIZERS_PARALLELISM", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"),
    *("COLUMNS", "NO_COLOR", "COMP_", "_TWOLANE_COMPLETE"),
)
"""Begins of the names of variables that nothing reads before `main`, or that imports set."""
LIMITS = tuple(value for name, value in vars(resource).items() if name.startswith("RLIMIT_"))
_environment = dict(os.environ)
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36


class Start(NamedTuple):
    """What a program is started with."""

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    numbers: Sequence[int]
    """Numbers that the descriptors which come with it have in the program."""
    limits: Mapping[int, tuple[int, int]]
    ignored: Sequence[int]
    blocked: Sequence[int]
    umask: int
    session: bool
    group: int
    """Number of its process group; 0: its own."""


class Zygote:
    """A zygote as seen by the process whose programs it forks.

    Args:
        control: the socket on which it is asked.
        environment: the environment in which it imported.
        process: the zygote itself, if this process has started it.
    """

    def __init__(
        self,
        control: socket.socket,
        environment: Mapping[str, str],
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self._control = control
        self._environment = environment
        self._process = process
        self._placed = placed()
        self._lock = threading.Lock()

    def start(self, how: Mapping[str, Any]) -> int | None:
        """Fork a program; return its number, or None if it is to be executed.

        Args:
            how: the arguments of `Popen._execute_child`.
        """
        if not self._alike(how):
            return None
        pipes = [how[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        files += how["pass_fds"]
        ignored = [s for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN]
        start = Start(
            words=[os.fsdecode(word) for word in how["args"]],
            environment=dict(os.environ if how["env"] is None else how["env"]),
            folder=str(Path.cwd() / os.fsdecode(how["cwd"] or "")),
            numbers=[*range(3), *how["pass_fds"]],
            limits={each: resource.getrlimit(each) for each in LIMITS},
            ignored=ignored,
            blocked=list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            umask=own_umask() if how["umask"] == -1 else how["umask"],
            session=how["start_new_session"],
            group=os.getpgrp() if how["process_group"] == -1 else how["process_group"],
        )
        with self._lock:
            return self._ask(start, files)

    def _ask(self, start: Start, files: Sequence[int]) -> int:
        """Have the zygote fork; its child is orphaned at once, and becomes one of this process."""
        libc = ctypes.CDLL(None)
        message = pickle.dumps(start)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._control, [len(message).to_bytes(8)], list(files))
            self._control.sendall(message)
            return int.from_bytes(receive(self._control, 8))
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0)

    def _alike(self, how: Mapping[str, Any]) -> bool:
        """Whether a fork does what an exec would."""
        size = sum(len(os.fsencode(word)) + 1 for word in how["args"])
        owner = [how[name] for name in ("gid", "gids", "uid")]
        try:
            here = Path.cwd()
            for number in range(3):
                os.fstat(number)
        except OSError:  # no working folder, or a closed file
            return False
        return (
            size < COMMAND_BYTES
            and (how["preexec_fn"], how["close_fds"], how["restore_signals"]) == (None, True, True)
            and all(each in (None, -1) for each in owner)
            and Path(here, os.fsdecode(how["cwd"] or "")).is_dir()
            and placed() == self._placed
            and self._knows(os.environ if how["env"] is None else how["env"])
        )

    def _knows(self, environment: Mapping[str, str]) -> bool:
        """Whether what was imported has seen this environment; secrets may be kept from it."""

        def seen(variables: Mapping[str, str]) -> dict[str, str]:
            kept = {k: v for k, v in variables.items() if not k.startswith(OWN)}
            if "OMP_WAIT_POLICY" in kept:
                kept["OMP_WAIT_POLICY"] = kept["OMP_WAIT_POLICY"].upper()
            return {name: value for name, value in kept.items() if not SECRET.search(name)}

        return seen(environment) == seen(self._environment)


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_execute)
enabled = False
"""Whether this process's programs are forked where they can be."""
_current: Zygote | None = None


def _execute_child(self: Any, *args: Any, **named: Any) -> None:
    """Start a program as `Popen._execute_child` does."""
    how = _parameters.bind(self, *args, **named).arguments
    pid = zygote().start(how) if enabled and is_program(how) else None
    if pid is None:
        _execute(self, *args, **named)
        return
    self.pid, self._child_created = pid, True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(how[name] for name in ends))


def is_program(how: Mapping[str, Any]) -> bool:
    """Whether one of the programs is started, given the arguments of `Popen._execute_child`."""
    words = how["args"]
    if how["shell"] or not isinstance(words, (list, tuple)) or how["executable"]:
        return False
    first = [os.fsdecode(word) for word in words[:3]]
    return first[0] == sys.executable and tuple(first[1:]) in PROGRAMS


def install() -> None:
    """Have this process's programs be forked where they can be."""
    global enabled
    enabled = True
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def zygote() -> Zygote:
    """Return the zygote of this process, which it starts on first use."""
    global _current
    if _current is None:
        own, its = socket.socketpair()
        command = [sys.executable, "-c", COMMAND, str(its.fileno()), "x" * COMMAND_BYTES]
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=_environment,
            pass_fds=[its.fileno()],
            process_group=0,
        )
        its.close()
        _current = Zygote(own, _environment, process)
    return _current


def main() -> None:
    """Import, fork what is asked for until nobody can ask, and in a child be the program."""
    global _current
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack a thread"
    own_name = Path("/proc/self/comm").read_text().strip()
    while True:
        name_process(NAME)
        start, files = forked(control)
        control = become(start, files, control)
        own, its = socket.socketpair()
        if os.fork() == 0:  # the zygote of what this program starts
            for foreign in (own, control):  # their numbers will be others' when they are deleted
                foreign.detach()
            control = stand_by(its)
            continue
        its.close()
        _current = Zygote(own, _environment)
        name_process(own_name)
        control.sendall(os.getpid().to_bytes(8))
        control.close()
        break
    gc.enable()
    install()
    try:
        run(start.words)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        end(ended.code or 0)
    else:
        end(0)


def forked(control: socket.socket) -> tuple[Start, list[int]]:
    """Fork for each request; return it in the child, which has become one of who asked."""
    while True:
        size, files, _, _ = socket.recv_fds(control, 8, 250)
        if not size:
            os._exit(0)
        start = pickle.loads(receive(control, int.from_bytes(size)))
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.0005)
            return start, files
        os.waitpid(between, 0)
        for number in files:
            os.close(number)


def become(start: Start, files: Sequence[int], control: socket.socket) -> socket.socket:
    """Give this process what its program is to find; return the socket of who asked."""
    above = max(start.numbers) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in files]
    kept = fcntl.fcntl(control.detach(), fcntl.F_DUPFD_CLOEXEC, above)
    for number, source in zip(start.numbers, moved, strict=True):
        os.dup2(source, number)
    close_but({*start.numbers, kept})
    if start.session:
        os.setsid()
    elif start.group != os.getpgrp():
        os.setpgid(0, start.group)
    os.chdir(start.folder)
    os.umask(start.umask)
    for which, limits in start.limits.items():
        if resource.getrlimit(which) != limits:
            resource.setrlimit(which, limits)
    os.environ.clear()
    os.environ.update(start.environment)
    set_signals(start)
    write_command(start.words)
    open_streams()
    return socket.socket(fileno=kept)


def open_streams() -> None:
    """Open standard streams as the interpreter does; its own keep what they found on their files.

    See create_stdio in pylifecycle.c.
    """
    for name in ("stdin", "stdout", "stderr"):
        old: Any = getattr(sys, name)
        raw: Any = io.FileIO(old.fileno(), old.mode, closefd=False)
        raw.name = f"<{name}>"
        wraps = io.BufferedReader if old.mode == "r" else io.BufferedWriter
        whole = not old.write_through
        stream: Any = io.TextIOWrapper(
            wraps(raw) if whole or old.mode == "r" else raw,
            old.encoding,
            old.errors,
            newline="\n",
            line_buffering=whole and (name == "stderr" or raw.isatty()),
            write_through=old.write_through,
        )
        stream.mode = old.mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def stand_by(control: socket.socket) -> socket.socket:
    """Hold nothing of the program whose zygote this is; return the socket on which it asks."""
    close_but({control.fileno()})
    for number in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    close_but({0, 1, 2, control.fileno()})
    os.setpgid(0, 0)
    os.chdir("/")
    return control


def close_but(kept: set[int]) -> None:
    """Close all descriptors but these."""
    for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        if number not in kept:
            with suppress(OSError):  # that of the folder itself
                os.close(number)


def set_signals(start: Start) -> None:
    """Set signals as the interpreter finds and sets them after an exec."""
    own = {signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler: Any = own.get(number, signal.SIG_DFL)  # type: ignore[call-overload]
        if number in start.ignored:
            handler = signal.SIG_IGN
        elif number == signal.SIGINT:
            handler = signal.default_int_handler
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)


def write_command(words: Sequence[str]) -> None:
    """Write the command line that /proc shows: see proc(5), `arg_start`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def name_process(name: str) -> None:
    """Set the name that /proc shows."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def run(words: Sequence[str]) -> None:
    """Run a program as the interpreter runs it, to its end."""
    sys.orig_argv[:] = words
    if words[1] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = list(words[2:])
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *words[3:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(words[2], vars(sys.modules["__main__"]))


def end(code: int) -> None:
    """End this process as the interpreter does, but for clearing its modules away, which copies
    each page that it shares with the zygote: more work than most programs are."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError):  # the interpreter tells of it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def placed() -> tuple[int, set[int]]:
    """Return the niceness of this process and its processors."""
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)


def own_umask() -> int:
    """Return the umask without setting it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def receive(control: socket.socket, size: int) -> bytes:
    """Receive so many bytes.

    Raises:
        EOFError: the other side has ended.
    """
    data = b""
    while len(data) < size:
        part = control.recv(size - len(data))
        if not part:
            raise EOFError("the zygote has ended")
        data += part
    return data
