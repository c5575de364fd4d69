"""OpenAI's endpoints of completions and chat."""

from fastapi import FastAPI, Request, Response

from twolane.frontend.answer_formats import AnswerFormat
from twolane.server.http.disconnect import unless_gone
from twolane.server.http.schemas import (
    ERRORS,
    NO_KEY,
    QUEUE_FULL,
    STREAM,
    ChatCompletion,
    Completion,
)
from twolane.server.http.slo_headers import BoundedCall
from twolane.server.openai.answers import Answer, AnswerOptions, Echo
from twolane.server.openai.logprobs import LogprobWriter
from twolane.server.openai.protocol import ChatRequest, CompletionRequest, GenerationBody
from twolane.server.service.respond import respond
from twolane.server.service.service import Service


def add_generation_routes(app: FastAPI, service: Service) -> None:
    """Add /v1/completions and /v1/chat/completions."""
    described = {**ERRORS, **QUEUE_FULL, **NO_KEY}

    @app.post(
        "/v1/completions",
        response_class=Response,
        responses={200: {"model": Completion, "content": STREAM}, **described},
    )
    async def completions(body: CompletionRequest, request: Request, call: BoundedCall) -> Response:
        """Continue one or more prompts."""
        model = service.check_model(body.model)
        prompts = await unless_gone(request, service.prompts.of_completion(body))
        tokens = [prompt.tokens for prompt in prompts]
        answer_format = await unless_gone(request, service.formats.resolve(body, tokens[0]))
        options = answer_options(body, service, answer_format, service.prompts.echo(body, prompts))
        writer = logprob_writer(body, service)
        answer = Answer("completion", model, tokens, writer, options)
        banned = await unless_gone(request, service.prompts.banned(body))
        generation = service.generate(body, tokens, call, answer_format, banned)
        return await respond(request, generation, answer, streams=bool(body.stream))

    @app.post(
        "/v1/chat/completions",
        response_class=Response,
        responses={200: {"model": ChatCompletion, "content": STREAM}, **described},
    )
    async def chat_completions(body: ChatRequest, request: Request, call: BoundedCall) -> Response:
        """Answer a conversation."""
        model = service.check_model(body.model)
        tokens = [(await unless_gone(request, service.prompts.of_chat(body))).tokens]
        answer_format = await unless_gone(request, service.formats.resolve(body, tokens[0]))
        options = answer_options(body, service, answer_format)
        writer = logprob_writer(body, service)
        answer = Answer("chat", model, tokens, writer, options)
        banned = await unless_gone(request, service.prompts.banned(body))
        generation = service.generate(body, tokens, call, answer_format, banned)
        return await respond(request, generation, answer, streams=bool(body.stream))


def answer_options(
    body: GenerationBody, service: Service, answer_format: AnswerFormat, echo: Echo | None = None
) -> AnswerOptions:
    """Return which parts of the answer a request asks for."""
    return AnswerOptions(
        n=body.choices,
        return_token_ids=bool(body.return_token_ids),
        logprobs=body.logprob_count is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        echo=echo,
        continuous_usage=body.continuous_usage,
        include_usage=body.include_usage,
        parsed=answer_format.reader,
        forced_call=answer_format.forced_call,
        reasoning_field=service.reasoning_field,
    )


def logprob_writer(body: GenerationBody, service: Service) -> LogprobWriter:
    """Return the writer of a request's log-probabilities."""
    as_ids = bool(body.return_tokens_as_token_ids)
    return LogprobWriter(service.codec, body.logprob_count or 0, as_ids=as_ids)
