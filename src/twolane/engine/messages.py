"""Messages between the API process and the engine process: msgspec structs over ZeroMQ.

A message is one msgpack-encoded struct, tagged with its type. The API process sends those of
`ToEngine`; the engine sends `Progress` while it starts, `Ready` once, then one `Outputs` for every
turn of its loop that has results. For every `Submit` the engine sends exactly one ending: an
`Output` with a `finish` reason, or a `Refused`; after an `Abort` it sends nothing more for that
request except the `Output` with finish "abort".
"""

from typing import Literal

import msgspec

from twolane.devices import LaneName
from twolane.engine.constrained.vocabulary import Vocabulary as Vocabulary
from twolane.engine.prompt_work import UNKNOWN, PromptPace, PromptWork, WaitingPrompt
from twolane.sampling import PackedLogprobs as PackedLogprobs
from twolane.sampling import SamplingParams
from twolane.sampling import TokenLogprobs as TokenLogprobs
from twolane.slo import Slo

FinishReason = Literal["stop", "length", "abort"]
RefusedCode = Literal["invalid", "too_long", "refused", "broken", "unknown_model"]


class TokenRules(msgspec.Struct, frozen=True):
    """Rules on an answer's tokens that the API process has made with the tokenizer."""

    banned: tuple[tuple[int, ...], ...] = ()
    """Tokens of `bad_words`: sequences that the output does not contain, none empty."""
    allowed: bytes | None = None
    """Mask of `allowed_token_ids`, a bit for each token, the lowest first; None allows all."""
    ends: tuple[int, ...] = ()
    """Tokens that only the tokenizer's files declare as the ends of an answer. They end it as the
    model's end-of-sequence tokens do."""
    thinking: tuple[int, int] | None = None
    """Tokens that begin and end the thinking of `thinking_token_budget`."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request. `id` is unique over the life of the engine."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    """Lower values are served earlier, as in vLLM."""
    slo: Slo = Slo()
    """Latency bounds; None in a field is the server's default."""
    leader: str | None = None
    """The first of several requests with this prompt (`n` > 1): this one is held back until the
    leader's prompt is in the prefix cache, or the leader has ended."""
    cache_salt: str | None = None
    """Prefixes are shared with requests of the same salt alone."""
    lora: str | None = None
    """Name of the adapter that answers; None: the base model does."""
    rules: TokenRules = TokenRules()
    """Rules on the output's tokens that follow from `params`."""
    key: int | None = None
    """Index of the client's API key; keys take turns. None: it has none."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request without a full answer; unknown and finished ids are ignored."""

    id: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The answer is complete with its first `tokens` tokens: a stop string was found.

    The request ends with finish "stop"; unknown and finished ids are ignored.
    """

    id: str
    tokens: int


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Report every launch that ends in the next `seconds`."""

    seconds: float


class ForgetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache: no later request reuses what is in it now."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load a LoRA adapter; answered by one `AdapterResult`."""

    name: str
    path: str
    """Directory of a PEFT checkpoint."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Unload a LoRA adapter when its last request has ended; one `AdapterResult` answers then."""

    name: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for `Outputs` with `waits`, which shows that the loop makes turns."""


class DeliveryLateness(msgspec.Struct, frozen=True, tag=True):
    """By how much tokens with a due time were written late in the last second."""

    spread: float
    """P99 minus median, in seconds."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A step of the engine's start."""

    stage: str
    fraction: float
    """Share of this stage that is done, in [0, 1]."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is up."""

    system: str
    device: str
    units: int
    levels: list[tuple[int, int]]
    """Partitions (prefill units, decode units) on offer."""
    max_model_len: int
    """The most tokens, prompt and output together, that one request can have."""
    kv_tokens: int
    """Number of tokens that the KV pool holds."""
    page_size: int
    """Number of tokens in a KV page."""
    vocab_size: int
    eos_token_ids: list[int]
    slo: Slo = Slo()
    """Bounds of requests that bring none."""
    profile: str | None = None
    """File of the profile that predictions are fitted on; None: there is none."""
    kv_cache_dtype: str = "auto"
    """Format of keys and values in the KV pool: fp8, or auto, which is that of activations."""
    adapters: dict[str, str] = {}
    """Digests of the LoRA adapters that are loaded, in hexadecimal, by name."""
    prefix_cache: bool = True
    """Whether prompts reuse what earlier ones with the same beginning have computed."""
    state_bytes: int = 0
    """Bytes of the states of a request, and of a snapshot of them; 0: the model has none."""
    max_running: int = 0
    """The most requests in prefill and decode together."""


