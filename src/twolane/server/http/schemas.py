"""Schemas of the answers for the OpenAPI description. `answers.py` writes them; a test compares."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]


class Shown(BaseModel):
    """A JSON object with exactly these fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Shown):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Shown):
    """Body of every error."""

    error: ErrorDetail


class PromptTokensDetails(Shown):
    """Details of the prompt tokens."""

    cached_tokens: int


class CompletionTokensDetails(Shown):
    """Details of the output tokens."""

    reasoning_tokens: int


class Usage(Shown):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(Shown):
    """Log-probability and rank of a token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Shown):
    """Log-probabilities of a completion, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shown):
    """An answer to a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Shown):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class EmbeddingUsage(Shown):
    """Token counts of texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(Shown):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """The numbers, or with `base64` their float32 bytes in little-endian order."""


class EmbeddingList(Shown):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class ChatToken(Shown):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatToken):
    """A token of the answer, with alternatives."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Shown):
    """Log-probabilities of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Shown):
    """The function of a tool call."""

    name: str
    arguments: str


class ToolCall(Shown):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shown):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The thinking under vLLM's name, with `--reasoning-field reasoning`."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Shown):
    """An answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(Shown):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Model(Shown):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Shown):
    """All served models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Shown):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Shown):
    """The answer of /detokenize."""

    prompt: str


class Health(Shown):
    """The answer of a probe."""

    status: Literal["ok"]
    ranks: dict[str, float] | None = None
    """Seconds since each other rank last reported, if there are several ranks."""


class ServerLoad(Shown):
    """The answer of /load."""

    server_load: int
    running: int
    prefilling: int
    waiting: int
    kv_pages: int
    kv_pages_free: int
    kv_cache_dtype: str


class PromptLandmarks(Shown):
    """The answer of /fleet/landmarks: prefixes of a prompt by length and hash."""

    prompt_tokens: int
    page_size: int
    tokens: list[int]
    hashes: list[int]
    token_ids: list[int] | None
    states: bool


class Version(Shown):
    """The answer of /version."""

    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; `param` names the field."},
    404: {"model": ErrorBody, "description": "There is no such model."},
    408: {"model": ErrorBody, "description": "The body took too long to arrive."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is not JSON."},
    503: {"model": ErrorBody, "description": "The server is stopping, or its engine is gone."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}
"""Errors of endpoints that take a body."""
QUEUE_FULL: dict[int | str, dict[str, Any]] = {
    429: {
        "model": ErrorBody,
        "description": "The queue is full.",
        "headers": {
            "Retry-After": {
                "description": "Seconds in which the present queue should be served.",
                "schema": {"type": "integer", "minimum": 1},
            }
        },
    }
}
UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: ERRORS[503]}
NO_KEY: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."}
}
OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
"""The content of answers whose fields other documents describe."""
STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "string",
            "description": "Server-sent events with a chunk each, then `data: [DONE]`.",
        }
    }
}
"""Content of a streamed answer."""
NAMED_STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["event", "data"],
            "description": "Server-sent events with a name and an object each.",
        }
    }
}
"""Content of a streamed answer whose events have names."""
