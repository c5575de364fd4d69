"""A fleet whose servers are sockets that answer as a test writes it, byte by byte."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec

from tests.server.serving import PATIENCE
from twolane.fleet.hosts import ReplicaAddress
from twolane.fleet.options import FleetOptions
from twolane.fleet.pool import Pool
from twolane.fleet.process import StartError
from twolane.fleet.run import application
from twolane.router.state import ReplicaState
from twolane.server.http.backpressure import UnsentOutput
from twolane.server.options import ServerOptions
from twolane.server.run import UvicornServer, address_of, bind, uvicorn_config

Writer = asyncio.StreamWriter
Script = Callable[[str, bytes, Writer], Awaitable[None]]
"""Answers a request, given its path and its body; what it leaves open is closed."""


def whole(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """Return an answer with its length, behind which the connection is closed."""
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
"""The head of a stream of events."""


def chunk(data: bytes) -> bytes:
    """Return a piece of a body without a length; an empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Scripted:
    """A server: it says its state while it is `well`, and answers all else by its script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.well = True
        self.alive = True
        self.state = ReplicaState()
        self.stuck = False
        """Whether it takes questions for its state and answers none."""
        self.asked: list[str] = []
        """The paths of all requests but those for its state."""
        self.heads: list[str] = []
        """The heads of the same requests."""
        self.probes: list[str] = []
        """The heads of those for its state."""

    async def serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            path = head.split(" ")[1]
            lengths = [x for x in head.lower().split("\r\n") if x.startswith("content-length")]
            body = await reader.readexactly(int(lengths[0].split(":")[1]) if lengths else 0)
            if not path.startswith("/fleet/state"):
                self.asked.append(path)
                self.heads.append(head)
                await self.script(path, body, writer)
            else:
                self.probes.append(head)
                if self.stuck:
                    await reader.read()
                elif self.well:
                    writer.write(self.answer())
        writer.close()

    def answer(self) -> bytes:
        """Return what it says of its state."""
        return whole(msgspec.json.encode(self.state))


class ScriptedHosts:
    """Starts one server after the other; an exception in their place is raised."""

    def __init__(self, servers: Iterator[Scripted | Exception]) -> None:
        self._coming = servers
        self.servers: dict[str, Scripted] = {}
        self._listening: list[asyncio.Server] = []

    async def start(self, name: str) -> ReplicaAddress:
        server = next(self._coming, StartError("there are no more"))
        if isinstance(server, Exception):
            raise server
        self.servers[name] = server
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        self._listening.append(listening)
        port = listening.sockets[0].getsockname()[1]
        return ReplicaAddress(f"http://127.0.0.1:{port}", port)

    async def alive(self, name: str) -> bool:
        return self.servers[name].alive

    async def stop(self, name: str, patience: float) -> None:
        self.servers[name].alive = False

    async def close(self) -> None:
        for listening in self._listening:
            listening.close()


class Fleet:
    """A running fleet, and a client of it."""

    def __init__(
        self, pool: Pool, hosts: ScriptedHosts, server: UvicornServer, client: aiohttp.ClientSession
    ) -> None:
        self.pool, self.hosts, self.client, self._server = pool, hosts, client, server
        self.base = address_of(server.servers[0].sockets[0])

    @property
    def connections(self) -> Collection[Any]:
        """The connections of clients."""
        return self._server.server_state.connections

    async def ask(self, path: str = "/v1/completions", **body: object) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        async with self.client.post(self.base + path, json=body) as answer:
            return answer.status, await answer.read()

    async def metric(self, name: str) -> float:
        """Return the value of a series of the fleet's metrics, with its labels."""
        async with self.client.get(self.base + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), 0.0)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def fleet_of(
    *servers: Scripted | Exception,
    ready: int | None = None,
    keys: tuple[str, ...] = (),
    **options: object,
) -> AsyncIterator[Fleet]:
    """Run a fleet of these servers; the first of them are its replicas at the start.

    Args:
        servers: in the order of their start.
        ready: how many must serve before this returns; None: all.
        keys: API keys of the servers and the fleet.
        options: of the fleet.
    """
    count = len(servers) if ready is None else ready
    how = {"replicas": max(1, count), "probe_seconds": 0.01, "router": "round-robin", **options}
    hosts = ScriptedHosts(iter(servers))
    timeout = aiohttp.ClientTimeout(total=None)
    with bind("127.0.0.1", 0) as listener:
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            pool = Pool(hosts, FleetOptions(**how), session, keys, operator_key="o")  # type: ignore[arg-type]
            keeping = asyncio.create_task(pool.run())
            shared = ServerOptions(api_keys=keys)
            output = UnsentOutput()
            app, early = application(pool, session, shared, output)
            config = uvicorn_config(app, shared, output, refuse_early=early.refuse)
            server = UvicornServer(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            async with aiohttp.ClientSession(timeout=timeout) as client:
                while not server.started:
                    await asyncio.sleep(0.001)
                fleet = Fleet(pool, hosts, server, client)
                await fleet.until(lambda: len(pool.serving) >= count)
                try:
                    async with asyncio.timeout(PATIENCE):
                        yield fleet
                finally:
                    keeping.cancel()
                    pool.closing = True
                    server.should_exit = server.force_exit = True
                    await serving
                    await hosts.close()
