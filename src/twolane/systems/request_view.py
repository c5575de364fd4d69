"""The part of a request that systems see, by itself and in columns."""

from typing import Protocol

from twolane.slo import Slo


class RequestView(Protocol):
    """The part of a request that systems see."""

    @property
    def id(self) -> str:
        """Name of the request, unique over the life of the engine."""

    @property
    def arrival(self) -> float:
        """Time of arrival in seconds on the view's clock."""

    @property
    def priority(self) -> int:
        """Priority; requests with a lower value are served earlier."""

    @property
    def deadline(self) -> float | None:
        """Time in seconds at which the first token is due by the TTFT SLO; None without an SLO."""

    @property
    def slo(self) -> Slo:
        """Latency bounds of the request; the server's where it has none of its own."""

    @property
    def new(self) -> int:
        """`n`: prompt tokens that no launched batch has computed and the prefix cache lacks."""

    @property
    def reused(self) -> int:
        """`r`: prompt tokens in the prefix cache, or computed by chunks launched before."""

    @property
    def page_cost(self) -> int:
        """Free or reclaimable pages that admitting this request takes; 0 once it holds them."""

    @property
    def started(self) -> bool:
        """Whether the request holds a slot and pages, because some of its chunks were launched."""

    @property
    def generated(self) -> int:
        """Output tokens delivered (the done frontier)."""

    @property
    def first_token_at(self) -> float | None:
        """Time in seconds at which the device made the first output token, or at which the pacer
        released it; None before it is delivered."""

    @property
    def last_token_at(self) -> float | None:
        """Time in seconds at which the device made the latest output token, or the pacer released
        it; None before the first one is delivered."""

    @property
    def slack(self) -> float:
        """Seconds for which the latest token is held back; the device may take that much longer
        than the TBT bound for the next one."""

    @property
    def context(self) -> int:
        """Tokens in the KV cache at the launched frontier."""

    @property
    def to_generate(self) -> int:
        """Output tokens that may still be launched before the request reaches its limit."""
