"""Settings of a fleet, besides those of its replicas."""

from typing import Annotated, Literal

import msgspec

from twolane.common.errors import FieldError
from twolane.common.options import Option

PANEL = "Fleet"
MAX_REPLICAS = 1024
"""Most servers of a fleet: its process asks each of them for its state, again and again."""
RouterName = Literal["predicted", "round-robin", "power-of-two", "least-loaded", "ray-prefix"]
"""The names of `router.policies.POLICIES`."""


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a fleet, besides the options of `twolane serve`."""

    host: Annotated[str, Option(PANEL)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of the machine, :: every address."""
    port: Annotated[int, Option(PANEL, least=0, most=65535)] = 8000
    """Port to listen on; 0 takes any free port."""
    replicas: Annotated[int, Option(PANEL, least=1, most=MAX_REPLICAS)] = 2
    """Number of servers at the start."""
    min_replicas: Annotated[int | None, Option(PANEL, least=1, most=MAX_REPLICAS)] = None
    """Smallest number of servers; by default --replicas."""
    max_replicas: Annotated[int | None, Option(PANEL, least=1, most=MAX_REPLICAS)] = None
    """Largest number of servers, under load; by default --replicas."""
    router: Annotated[RouterName, Option(PANEL)] = "predicted"
    """Rule by which a server is chosen: predicted takes the shortest predicted time to the first
    token; the others are for comparison."""
    hosts: Annotated[Literal["ray", "local"], Option(PANEL)] = "ray"
    """Where servers run: in Ray actors (needs twolane[ray]), or as local child processes."""
    ray_address: Annotated[str | None, Option(PANEL)] = None
    """Ray cluster to use, such as auto or ray://head:10001; by default one is started here."""
    replica_cpus: Annotated[float, Option(PANEL, least=0.0)] = 1.0
    """Number of Ray CPUs that each server takes."""
    replica_gpus: Annotated[float, Option(PANEL, least=0.0)] = 0.0
    """Number of Ray GPUs that each server takes, all on one machine; set it to the number of
    ranks."""
    direct: Annotated[bool, Option(PANEL)] = False
    """Whether requests are redirected (307) to the chosen server, so that tokens come straight from
    it; clients must reach the servers and follow redirects."""
    probe_seconds: Annotated[float, Option(PANEL, "SECONDS", least=0.01)] = 0.25
    """Seconds between two polls of a server's state."""
    probe_timeout: Annotated[float, Option(PANEL, "SECONDS", least=0.01)] = 2.0
    """Seconds within which a server must report its state; a server that does not gets no requests
    until it does."""
    silent_seconds: Annotated[float, Option(PANEL, "SECONDS", least=0.1)] = 10.0
    """Seconds without a report after which a server's open answers end with an error."""
    replace_seconds: Annotated[float, Option(PANEL, "SECONDS", least=0.1)] = 60.0
    """Seconds without a report after which a server is killed and replaced."""
    drain_seconds: Annotated[float, Option(PANEL, "SECONDS", least=0.0)] = 60.0
    """Seconds that open answers have to end before a server is stopped."""
    scale_up_queue: Annotated[float, Option(PANEL, "SECONDS", least=0.001)] = 0.5
    """Seconds of queued prompts for each server above which one is added."""
    scale_up_open: Annotated[float, Option(PANEL, least=0.1)] = 16.0
    """Number of open requests for each server above which one is added."""
    scale_up_seconds: Annotated[float, Option(PANEL, "SECONDS", least=0.0)] = 2.0
    """Seconds for which the load must be high before a server is added."""
    scale_down_seconds: Annotated[float, Option(PANEL, "SECONDS", least=0.0)] = 60.0
    """Seconds for which one server fewer must suffice before one is stopped."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest number of servers.

        Raises:
            FieldError: they contradict each other.
        """
        least = self.replicas if self.min_replicas is None else self.min_replicas
        most = self.replicas if self.max_replicas is None else self.max_replicas
        if not least <= self.replicas <= most:
            problem = f"must be between min-replicas and max-replicas, not {self.replicas}"
            raise FieldError("replicas", problem)
        return least, most
