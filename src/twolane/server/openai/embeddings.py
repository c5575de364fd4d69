"""Embeddings: hidden states of prompts' last tokens, from checkpoints made for embeddings."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Request, Response

from twolane.frontend.body import Body
from twolane.frontend.fields import Count, Priority, Prompts, Truncation, prompt_list
from twolane.frontend.generate_request import GenerateRequest
from twolane.frontend.generation import Generation
from twolane.frontend.pooling import vector
from twolane.sampling import SamplingParams
from twolane.server.http.disconnect import unless_gone
from twolane.server.http.errors import ApiError
from twolane.server.http.route import json_response
from twolane.server.http.schemas import ERRORS, NO_KEY, QUEUE_FULL, EmbeddingList
from twolane.server.http.slo_headers import BoundedCall
from twolane.server.service.service import Service

PATH = "/v1/embeddings"
MAX_BYTES = 1 << 16
"""Bytes of hidden states above which an answer is encoded in a thread, so that streams go on."""


class EmbeddingRequest(Body):
    """The body of POST /v1/embeddings."""

    inert: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None

    def request(self) -> GenerateRequest:
        """Return the request of one token, which is not shown, for each text."""
        return GenerateRequest(
            prompts=prompt_list(self.input),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embeds=True),
            adapter=self.model,
            priority=self.priority or 0,
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            prompt_field="input",
            limit_field="max_tokens",
        )


def add_embedding_routes(app: FastAPI, service: Service) -> None:
    """Add /v1/embeddings."""

    @app.post(
        PATH,
        response_class=Response,
        responses={200: {"model": EmbeddingList}, **ERRORS, **QUEUE_FULL, **NO_KEY},
    )
    async def embeddings(body: EmbeddingRequest, request: Request, call: BoundedCall) -> Response:
        """Make a vector of length 1 of each text, if the checkpoint is one of embeddings."""
        check_served(service, body)
        call.on_parsed()
        prepared = await unless_gone(request, service.prepare(body.request(), call))
        model, tokens = prepared.request.adapter or service.model_name, prepared.tokens
        generation = service.generate(prepared, call)
        with generation:
            states = await unless_gone(request, hidden_states(generation, len(tokens)))
        count = sum(map(len, tokens))
        if sum(map(len, states)) <= MAX_BYTES:
            return json_response(answer(body, model, states, count))
        return await asyncio.to_thread(lambda: json_response(answer(body, model, states, count)))


def check_served(service: Service, body: EmbeddingRequest) -> None:
    """Refuse embeddings or dimensions that the model does not have.

    Raises:
        ApiError: 501, the model is not one of embeddings; 400, it has no such dimensions.
    """
    if service.embedding.refusal is not None:
        raise ApiError(501, f"{PATH} {service.embedding.refusal}", code="not_served")
    if (problem := service.embedding.check_dimensions(body.dimensions)) is not None:
        message = f"dimensions {problem}"
        raise ApiError(400, message, code="invalid_value", param="dimensions")


async def hidden_states(generation: Generation, count: int) -> Sequence[bytes]:
    """Return the hidden state of each prompt."""
    states = [b""] * count
    async for delta in generation:
        if delta.embedding is not None:
            states[delta.index] = delta.embedding
    return states


def answer(
    body: EmbeddingRequest, model: str, states: Sequence[bytes], tokens: int
) -> dict[str, Any]:
    """Return the answer in OpenAI's format."""
    return {
        "object": "list",
        "data": [shown(body, index, state) for index, state in enumerate(states)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def shown(body: EmbeddingRequest, index: int, state: bytes) -> dict[str, Any]:
    """Return an embedding in OpenAI's format."""
    numbers = vector(state, body.dimensions)
    if body.encoding_format == "base64":
        value: Any = base64.b64encode(numbers.tobytes()).decode()
    else:
        value = numbers.tolist()
    return {"object": "embedding", "index": index, "embedding": value}
