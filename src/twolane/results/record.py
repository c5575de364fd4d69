"""Record of one request at the client."""

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
    """Return the outcome of an HTTP status other than 200, such as `status_429`."""
    return f"status_{status}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was sent, with its outcome. Times in seconds.

    `scheduled`, `sent`, `ended` and `token_times` count from the start of the run.
    """

    index: int
    """Index in the workload."""
    asked_prompt: int
    """Number of prompt tokens in the workload."""
    asked_output: int
    """Number of output tokens in the workload (`max_tokens`)."""
    scheduled: float
    waited: float
    """Seconds that it was held back by the bound on concurrency."""
    sent: float
    ended: float
    """Time of the stream's last event, or of the failure."""
    outcome: str
    """`ok`, `status_<code>`, `timeout`, `connect` (no connection), `disconnect` (the stream ended
    early), `malformed` (not what the API promises), `stream_error` (an error sent inside the
    stream) or `interrupted` (the run was stopped)."""
    error: str = ""
    token_times: tuple[float, ...] = ()
    """Arrival times of the chunks with output."""
    chunk_tokens: tuple[int, ...] = ()
    """Number of tokens in each of these chunks; empty where the server does not tell."""
    usage_prompt: int | None = None
    """Number of prompt tokens by the server's count; None where it counts none."""
    usage_output: int | None = None
    """Number of output tokens by the server's count."""
    usage_cached: int | None = None
    """Number of prompt tokens from the prefix cache by the server's count."""
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.outcome == OK

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens by the server's count, else as in the workload."""
        return self.asked_prompt if self.usage_prompt is None else self.usage_prompt

    @property
    def output_tokens(self) -> int:
        """Number of output tokens by the server's count, else of chunks, a lower bound."""
        return len(self.token_times) if self.usage_output is None else self.usage_output

    @property
    def new_tokens(self) -> int:
        """Number of prompt tokens not in the prefix cache; all, unless the server reports cached
        ones."""
        return self.prompt_tokens - (self.usage_cached or 0)

    @property
    def counted(self) -> bool:
        """Whether the number of tokens in each chunk is known."""
        return bool(self.chunk_tokens) or len(self.token_times) == self.output_tokens

    @property
    def arrivals(self) -> list[float]:
        """Arrival time of each token, which is that of its chunk; of each chunk where the number of
        its tokens is unknown."""
        if not self.chunk_tokens:
            return list(self.token_times)
        chunks = zip(self.token_times, self.chunk_tokens, strict=True)
        return [at for at, tokens in chunks for _ in range(tokens)]

    @property
    def lag(self) -> float:
        """Seconds that the client itself sent the request late."""
        return self.sent - self.scheduled - self.waited

    @property
    def ttft(self) -> float | None:
        """Time of the first chunk with output − sent; None: there is none."""
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        """TBT: seconds between consecutive chunks with output."""
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
