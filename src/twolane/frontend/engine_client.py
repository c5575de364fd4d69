"""Client of the engine process: starts it, exchanges messages, notices when it dies."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import zmq

from twolane.common.errors import FieldError
from twolane.common.resources import without_secrets
from twolane.engine import messages
from twolane.engine.config import EngineConfig, EngineStart
from twolane.engine.kv.prefix_digest import PrefixBook
from twolane.engine.lateness import Lateness
from twolane.engine.prompt_work import PromptWork
from twolane.frontend.adapters import Adapters
from twolane.frontend.delivery import DeliveryQueue
from twolane.frontend.liveness import HANG_SECONDS, PING_SECONDS, Liveness
from twolane.frontend.socket_folders import SocketFolder, remove_dead_folders

log = logging.getLogger("twolane.engine")

LAST_WORDS_SECONDS = 0.2
"""Seconds within which a message of an exited engine may still arrive."""
CLOSE_SECONDS = 10.0
"""Seconds that an engine may take to exit (it may be writing a trace) before it is killed."""
KILL_SECONDS = 5.0
"""Seconds that a killed engine may take to end: a device may delay it."""


class EngineError(Exception):
    """The engine could not start, or is gone; the message says why."""


class EngineGone(msgspec.Struct, frozen=True):
    """Ends the stream of every request that was open when the engine died."""

    message: str


Event = messages.Output | messages.Refused | EngineGone
Sink = Callable[[Event], None]


def start_error(fatal: messages.Fatal) -> Exception:
    """Return the error of a failed start; it names the setting at fault."""
    if fatal.field is None:
        return EngineError(fatal.message)
    return FieldError(fatal.field, fatal.message.removeprefix(f"{fatal.field} "))


def ignore_progress(_: messages.Progress) -> None:
    """Ignore the progress."""


class EngineClient:
    """One engine process. All methods belong to the event loop that started it.

    Invariant: every `submit` is answered by exactly one ending event (an `Output` with `finish`,
    a `Refused` or an `EngineGone`) unless `abort` came first; after `abort` nothing is delivered.

    Args:
        on_progress: told the steps of the engine's start.
        hang_seconds: see `Liveness`.
        watchdog: true if an engine that hangs for long is killed.
    """

    arguments: ClassVar[Sequence[str]] = ("-m", "twolane.engine")
    """Arguments of the Python interpreter."""
    ready: messages.Ready
    prefixes: PrefixBook
    """Landmarks of the engine's prefix tree; set with `ready`."""
    process: asyncio.subprocess.Process

    def __init__(
        self,
        on_progress: Callable[[messages.Progress], None] = ignore_progress,
        *,
        hang_seconds: float = HANG_SECONDS,
        watchdog: bool = False,
    ) -> None:
        self.stats, self.stats_at = messages.Stats(), 0.0
        """The engine's latest gauges, and when they came, in seconds on the monotonic clock."""
        self.adapters = Adapters({}, {}, self._send)
        """The engine's LoRA adapters."""
        self.liveness = Liveness(hang_seconds)
        """Liveness of the engine, once it is ready."""
        self._watchdog = watchdog
        self.failure: str | None = None
        self.failed = asyncio.Event()
        self.watchers: list[Callable[[list[messages.Launched]], None]] = []
        """Called with launches during the time that `watch` sets."""
        self._loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        self._started: asyncio.Future[messages.Ready] = self._loop.create_future()
        self._sinks: dict[str, Sink] = {}
        self._submitted = 0
        self._uncounted: deque[PromptWork] = deque()
        """Work of the latest submitted requests, which `stats` does not count yet."""
        self._delivery = DeliveryQueue(self._deliver, self._report_lateness)
        self._closing = False
        self._heard = 0
        """Number of messages received from the engine."""
        self._last_words: str | None = None
        """Reason of the engine's end as it reported it."""
        self._watching: asyncio.Task[None] | None = None
        self._pinging: asyncio.Task[None] | None = None
        remove_dead_folders()
        self._folder = SocketFolder()
        # At the latest when the program ends, whoever forgets to close.
        self._remove_folder = weakref.finalize(self, self._folder.remove)
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # admission bounds what is under way
            socket.setsockopt(zmq.RCVHWM, 0)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_progress: Callable[[messages.Progress], None] = ignore_progress,
        log_level: str = "warning",
        *,
        hang_seconds: float = HANG_SECONDS,
        watchdog: bool | None = None,
    ) -> "EngineClient":
        """Start an engine and wait until it is ready.

        Args:
            config: the engine's settings.
            on_progress: is told the steps of the start.
            log_level: see `EngineStart`.
            hang_seconds: without a sign of progress after which the engine counts as hung.
            watchdog: true if a hung engine is killed; None: killed if it has several ranks.

        Raises:
            FieldError: a setting does not go with the device or the model.
            EngineError: it could not start.
        """
        if watchdog is None:
            watchdog = config.tensor_parallel_size > 1 or config.disaggregated
        client = cls(on_progress, hang_seconds=hang_seconds, watchdog=watchdog)
        try:
            await client._spawn(config, log_level)
            client.ready = await client._started
            client.adapters = Adapters(config.lora, client.ready.adapters, client._send)
            client.liveness = Liveness(hang_seconds)  # it counts from now
            client._pinging = asyncio.create_task(client._ping())
        except BaseException:
            await client.close(patience=0.0)
            raise
        return client

    def submit(self, request: messages.Submit, sink: Sink) -> None:
        """Send a request; its events go to `sink`, which must not block.

        Raises:
            EngineError: the engine is gone.
        """
        if self.failure is not None:
            raise EngineError(self.failure)
        self._send(request)
        self._sinks[request.id] = sink
        self._submitted += 1
        self._uncounted.append(PromptWork.of(len(request.prompt), 0))

    def queued(self) -> PromptWork:
        """Return the work of the requests without a first token; prompts that the engine has not
        looked at count whole."""
        work = self.stats.queued
        for each in self._uncounted:
            work = work.plus(each)
        return work

    def send_vocabulary(self, vocabulary: messages.Vocabulary) -> None:
        """Send the texts of the model's tokens before the first request with a grammar.

        Raises:
            EngineError: the engine is gone.
        """
        self._send(vocabulary)

    def finish(self, id: str, tokens: int) -> None:
        """Tell the engine that an answer is complete with its first `tokens` tokens; its ending
        follows."""
        self._tell(messages.Finish(id=id, tokens=tokens))

    def abort(self, id: str) -> None:
        """Abort a request, unless it has ended."""
        if self._sinks.pop(id, None) is not None:
            self._tell(messages.Abort(id=id))

    def watch(self, seconds: float) -> None:
        """Have the engine report launches to `watchers` for `seconds` from now."""
        self._tell(messages.Watch(seconds))

    def forget_prefixes(self) -> None:
        """Have the engine empty its prefix cache.

        Raises:
            EngineError: the engine is gone.
        """
        self._send(messages.ForgetPrefixes())

    async def wait_for_gap(self) -> None:
        """Wait until work for a new request delays no token: see `DeliveryQueue`."""
        await self._delivery.wait_for_gap()

    @property
    def lateness(self) -> Lateness:
        """By how much tokens with a due time were written late."""
        return self._delivery.lateness

    def _report_lateness(self, spread: float) -> None:
        self._tell(messages.DeliveryLateness(spread))

    def end_all(self, message: str) -> None:
        """End the streams of all open requests with `message` and abort them in the engine."""
        for id, sink in list(self._sinks.items()):
            self.abort(id)
            sink(EngineGone(message))

    async def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Ask the engine to exit, kill it after `patience` seconds, and free everything."""
        self._closing = True
        process = getattr(self, "process", None)
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), patience)
            except TimeoutError:
                self._kill()
        if self._pinging is not None:
            self._pinging.cancel()
        if self._watching is not None:
            ended, _ = await asyncio.wait({self._watching}, timeout=KILL_SECONDS)
            if not ended:
                log.error("the engine process %d was killed but still runs", self.process.pid)
                self._watching.cancel()
        self._delivery.close()
        self._pull.close()
        self._push.close()
        self._context.term()
        self._remove_folder()

    async def _spawn(self, config: EngineConfig, log_level: str) -> None:
        to_engine, from_engine = (f"ipc://{self._folder.path}/{name}" for name in ("in", "out"))
        self._push.bind(to_engine)
        self._pull.bind(from_engine)
        # A group of its own keeps a terminal's Ctrl-C away from the engine: the API process drains
        # first. A session of its own would do so, too, but Linux may share the processor between
        # sessions (sched(7), autogroup), where nice(2) counts for nothing. The pipe's end, however
        # the API process dies, tells the engine to exit.
        begun = time.monotonic()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self.arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
            process_group=0,
            env=without_secrets(),
            cwd=None if has_folder() else "/",
        )
        assert self.process.stdin is not None
        start = EngineStart(config, to_engine, from_engine, log_level, begun)
        self.process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._loop.add_reader(self._pull.fileno(), self._read)
        self._watching = asyncio.create_task(self._watch())

    def _read(self) -> None:
        """Read one message directly: a task that waited for it would run only after everything else
        that is ready. Further messages are read in the next turn.

        Of these the socket's descriptor, told by its edges, does not tell again.
        """
        try:
            received = self._pull.recv(zmq.NOBLOCK)
        except zmq.ZMQError:  # there is none, or the client has been closed
            return
        self._loop.call_soon(self._read)
        self._heard += 1
        self._take(messages.decode_from_engine(received))

    def _take(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs():
                self._take_outputs(message)
            case messages.Progress():
                self._on_progress(message)
            case messages.Ready() if not self._started.done():
                self.prefixes = PrefixBook(message.page_size)
                self._started.set_result(message)
            case messages.Fatal():
                self._last_words = message.message
                if not self._started.done():
                    self._started.set_exception(start_error(message))

    async def _watch(self) -> None:
        """Wait until the engine has exited and all its messages are read."""
        await self.process.wait()
        before = -1
        while before != self._heard:
            before = self._heard
            await asyncio.sleep(LAST_WORDS_SECONDS)
        self._loop.remove_reader(self._pull.fileno())
        self._delivery.flush()
        if not self._started.done():
            ended = f"the engine process ended {self._exit()} while it started"
            self._started.set_exception(EngineError(ended))
        if not self._closing:
            self._last_words = self._last_words or f"the engine process ended {self._exit()}"
        self._fail(self._last_words or "the engine was closed")

    async def _ping(self) -> None:
        """Ping the engine; log its problems, and kill it if it hangs and the watchdog is on."""
        reported = False
        while self.failure is None:
            self._tell(messages.Ping())
            self.liveness.asked()
            hung, problem = self.liveness.hung, self.liveness.problem
            if hung is not None and self._watchdog:
                self._last_words = f"{hung}: the watchdog has killed the engine"
                self._kill()
                self._fail(self._last_words)
                return
            if (problem is not None) != reported:
                reported = not reported
                log.warning("%s", problem or "the engine answers again")
            await asyncio.sleep(PING_SECONDS)

    def _kill(self) -> None:
        """Kill the engine and its other ranks, which are in its process group."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)

    def _fail(self, reason: str) -> None:
        """End all open requests, once; the process may exist for longer."""
        if self.failure is None:
            self.failure = reason
            self.end_all(reason)
            self.adapters.fail(EngineError(reason))
            self.failed.set()

    def _take_outputs(self, news: messages.Outputs) -> None:
        self.stats, self.stats_at = news.stats, time.monotonic()
        while len(self._uncounted) > self._submitted - news.stats.counted:
            self._uncounted.popleft()
        if news.landmarks:
            self.prefixes.change(news.landmarks)
        self.liveness.heard(news.waits, news.silences)
        if news.launches:
            for watcher in self.watchers:
                watcher(news.launches)
        self.adapters.take(news.adapters)
        self._delivery.add(news.outputs)
        for refused in news.refused:
            sink = self._sinks.pop(refused.id, None)
            if sink is not None:
                sink(refused)

    def _deliver(self, output: messages.Output) -> None:
        ended = output.finish is not None
        sink = self._sinks.pop(output.id, None) if ended else self._sinks.get(output.id)
        if sink is not None:
            sink(output)

    def _tell(self, message: messages.ToEngine) -> None:
        """Send a message that is of no use if the engine is gone: the watch on it reports that."""
        if self.failure is None:
            with contextlib.suppress(EngineError):
                self._send(message)

    def _send(self, message: messages.ToEngine) -> None:
        try:
            self._push.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:  # no peer: it has just died
            raise EngineError("the engine is gone") from error

    def _exit(self) -> str:
        code = self.process.returncode
        return f"on signal {-code}" if code is not None and code < 0 else f"with exit code {code}"


def has_folder() -> bool:
    """Return whether this process's working folder exists: PyTorch's libraries are not found from a
    deleted one."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True
