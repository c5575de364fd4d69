"""`twolane serve`: the API process from start to end."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from starlette.types import ASGIApp

from twolane.common import garbage
from twolane.common.errors import FieldError
from twolane.common.log_lines import log_to, write_taken
from twolane.common.resources import SHORT_SLICE, ask_for_slice, open_files, raise_file_limit
from twolane.engine.config import TRANSPORT_SECONDS, EngineConfig
from twolane.frontend.answer_formats import ModelFormats
from twolane.frontend.engine_client import CLOSE_SECONDS, EngineClient
from twolane.frontend.progress import progress_bars
from twolane.frontend.startup import FETCHING, Started, start_engine
from twolane.server.announcement import announcement
from twolane.server.http.backpressure import UnsentCollector, UnsentOutput
from twolane.server.http.connection import (
    EXTRA_CONNECTIONS,
    Connection,
    ConnectionLimits,
    EarlyCheck,
    connection_class,
)
from twolane.server.http.entry import Entry
from twolane.server.ops.dashboard.data import Dashboard
from twolane.server.ops.metrics import PREFIX
from twolane.server.ops.monitoring import Monitoring
from twolane.server.options import ServerOptions
from twolane.server.service.service import Service

if TYPE_CHECKING:  # one takes long to import, the other needs an extra
    from fastapi import FastAPI
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("twolane.server")

FAILURE_SECONDS = 1.0
"""Seconds for which a server whose engine has died still answers, with 503."""
KEEP_ALIVE_SECONDS = 75
"""Seconds that a connection may idle between two requests. Clients close theirs earlier (httpx
after 5 s, aiohttp after 15 s): a request sent while the server closes its connection is lost."""
ENDING_SECONDS = 2
"""Seconds that connections may take to end once their streams have."""
INSISTED_SECONDS = 3.0
"""Seconds that the second signal leaves for an orderly end."""
BACKLOG = 2048
"""Connections that the system queues until they are accepted."""
ACCEPTED_AT_ONCE = 32
"""Connections accepted in one turn of the loop, before closed ones are released."""
FILES_BESIDE = 64
"""Files that the server may need besides those open at its start and its connections."""
MAX_CONNECTIONS = 8192
"""Default limit on open connections where the limit on files allows more."""
RETURN_SECONDS = 5.0
"""Seconds between two returns of free memory to the system."""
FEW_REQUESTS = 8
"""Most open requests beside which garbage is collected: each has 180 containers, so that a thousand
requests take 0.2 s, in which no token is written."""
COLLECT_SECONDS = 300.0
"""Seconds after which garbage is collected beside more open requests."""
ACCEPT_LOG_SECONDS = 60.0
"""Seconds between two log lines that no connection can be accepted."""
UNREACHABLE = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)
"""Errors of a socket whose client vanished, besides a reset."""


class UvicornServer(uvicorn.Server):
    """Uvicorn's server, which leaves signals to `Stop`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class Stop:
    """Handles SIGINT, SIGTERM, and SIGHUP unless ignored (nohup): the first asks to stop, the
    second to stop at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
        elif not self.insisted.is_set():
            self.insisted.set()
            # Whatever does not end, such as a program that came with the model.
            last = threading.Timer(INSISTED_SECONDS, os._exit, (1,))
            last.daemon = True
            last.start()


def serve(config: EngineConfig, options: ServerOptions) -> int:
    """Serve until told to stop; return the exit code: 0, or 1 when the engine died.

    Raises:
        OSError: the address cannot be had.
        ValueError: see `start_engine`, as for PullError and EngineError.
    """
    set_up_log(options.log_level)
    garbage.bound_heaps()
    ask_for_slice(SHORT_SLICE)  # also for the engine process, which this thread starts
    return asyncio.run(run(config, options))


def set_up_log(level: str) -> None:
    """Log lines of at least this level to standard error, with those of libraries that help an
    operator."""
    log_to(sys.stderr.fileno(), level, "%(asctime)s %(levelname)s %(message)s")
    for name in ("uvicorn", "asyncio", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Its warnings are about what clients send; who sends nonsense is answered, and fills no log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


async def run(config: EngineConfig, options: ServerOptions) -> int:
    """See `serve`."""
    check_adapter_names(config, options)
    config = msgspec.structs.replace(config, transport=TRANSPORT_SECONDS)
    provider = None if options.otlp_endpoint is None else span_provider(options.otlp_endpoint)
    stop = Stop()
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    with bind(options.host, options.port) as listener:
        entry = Entry()
        output = UnsentOutput()
        early = entry.refuse_early
        server = UvicornServer(uvicorn_config(entry, options, output, refuse_early=early))
        serving = await serving_at(listener, server)
        with progress_bars() as show:
            starting = asyncio.create_task(
                start_engine(
                    config,
                    show,
                    options.log_level,
                    hang_seconds=options.hang_seconds,
                    watchdog=options.watchdog,
                )
            )
            # Its libraries take half a second, in which the engine loads the model.
            importing = asyncio.to_thread(import_module, "twolane.server.app")
            await asyncio.gather(first_of(starting, stop.asked.wait()), importing)
        if not starting.done() or starting.exception() is not None:
            await give_up(starting, server, serving)
            return 0
        service, monitoring = service_of(starting.result(), config, options)
        monitoring.metrics.registry.register(UnsentCollector(output, PREFIX))
        engine, name = service.engine, service.model_name
        tracing = None
        if provider is not None:
            from twolane.server.ops.tracing import Tracing

            service.tracing = tracing = Tracing(provider, engine)
        ticking = asyncio.create_task(tick(monitoring.dashboard, server))
        try:
            entry.app = app = await application(service, monitoring, config, options)
            entry.early = app.state.early
            garbage.freeze(clients=True)
            address = address_of(listener)
            refuses = options.refuse_late
            warn_of_open_address(listener, options)
            announce(announcement(engine.ready, config, name, address, refuses=refuses))
            return await serve_until_stopped(service, server, serving, stop, options)
        finally:
            ticking.cancel()
            if tracing is not None:
                await tracing.close()
            await service.close()
            await engine.close(patience=0.0 if stop.insisted.is_set() else CLOSE_SECONDS)


async def serving_at(listener: socket.socket, server: UvicornServer) -> asyncio.Task[None]:
    """Serve at a bound socket; return the task when connections are accepted."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    listener.listen(BACKLOG)  # which uvicorn has cut to what it accepts at once
    return serving


