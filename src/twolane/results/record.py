"""What the client saw of one request."""

from itertools import pairwise

import msgspec

OK = "ok"
TIMEOUT = "timeout"
CONNECT = "connect"
DISCONNECT = "disconnect"
MALFORMED = "malformed"
STREAM_ERROR = "stream_error"
INTERRUPTED = "interrupted"


def status_outcome(status: int) -> str:
    """The outcome of an answer with an HTTP status other than 200, such as `status_429`."""
    return f"status_{status}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was sent, and the one outcome it ended in. Times in seconds.

    `scheduled`, `sent`, `ended` and `token_times` count from the start of the run.
    """

    index: int
    """Its place in the workload."""
    asked_prompt: int
    """Prompt tokens the workload asks for."""
    asked_output: int
    """Output tokens the workload asks for (`max_tokens`)."""
    scheduled: float
    waited: float
    """Time it was held back by the bound on concurrency."""
    sent: float
    ended: float
    """Last event of the stream, or the failure."""
    outcome: str
    """`ok`, `status_<code>`, `timeout`, `connect` (no connection), `disconnect` (the stream ended
    early), `malformed` (not what the API promises), `stream_error` (an error sent inside the
    stream) or `interrupted` (the run was stopped)."""
    error: str = ""
    token_times: tuple[float, ...] = ()
    """When each chunk with output came."""
    usage_prompt: int | None = None
    """Prompt tokens by the server's count."""
    usage_output: int | None = None
    """Output tokens by the server's count."""
    usage_cached: int | None = None
    """Prompt tokens that the server found in its prefix cache, by its count."""
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether a whole answer came."""
        return self.outcome == OK

    @property
    def prompt_tokens(self) -> int:
        """By the server's count where it gives one, else as asked."""
        return self.asked_prompt if self.usage_prompt is None else self.usage_prompt

    @property
    def output_tokens(self) -> int:
        """By the server's count where it gives one, else the chunks, which is a lower bound."""
        return len(self.token_times) if self.usage_output is None else self.usage_output

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that the server had to compute; all, unless it says otherwise."""
        return self.prompt_tokens - (self.usage_cached or 0)

    @property
    def lag(self) -> float:
        """Send time beyond the schedule that is the client's own doing."""
        return self.sent - self.scheduled - self.waited

    @property
    def ttft(self) -> float | None:
        """First chunk with output − sent; None if none came."""
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        """TBT: the time between each two consecutive chunks with output."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def e2e(self) -> float:
        """Ended − sent."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """(E2E − TTFT) / (tokens − 1); None below two tokens."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)
