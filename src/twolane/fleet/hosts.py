"""Hosts of replicas: child processes of this one, or Ray actors."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from twolane.common.errors import FieldError
from twolane.fleet.process import ReplicaProcess, StartError

log = logging.getLogger("twolane.fleet")

PLACE_SECONDS = 15.0
"""Seconds between two log lines about a replica for which the cluster has no room."""
TRUSTED = "--trusted-proxies"
"""Option by which replicas believe the fleet, which names the client of each request."""
ACTOR_SECONDS = 10.0
"""Seconds within which an actor must answer; it only holds a process."""


class ReplicaAddress(NamedTuple):
    """URL and process of a replica."""

    url: str
    pid: int
    """Process id on the replica's machine."""


class Hosts(Protocol):
    """Starts and stops replicas."""

    async def start(self, name: str) -> ReplicaAddress:
        """Start a replica; return when it serves.

        Raises:
            StartError: it did not.
        """

    async def alive(self, name: str) -> bool:
        """Return whether a replica's process is running."""

    async def stop(self, name: str, patience: float) -> None:
        """Ask a replica to end, and kill it after `patience` seconds."""

    async def close(self) -> None:
        """Kill all replicas."""


class LocalHosts:
    """Runs replicas as child processes.

    Args:
        arguments: Command-line arguments of `twolane serve`.
        variables: Environment variables of the replicas, besides those of this process.
    """

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self._arguments = [*arguments, TRUSTED, "127.0.0.1"]
        self._variables = variables
        self._processes: dict[str, ReplicaProcess] = {}

    async def start(self, name: str) -> ReplicaAddress:
        """See `Hosts.start`."""
        process = await asyncio.to_thread(
            ReplicaProcess, self._arguments, "127.0.0.1", self._variables
        )
        self._processes[name] = process  # so that it can be stopped before it serves
        return ReplicaAddress(await asyncio.to_thread(process.wait_for_url), process.pid)

    async def alive(self, name: str) -> bool:
        """See `Hosts.alive`."""
        return name in self._processes and self._processes[name].alive

    async def stop(self, name: str, patience: float) -> None:
        """See `Hosts.stop`."""
        if (process := self._processes.get(name)) is not None:
            await asyncio.to_thread(process.stop, patience)
            self._processes.pop(name, None)

    async def close(self) -> None:
        """See `Hosts.close`."""
        await asyncio.gather(*(self.stop(name, 0.0) for name in list(self._processes)))


class Actor:
    """The Ray actor that holds one replica, which is killed with it."""

    def start(
        self, arguments: Sequence[str], host: str | None, variables: Mapping[str, str]
    ) -> ReplicaAddress:
        """Start the replica on the actor's machine, listening at `host` or at the node's
        address."""
        import ray

        host = host or ray.util.get_node_ip_address()
        self._process = ReplicaProcess(arguments, host, variables)
        return ReplicaAddress(self._process.wait_for_url(), self._process.pid)

    def alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.alive

    def stop(self, patience: float) -> None:
        """See `ReplicaProcess.stop`."""
        self._process.stop(patience)


class RayHosts:
    """Runs replicas as actors of a Ray cluster, each with its CPUs and GPUs on one machine.

    Args:
        arguments: Command-line arguments of `twolane serve`.
        variables: Environment variables of the replicas, besides those of the actors.
        address: Address of the Ray cluster; None starts one on this machine.
        cpus: Ray's CPUs that each replica takes.
        gpus: Ray's GPUs that each replica takes; Ray shows it these alone.
        replicas: their number at the start.
        most: largest number of replicas.

    Raises:
        ValueError: Ray is not installed.
        FieldError: this machine is all of the cluster, and has fewer GPUs than the replicas take.
        ConnectionError: there is no cluster at the address.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        address: str | None,
        cpus: float,
        gpus: float,
        replicas: int,
        most: int,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            problem = f"--hosts ray needs an extra: pip install 'twolane[ray]' ({error})"
            raise ValueError(problem) from error
        own: dict[str, Any] = {}
        if address is None:  # its scheduler counts; it binds nobody to cores
            own = {"num_cpus": max(1, round(cpus * most + 0.5)), "object_store_memory": 80 << 20}
            own["include_dashboard"] = False
        ray.init(address=address, namespace="twolane", log_to_driver=True, **own)
        if address is None and (there := ray.cluster_resources().get("GPU", 0)) < replicas * gpus:
            ray.shutdown()
            problem = f"is {gpus:g} for each of {replicas} replicas, but Ray finds {there:g} GPUs"
            raise FieldError("replica_gpus", problem)
        self._ray, self._wanted = ray, f"{cpus:g} CPUs and {gpus:g} GPUs"
        self._class = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(Actor)
        self._host = "127.0.0.1" if address is None else None
        router = "127.0.0.1" if address is None else ray.util.get_node_ip_address()
        self._arguments = [*arguments, TRUSTED, router]
        self._variables = dict(variables)
        self._actors: dict[str, Any] = {}

    async def start(self, name: str) -> ReplicaAddress:
        """See `Hosts.start`."""
        actor = self._class.remote()
        try:
            await self._placed(name, actor)
            started: ReplicaAddress = await actor.start.remote(
                self._arguments, self._host, self._variables
            )
        except self._ray.exceptions.RayError as error:
            self._ray.kill(actor)
            raise StartError(str(error).strip().splitlines()[-1]) from error
        self._actors[name] = actor
        return started

    async def _placed(self, name: str, actor: Any) -> None:
        """Wait until Ray has placed an actor; log the wait now and then."""
        placed = asyncio.wrap_future(actor.__ray_ready__.remote().future())
        while not (await asyncio.wait({placed}, timeout=PLACE_SECONDS))[0]:
            free = await asyncio.to_thread(self._ray.available_resources)
            log.warning(
                "%s waits for a machine of the Ray cluster with %s; free are %g CPUs and %g GPUs",
                *(name, self._wanted, free.get("CPU", 0), free.get("GPU", 0)),
            )
        placed.result()

    async def alive(self, name: str) -> bool:
        """See `Hosts.alive`."""
        try:
            async with asyncio.timeout(ACTOR_SECONDS):
                return bool(await self._actors[name].alive.remote())
        except (KeyError, TimeoutError, self._ray.exceptions.RayError):
            return False

    async def stop(self, name: str, patience: float) -> None:
        """See `Hosts.stop`."""
        actor = self._actors.pop(name, None)
        if actor is None:
            return
        try:
            async with asyncio.timeout(patience + ACTOR_SECONDS):
                await actor.stop.remote(patience)
        except (TimeoutError, self._ray.exceptions.RayError):
            pass  # it is killed with its actor
        self._ray.kill(actor)

    async def close(self) -> None:
        """See `Hosts.close`."""
        await asyncio.gather(*(self.stop(name, 0.0) for name in list(self._actors)))
        await asyncio.to_thread(self._ray.shutdown)
