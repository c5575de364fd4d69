"""`twolane fleet` from start to end."""

import asyncio
import logging
import secrets
import signal
from collections.abc import Sequence

import aiohttp
from starlette.types import ASGIApp

import twolane
from twolane.common import garbage
from twolane.common.errors import FieldError
from twolane.common.resources import SHORT_SLICE, ask_for_slice
from twolane.fleet.hosts import Hosts, LocalHosts, RayHosts
from twolane.fleet.ingress import Ingress
from twolane.fleet.metrics import PREFIX
from twolane.fleet.options import FleetOptions
from twolane.fleet.pool import Pool
from twolane.fleet.routing_facts import GENERATING_PATHS
from twolane.router.policies import POLICIES
from twolane.server.announcement import bounds
from twolane.server.http.backpressure import UnsentCollector, UnsentOutput
from twolane.server.http.entry import EarlyGate
from twolane.server.http.gate import Gate
from twolane.server.http.methods import cross_origin
from twolane.server.options import OPERATOR_VARIABLE, ServerOptions
from twolane.server.run import (
    LoopErrors,
    Stop,
    UvicornServer,
    address_of,
    announce,
    bind,
    end,
    first_of,
    return_memory,
    serving_at,
    set_up_log,
    uvicorn_config,
    warn_of_open_address,
)
from twolane.slo import Slo

log = logging.getLogger("twolane.fleet")


def serve_fleet(arguments: Sequence[str], options: FleetOptions, shared: ServerOptions) -> int:
    """Serve until told to stop; return the exit code.

    SIGINT and SIGTERM end it when open answers have ended, and a second one at once; SIGHUP
    restarts all replicas, one after the other.

    Args:
        arguments: Command-line arguments of `twolane serve` for each replica, without host and
            port.
        options: Options of the fleet.
        shared: The replicas' server options that also hold at the fleet's address.

    Raises:
        FieldError: options contradict each other.
        OSError: the address cannot be had.
        ValueError: Ray is not installed.
    """
    set_up_log("info")
    garbage.bound_heaps()
    ask_for_slice(SHORT_SLICE)
    return asyncio.run(_run(arguments, options, shared))


def application(
    pool: Pool, session: aiohttp.ClientSession, shared: ServerOptions, output: UnsentOutput
) -> tuple[ASGIApp, EarlyGate]:
    """Return the ASGI application at the fleet's address, with the same gate as a replica, and what
    refuses requests by their heads before it.

    Args:
        pool: the replicas.
        session: HTTP client for requests to replicas.
        shared: see `serve_fleet`.
        output: unsent output of the fleet's clients.
    """
    ingress = Ingress(pool, POLICIES[pool.options.router](), session, shared.max_body_bytes)
    ingress.metrics.registry.register(UnsentCollector(output, PREFIX))
    # Bodies are kept, to be sent to another replica.
    bounds = shared.api_keys, shared.max_body_bytes
    gate = Gate(
        ingress,
        *bounds,
        allowed_hosts=shared.hosts,
        operator_key=shared.operator_key,
        keeps_bodies=True,
        on_refusal=ingress.metrics.count,
    )
    early = EarlyGate(
        gate,
        GENERATING_PATHS,
        lambda data: ingress.watches,
        ingress.check_arrival,
        lambda path, error: ingress.metrics.count(error.code),
    )
    return cross_origin(gate, shared.cors_origins), early


def hosts_of(arguments: Sequence[str], options: FleetOptions, operator_key: str) -> Hosts:
    """Return the hosts that the options ask for.

    Replicas get the operator's key by the environment, which nobody else can read.
    """
    variables = {OPERATOR_VARIABLE: operator_key}
    if options.hosts == "local":
        if options.replica_gpus:
            raise FieldError("replica_gpus", "needs --hosts ray, not local")
        return LocalHosts(arguments, variables)
    _, most = options.bounds
    room = options.replica_cpus, options.replica_gpus, options.replicas
    # A restart starts a successor first, so there may be one more replica than `most`.
    return RayHosts(arguments, variables, options.ray_address, *room, most + 1)


def announcement(model: str, options: FleetOptions, address: str, said: str) -> str:
    """Return the two lines that are printed once the fleet accepts requests.

    As those of `twolane serve`: parts by " | ", of which the second is the address and the last
    `said` of the latency bounds.
    """
    least, most = options.bounds
    room = "" if least == most else f" ({least} to {most})"
    return (
        f"Twolane {twolane.__version__} | {address} | {model} | fleet of {options.replicas}{room}, "
        f"router {options.router}, hosts {options.hosts} | {said}\n"
        f"Servers, each with a dashboard: {address}/fleet"
    )


async def _run(arguments: Sequence[str], options: FleetOptions, shared: ServerOptions) -> int:
    again = asyncio.Event()
    with bind(options.host, options.port) as listener:
        # The router and the replicas share one, whether or not a person has it.
        operator_key = shared.operator_key or secrets.token_urlsafe()
        hosts = hosts_of(arguments, options, operator_key)
        loop = asyncio.get_running_loop()  # after Ray, which has handlers of its own
        loop.set_exception_handler(LoopErrors())
        stop = Stop()
        loop.add_signal_handler(signal.SIGHUP, again.set)
        # Answers may take any time: the pool ends those of lost replicas.
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
        )
        async with session:
            pool = Pool(
                hosts,
                options,
                session,
                shared.api_keys,
                operator_key=operator_key,
                refuse_late=shared.refuse_late,
            )
            output = UnsentOutput()
            app, early = application(pool, session, shared, output)
            # Open files per client connection: its own, and those to two replicas.
            config = uvicorn_config(app, shared, output, files_each=3, refuse_early=early.refuse)
            server = UvicornServer(config)
            serving = await serving_at(listener, server)  # probes are answered while servers start
            keeping = asyncio.create_task(pool.run())
            await first_of(pool.started.wait(), stop.asked.wait())
            if pool.failure is not None or stop.asked.is_set():
                keeping.cancel()
                await first_of(pool.close(), stop.insisted.wait())
                await hosts.close()
                await end(server, serving)
                return 0 if stop.asked.is_set() else 1
            restarting = asyncio.create_task(_restart(pool, again))
            returning = asyncio.create_task(return_memory(server))
            garbage.freeze(clients=True)
            slo = next((each.state.slo for each in pool.serving), Slo())
            said = bounds(slo, refuses=shared.refuse_late)
            warn_of_open_address(listener, shared)
            announce(announcement(arguments[0], options, address_of(listener), said))
            await first_of(stop.asked.wait(), serving)
            for task in (keeping, restarting, returning):
                task.cancel()
            log.info(
                "stopping: open answers have %g s; a second signal stops now", options.drain_seconds
            )
            await first_of(pool.close(), stop.insisted.wait())
            await hosts.close()
            await end(server, serving)
    return 0


async def _restart(pool: Pool, asked: asyncio.Event) -> None:
    """Restart all replicas whenever `asked` is set."""
    while True:
        await asked.wait()
        asked.clear()
        log.info("restarting all replicas, one after the other")
        if await pool.restart():
            log.info("all replicas have been restarted")
        else:
            log.error("restart stopped: a new replica could not start")