async def application(
    service: Service, monitoring: Monitoring, config: EngineConfig, options: ServerOptions
) -> "FastAPI":
    """Return the ASGI application with its OpenAPI description, whose creation takes a quarter of a
    second and must not delay streams."""
    from twolane.server.app import create_app

    app = create_app(service, monitoring, options, lora_endpoints=config.lora_endpoints)
    await asyncio.to_thread(app.openapi)  # which keeps it
    return app


def check_adapter_names(config: EngineConfig, options: ServerOptions) -> None:
    """Refuse an adapter that has the base model's name.

    Raises:
        FieldError: there is one.
    """
    for name in options.names(config.model):
        if name in config.lora:
            raise FieldError("lora", f"{name} is the name of the model itself")


async def give_up(
    starting: asyncio.Task[Started], server: UvicornServer, serving: asyncio.Task[None]
) -> None:
    """End a start that failed or is no longer wanted.

    Raises:
        Exception: what `start_engine` raised.
    """
    given_up = starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().texts.close()
        await starting.result().engine.close(patience=0.0)
    if given_up and any(each.name == FETCHING for each in threading.enumerate()):
        os._exit(0)  # threads of the hub's library go on until all is downloaded
    await end(server, serving)
    if not starting.cancelled():
        starting.result()


def service_of(
    started: Started, config: EngineConfig, options: ServerOptions
) -> tuple[Service, Monitoring]:
    """Return the service of a running engine's model, and its monitoring."""
    engine, texts, sampling, embedding = started
    if options.sampling_defaults == "openai":
        sampling = {}
    for field, value in sampling.items():
        log.info("the default of %s is %g, as the model recommends", field, value)
    formats = ModelFormats(
        texts.template_source,
        options.tool_call_parser,
        shows_tools=texts.shows_tools,
        reasons=options.reasoning_parser == "auto",
        hides=texts.codec.hides,
        closes=options.disable_additional_properties,
    )
    name = options.names(config.model)[0]
    monitoring = Monitoring.of(engine, name, options.metrics_prefix)
    service = Service(
        engine, texts, name, options, monitoring.metrics, sampling, formats, embedding
    )
    return service, monitoring


