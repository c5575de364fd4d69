"""Endpoints of OpenAI's API and of other servers that are refused with a reason."""

from collections.abc import Collection, Mapping

from fastapi import FastAPI, Response

from twolane.server.http.errors import ApiError

NO_SCORES = "is not served: there are no scoring models; compare vectors of /v1/embeddings instead"
NO_BATCHES = "is not served: `twolane run-batch` answers a file of requests"
ONLY_TEXT = "is not served: only text models are"
OTHER_SERVER = "is not served: ask /v1/completions or /v1/chat/completions"
OLLAMA = "is Ollama's API: give the client OpenAI's instead, with /v1 as the end of its base URL"
OLLAMA_NAMES = ("chat", "embed", "generate", "ps", "pull", "show", "tags", "version")
"""Last parts of the paths of Ollama's API that its clients ask."""
REFUSED: Mapping[str, str] = {
    "/v1/rerank": NO_SCORES,
    "/rerank": NO_SCORES,
    "/v2/rerank": NO_SCORES,
    "/v1/score": NO_SCORES,
    "/score": NO_SCORES,
    "/pooling": "is not served: ask /v1/embeddings",
    "/classify": "is not served: it needs a classifying model",
    "/v1/batches": NO_BATCHES,
    "/v1/messages/batches": NO_BATCHES,
    "/v1/files": NO_BATCHES,
    "/v1/moderations": "is not served: it needs a moderation model",
    "/v1/responses/compact": "is not served: clients shorten their conversations themselves",
    "/v1/conversations": "is not served: ask /v1/responses with previous_response_id",
    "/v1/audio/speech": ONLY_TEXT,
    "/v1/audio/transcriptions": ONLY_TEXT,
    "/v1/audio/translations": ONLY_TEXT,
    "/v1/images/edits": ONLY_TEXT,
    "/v1/images/generations": ONLY_TEXT,
    "/generate": OTHER_SERVER,
    "/completion": OTHER_SERVER,
    **dict.fromkeys((f"/api/{name}" for name in OLLAMA_NAMES), OLLAMA),
}
"""Reasons by path that is not served."""


OPENED: Mapping[str, tuple[str, ...]] = {
    "--admin-endpoints": ("/reset_prefix_cache",),
    "--lora-endpoints": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}
"""Paths that an option of the server enables."""


def add_refused_routes(app: FastAPI, enabled: Collection[str]) -> None:
    """Add endpoints that answer why they are not served (501), or which option enables them (404).

    Args:
        app: gets the endpoints.
        enabled: the options of `OPENED` that the server was started with.
    """

    def add(path: str, why: str, status: int, code: str) -> None:
        @app.api_route(
            path, methods=["GET", "POST"], response_class=Response, include_in_schema=False
        )
        async def refuse() -> Response:
            raise ApiError(status, f"{path} {why}", code=code)

    for path, why in REFUSED.items():
        add(path, why, 501, "not_served")
    for option, paths in OPENED.items():
        for path in () if option in enabled else paths:
            add(path, f"is not served: start the server with {option}", 404, "not_found")
