"""OpenAI's endpoints of completions and chat."""

from functools import partial

from fastapi import FastAPI, Request, Response

from twolane.frontend.prepare import Prepared
from twolane.server.http import schemas
from twolane.server.http.slo_headers import BoundedCall
from twolane.server.openai.answers import Answer, AnswerOptions, Echo, Kind
from twolane.server.openai.logprobs import LogprobWriter
from twolane.server.openai.protocol import ChatRequest, CompletionRequest, GenerationBody
from twolane.server.service.respond import answer
from twolane.server.service.service import Service


def add_generation_routes(app: FastAPI, service: Service) -> None:
    """Add /v1/completions and /v1/chat/completions."""
    described = {**schemas.ERRORS, **schemas.QUEUE_FULL, **schemas.NO_KEY}

    @app.post(
        "/v1/completions",
        response_class=Response,
        responses={200: {"model": schemas.Completion, "content": schemas.STREAM}, **described},
    )
    async def completions(body: CompletionRequest, request: Request, call: BoundedCall) -> Response:
        """Continue one or more prompts."""
        asked = body.request(service.sampling_defaults)
        make = partial(completion_of, body, service)
        return await answer(request, service, asked, call, make)

    @app.post(
        "/v1/chat/completions",
        response_class=Response,
        responses={200: {"model": schemas.ChatCompletion, "content": schemas.STREAM}, **described},
    )
    async def chat_completions(body: ChatRequest, request: Request, call: BoundedCall) -> Response:
        """Answer a conversation."""
        asked = body.request(service.sampling_defaults)
        make = partial(answer_of, "chat", body, service)
        return await answer(request, service, asked, call, make)


def completion_of(body: CompletionRequest, service: Service, prepared: Prepared) -> Answer:
    """Return the answer to a completion request in progress."""
    echo = None
    if body.echo:
        hide = body.skip_special_tokens is not False
        texts = [prompt.shown(service.codec, hide) for prompt in prepared.prompts]
        echo = Echo(texts, body.only_echo)
    return answer_of("completion", body, service, prepared, echo)


def answer_of(
    kind: Kind, body: GenerationBody, service: Service, prepared: Prepared, echo: Echo | None = None
) -> Answer:
    """Return the answer to a request in progress."""
    request = prepared.request
    shown = body.stream_options
    options = AnswerOptions(
        n=request.n,
        return_token_ids=bool(body.return_token_ids),
        logprobs=request.sampling.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        echo=echo,
        continuous_usage=bool(shown and shown.continuous_usage_stats),
        include_usage=bool(shown and shown.include_usage),
        parsed=prepared.format.reader,
        forced_call=prepared.format.forced_call,
        reasoning_field=service.reasoning_field,
    )
    as_ids = bool(body.return_tokens_as_token_ids)
    writer = LogprobWriter(service.codec, request.sampling.logprobs or 0, as_ids=as_ids)
    return Answer(kind, request.adapter or service.model_name, prepared.tokens, writer, options)