def span_provider(endpoint: str) -> "TracerProvider":
    """Return a provider that sends spans to a collector.

    Raises:
        ValueError: the extra that does it is not installed.
    """
    try:
        from twolane.server.ops.tracing import make_provider
    except ImportError as error:
        problem = f"--otlp-endpoint needs an extra: pip install 'twolane[otel]' ({error})"
        raise ValueError(problem) from error
    return make_provider(endpoint)


def uvicorn_config(
    app: ASGIApp,
    options: ServerOptions,
    output: UnsentOutput,
    *,
    files_each: int = 1,
    refuse_early: EarlyCheck = lambda data, default_headers, unread: None,
) -> uvicorn.Config:
    """Return uvicorn's settings; the limit on open files is raised first.

    Args:
        app: the ASGI application.
        options: the bounds on connections.
        output: unsent output of all connections.
        files_each: open files that a connection takes.
        refuse_early: Refuses requests by their heads.
    """
    most = raise_file_limit() - open_files() - FILES_BESIDE
    most = max(1, (most - EXTRA_CONNECTIONS - ACCEPTED_AT_ONCE) // files_each)
    wanted = options.max_connections or MAX_CONNECTIONS
    if options.max_connections is not None and wanted > most:
        log.warning("--max-connections is %d: the limit on open files allows no more", most)
    limits = ConnectionLimits(min(wanted, most), options.arrival_seconds, options.stall_seconds)
    return uvicorn.Config(
        app,
        http=connection_class(limits, output, refuse_early),
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        proxy_headers=bool(options.trusted_proxies),
        forwarded_allow_ips=list(options.trusted_proxies),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=ENDING_SECONDS,
    )


async def tick(dashboard: Dashboard, server: UvicornServer) -> None:
    """Run the background tasks forever: readings for the dashboard, returning memory."""
    async with asyncio.TaskGroup() as group:
        group.create_task(dashboard.keep())
        group.create_task(return_memory(server))


async def return_memory(server: UvicornServer) -> None:
    """Return free memory to the system periodically: a large answer may be the last for long.

    Requests free theirs when they end; what a few leave in cycles waits until few are open.
    """
    collected_at = time.monotonic()
    while True:
        await asyncio.sleep(RETURN_SECONDS)
        now = time.monotonic()
        few = len(server.server_state.tasks) <= FEW_REQUESTS
        if collects := few or now - collected_at >= COLLECT_SECONDS:
            collected_at = now
        await asyncio.to_thread(garbage.return_free_memory, collects=collects)


class LoopErrors:
    """The loop's exception handler, which logs a lack of files in one line and unreachable clients
    not at all."""

    def __init__(self) -> None:
        self._logged_at = -ACCEPT_LOG_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """See `asyncio.loop.set_exception_handler`."""
        error = context.get("exception")
        number = error.errno if isinstance(error, OSError) else None
        if number in UNREACHABLE and isinstance(context.get("protocol"), Connection):
            log.debug("a client cannot be reached any more: %s", error)
        elif number not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged_at > ACCEPT_LOG_SECONDS:
            self._logged_at = time.monotonic()
            log.error("no connection can be accepted: %s", error)


def announce(text: str) -> None:
    """Print the announcement, or log it if standard output cannot be written to."""
    try:
        if write_taken(sys.stdout.fileno(), f"{text}\n".encode(errors="backslashreplace")):
            raise BlockingIOError("nobody reads it")
    except OSError as error:
        log.warning("%s (standard output: %s)", text, error)


async def serve_until_stopped(
    service: Service,
    server: UvicornServer,
    serving: asyncio.Task[None],
    stop: Stop,
    options: ServerOptions,
) -> int:
    """Serve HTTP; return the exit code."""
    engine = service.engine
    await first_of(serving, stop.asked.wait(), engine.failed.wait())
    if engine.failed.is_set():
        log.error("%s", engine.failure)
        await first_of(asyncio.sleep(FAILURE_SECONDS), stop.asked.wait())
    service.availability.draining = True
    if not engine.failed.is_set():
        await drain(server, serving, engine, stop, options.drain_seconds)
    await end(server, serving)
    return 1 if engine.failed.is_set() else 0


async def end(server: UvicornServer, serving: asyncio.Task[None]) -> None:
    """Close the listener and the connections, first those whose client does not read."""
    tasks = set(server.server_state.tasks)
    if tasks:
        await asyncio.wait(tasks, timeout=ENDING_SECONDS / 2)
    for connection in list(server.server_state.connections):
        if isinstance(connection, Connection) and connection.is_stalled:
            connection.transport.abort()
    server.should_exit = True
    await asyncio.wait({serving}, timeout=ENDING_SECONDS)
    server.force_exit = True
    await serving


async def drain(
    server: UvicornServer,
    serving: asyncio.Task[None],
    engine: EngineClient,
    stop: Stop,
    seconds: float,
) -> None:
    """Wait up to `seconds`, or until the second signal, for open requests; then abort them.

    The server listens all the while, so that probes and new requests are told (503).
    """
    log.info("stopping: open requests have %g s; a second signal stops now", seconds)
    # Those that come from now on are refused at once.
    ended = asyncio.gather(*server.server_state.tasks, return_exceptions=True)
    broken_off = (serving, stop.insisted.wait(), engine.failed.wait(), asyncio.sleep(seconds))
    await first_of(ended, *broken_off)
    engine.end_all("the server is shutting down")


async def first_of(*waits: Awaitable[object]) -> None:
    """Wait for the first of these; cancel the coroutines among them."""
    tasks = {asyncio.ensure_future(wait) for wait in waits}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks.difference(wait for wait in waits if isinstance(wait, asyncio.Future)):
        task.cancel()


def bind(host: str, port: int) -> socket.socket:
    """Bind and listen before the model is loaded, so that two servers cannot share an address.

    Args:
        host: the host's name or address; one of IPv6 may have brackets around it, as in a URL.
        port: 0 takes any.

    Raises:
        OSError: it cannot be had.
    """
    bare = host[1:-1] if ":" in host and host.startswith("[") and host.endswith("]") else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except UnicodeError as error:
        raise OSError(f"cannot listen on --host {host!r}: not a host name") from error
    except OSError as error:
        raise OSError(f"cannot listen on --host {host}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = with_port(bare, port)
        raise OSError(f"cannot listen on {where}: {error.strerror}") from error
    return listener


def warn_of_open_address(listener: socket.socket, options: ServerOptions) -> None:
    """Warn of a server that other machines reach and that wants no key."""
    host = listener.getsockname()[0].partition("%")[0]
    if not options.api_keys and not ipaddress.ip_address(host).is_loopback:
        log.warning(
            "ANYBODY WHO REACHES %s MAY USE THIS SERVER: it has no --api-key", address_of(listener)
        )


def address_of(listener: socket.socket) -> str:
    """Return the URL at which a socket listens."""
    host, port = listener.getsockname()[:2]
    return "http://" + with_port(host, port)


def with_port(host: str, port: int) -> str:
    """Return host and port in a URL's format."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