class Times(msgspec.Struct, frozen=True):
    """Seconds that a request spent in each phase; None for a phase that it did not finish."""

    taken: float | None = None
    """Arrival in seconds on the lanes' clock, which is the machine's monotonic one on a device."""
    queue: float | None = None
    """Arrival to first admission."""
    prefill: float | None = None
    """First admission to first token."""
    decode: float | None = None
    """First token to last."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request; the last one of a request carries `finish`."""

    id: str
    tokens: list[int]
    finish: FinishReason | None = None
    cached: int | None = None
    """Prompt tokens found in the prefix cache; with the first tokens only."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each of `tokens`, if asked for."""
    prompt_logprobs: PackedLogprobs | None = None
    """Log-probabilities of each prompt token but the first, if asked for; they come with the first
    tokens only."""
    embedding: bytes | None = None
    """The last hidden state of the prompt's last token in float32, if asked for; with the first
    tokens only."""
    times: Times | None = None
    """Seconds of the request's phases; given with `finish`."""
    due: float | None = None
    """Seconds on the monotonic clock at which the API process delivers it; None: at once."""


GRAMMAR = "grammar"
"""The field of a request's parameters that has its grammar."""


class Refused(msgspec.Struct, frozen=True):
    """The request cannot be served; `message` names what is wrong."""

    id: str
    code: RefusedCode
    message: str
    field: str | None = None
    """Name of the field of the request that is at fault, with which `message` begins."""


class Stats(msgspec.Struct, frozen=True):
    """The engine's gauges, and its counters since the start."""

    running: int = 0
    """Requests in decode."""
    prefilling: int = 0
    waiting: int = 0
    kv_pages: int = 0
    kv_pages_free: int = 0
    kv_pages_cached: int = 0
    """Pages that only the prefix cache holds: reclaimable."""
    states: int = 0
    """Requests that the pool has states for; 0: the model has none."""
    states_free: int = 0
    """Those of them that no request has."""
    snapshots: int = 0
    """Snapshots of states that the pool has room for."""
    snapshots_held: int = 0
    """Snapshots of states that requests can begin with."""
    snapshot_hits: int = 0
    """Requests that began with a snapshot."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    """Requests that lost their pages to others and were recomputed."""
    broken: int = 0
    """Requests that ended because the model gave NaN or infinity."""
    queued: PromptWork = PromptWork()
    """Work left for the requests without a first token."""
    counted: int = 0
    """Number of requests that had been submitted when `queued` was counted."""
    yielding: list[WaitingPrompt] | None = None
    """The largest queued prompts that may be given up for smaller ones; None: the system gives up
    none."""
    prompt_token_seconds: float = 0.0
    """Seconds that launches with prompts have lately taken for each prompt token; 0: not known."""
    prompt_pace: PromptPace = UNKNOWN
    """Measured seconds for each prompt, each token and each pair of tokens."""
    seconds: list[tuple[str, int, float]] = []
    """(lane, units, seconds of device work done on them)."""


class Launched(msgspec.Struct, frozen=True):
    """A launch that has ended: layers of prompts, decode steps, or both in one pass."""

    lane: LaneName
    units: int
    start: float
    """Start on the device, in seconds on the lanes' clock."""
    end: float
    """End on the device, in seconds on the lanes' clock."""
    layers: tuple[int, int]
    """Layers of the prompts, first to end (exclusive); (0, 0) without prompts."""
    prompts: list[str]
    """Ids of the requests whose prompts were computed."""
    new: int
    """Tokens, of prompts and of decode rows."""
    reused: int
    """Tokens of context that they stand on."""
    decoding: int
    """Requests that got a decode step."""
    steps: int
    predicted: float | None
    """Seconds."""
    reason: str
    """The plan's."""


class AdapterResult(msgspec.Struct, frozen=True):
    """Result of a `LoadAdapter` or an `UnloadAdapter`."""

    name: str
    loaded: bool
    """Whether requests can ask for the adapter from now on."""
    problem: str | None = None
    """Why it was not done; None: it was."""
    digest: str = ""
    """Digest of the adapter that was loaded, in hexadecimal."""


class LaneWait(msgspec.Struct, frozen=True):
    """Time for which the engine has waited for the first launch in a lane."""

    lane: LaneName
    seconds: float
    """Seconds since the lane could begin with the launch, or since its latest finished step."""
    predicted: float | None
    """Predicted seconds of the whole launch, if there is a prediction."""


class Outputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The results of one turn of the loop."""

    outputs: list[Output]
    refused: list[Refused]
    stats: Stats
    launches: list[Launched] = []
    """Launches that ended while a `Watch` was in force."""
    waits: list[LaneWait] | None = None
    """The answer to a `Ping`: one entry for each lane that has work; None without a `Ping`."""
    silences: list[float] = []
    """Seconds since ranks 1 and up last gave a sign of life; with `waits`."""
    landmarks: dict[int, int] = {}
    """Changes of the prefix tree's landmarks (`engine/kv/prefix_digest.py`): length in pages by
    hash, 0 for what is gone."""
    adapters: list[AdapterResult] = []


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; it exits after this message."""

    message: str
    field: str | None = None
    """Setting at fault, with whose name the message begins."""


ToEngine = (
    Submit
    | Vocabulary
    | Abort
    | Finish
    | Watch
    | ForgetPrefixes
    | LoadAdapter
    | UnloadAdapter
    | Ping
    | DeliveryLateness
)
FromEngine = Progress | Ready | Outputs | Fatal

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
