"""Endpoints of OpenAI's API, and of servers for it, that are refused with the reason."""

from collections.abc import Mapping

from fastapi import FastAPI, Response

from twolane.server.http.errors import ApiError

NO_SCORES = (
    "is not served: no checkpoint's head for scores is loaded; the vectors of /v1/embeddings can "
    "be compared instead"
)
REFUSED: Mapping[str, str] = {
    "/v1/rerank": NO_SCORES,
    "/rerank": NO_SCORES,
    "/v1/score": NO_SCORES,
    "/v1/batches": "is not served: `twolane run-batch` answers a file of requests",
    "/v1/files": "is not served: `twolane run-batch` answers a file of requests",
    "/v1/moderations": "is not served: it needs a model of its own",
    "/v1/audio/transcriptions": "is not served: models of text are",
    "/v1/images/generations": "is not served: models of text are",
}
"""Paths, and why they are not served."""


def add_refused_routes(app: FastAPI) -> None:
    """Add what says why an endpoint is not served (501)."""

    def add(path: str, why: str) -> None:
        @app.post(path, response_class=Response, include_in_schema=False)
        async def refuse() -> Response:
            raise ApiError(501, f"{path} {why}", code="not_served")

    for path, why in REFUSED.items():
        add(path, why)
