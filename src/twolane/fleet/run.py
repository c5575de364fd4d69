"""`twolane fleet`: from its start to its end."""

import asyncio
import logging
import signal
from collections.abc import Sequence

import aiohttp
import uvicorn
from starlette.types import ASGIApp

from twolane.fleet.hosts import Hosts, LocalHosts, RayHosts
from twolane.fleet.ingress import Ingress
from twolane.fleet.options import FleetOptions, ReplicaOptions
from twolane.fleet.pool import Pool
from twolane.router.policies import POLICIES
from twolane.server.http.cross_origin import cross_origin
from twolane.server.run import (
    BACKLOG,
    KEEP_ALIVE_SECONDS,
    UvicornServer,
    address_of,
    announce,
    bind,
    first_of,
)

log = logging.getLogger("twolane.fleet")


def serve_fleet(
    arguments: Sequence[str],
    options: FleetOptions,
    shared: ReplicaOptions,
) -> int:
    """Serve until told to stop; return the exit code.

    SIGINT and SIGTERM end it when open answers have ended; SIGHUP restarts all replicas, one after
    the other.

    Args:
        arguments: of `twolane serve` for each replica, without host and port.
        options: of the fleet.
        shared: of the replicas, as far as they hold at the fleet's address.

    Raises:
        FieldError: options contradict each other.
        OSError: the address cannot be had.
        ValueError: Ray is not installed.
    """
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return asyncio.run(_run(arguments, options, shared))


def hosts_of(arguments: Sequence[str], options: FleetOptions) -> Hosts:
    """Return where replicas run."""
    if options.hosts == "local":
        return LocalHosts(arguments)
    _, most = options.bounds
    cpus, gpus = options.replica_cpus, options.replica_gpus
    # One more than there may be: a restart starts a successor first.
    return RayHosts(arguments, options.ray_address, cpus, gpus, most + 1)


async def _run(arguments: Sequence[str], options: FleetOptions, shared: ReplicaOptions) -> int:
    least, _ = options.bounds
    stop, again = asyncio.Event(), asyncio.Event()
    with bind(options.host, options.port) as listener:
        hosts = hosts_of(arguments, options)
        loop = asyncio.get_running_loop()  # after Ray, which has handlers of its own
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, again.set)
        # Answers may take as long as they do: who watches the replicas ends them.
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
        )
        async with session:
            pool = Pool(hosts, options, session, shared.api_keys)
            keeping = asyncio.create_task(pool.run())
            await first_of(pool.started.wait(), stop.wait())
            if pool.failure is not None or stop.is_set():
                keeping.cancel()
                await pool.close()
                return 0 if stop.is_set() else 1
            policy = POLICIES[options.router]()
            ingress = Ingress(pool, policy, session, shared.max_body_bytes)
            server = UvicornServer(_uvicorn(cross_origin(ingress, shared.cors_origins)))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            restarting = asyncio.create_task(_restart(pool, again))
            announce(
                f"twolane fleet of {options.replicas} | {address_of(listener)} | "
                f"router {options.router}, {options.hosts} hosts, at least {least}"
            )
            await first_of(stop.wait(), serving)
            for task in (keeping, restarting):
                task.cancel()
            await pool.close()
            server.should_exit = True
            await serving
    return 0


async def _restart(pool: Pool, asked: asyncio.Event) -> None:
    """Restart all replicas whenever that is asked for."""
    while True:
        await asked.wait()
        asked.clear()
        log.info("all replicas are restarted, one after the other")
        await pool.restart()
        log.info("all replicas were restarted")


def _uvicorn(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="none",
        http="h11",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
