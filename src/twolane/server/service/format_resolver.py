"""Resolves the format of each answer: free text, or tool calls, thinking and grammars."""

from collections.abc import Sequence

from twolane.common.errors import FieldError
from twolane.frontend.answer_formats import FREE_TEXT, AnswerFormat, ModelFormats, grammar_alone
from twolane.frontend.engine_client import EngineClient
from twolane.frontend.sandbox import QueueFull
from twolane.frontend.structured.maker import GrammarMaker
from twolane.frontend.text.codec import TextCodec
from twolane.server.http.errors import ApiError, queue_full
from twolane.server.http.gate import CLIENT
from twolane.server.openai.protocol import ChatRequest, GenerationBody
from twolane.server.service.availability import Availability

SEEN_TOKENS = 32
"""Tokens at a prompt's end that are searched for marks of thinking."""


class FormatResolver:
    """Resolves the format of each answer, and compiles the grammar that it needs.

    Args:
        engine: a running engine.
        codec: the tokenizer of its model.
        formats: that the model can write.
        availability: whether anything is served.
    """

    def __init__(
        self,
        engine: EngineClient,
        codec: TextCodec,
        formats: ModelFormats,
        availability: Availability,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._formats = formats
        self._availability = availability
        self._maker: GrammarMaker | None = None
        """Compiles grammars; started by the first one."""
        self._vocabulary_sent = False
        """Whether the tokenizer was sent to the engine."""

    async def resolve(self, body: GenerationBody, tokens: Sequence[int]) -> AnswerFormat:
        """Return the format of the answers to a prompt.

        Args:
            body: the request.
            tokens: its first prompt.

        Raises:
            ApiError: 400, a field asks for what cannot be served; 429; 503.
        """
        options, chat = body.format_options, isinstance(body, ChatRequest)
        if options.constraint is None and not (chat and (options.tools or self._formats.thinking)):
            return FREE_TEXT
        try:
            if not self._codec.has_tokenizer:
                field, *_ = options.constraint or ("tools",)
                raise FieldError(field, "needs a model with a tokenizer")
            end = self._codec.decode(tokens[-SEEN_TOKENS:], skip_special_tokens=False)
            if isinstance(body, ChatRequest):
                answer_format = self._formats.of(options, end, body.continued)
            else:
                answer_format = grammar_alone(options)
            return await self._with_grammar(answer_format)
        except FieldError as error:
            raise ApiError(400, str(error), code="invalid_value", param=error.field) from error

    def send_vocabulary(self) -> None:
        """Send the tokenizer to the engine, which needs it for the first request with a grammar.

        Raises:
            EngineError: the engine is gone.
        """
        if not self._vocabulary_sent:
            self._engine.send_vocabulary(self._codec.tokenizer_json)
            self._vocabulary_sent = True

    async def close(self) -> None:
        """Stop the grammar maker."""
        if self._maker is not None:
            await self._maker.close()

    async def _with_grammar(self, answer_format: AnswerFormat) -> AnswerFormat:
        """Return the format with its grammar compiled.

        Raises:
            FieldError: the grammar cannot be served.
            ApiError: 429 or 503.
        """
        if answer_format.grammar_job is None:
            return answer_format
        self._availability.check()
        if self._maker is None:
            eos = self._engine.ready.eos_token_ids
            self._maker = GrammarMaker(self._codec.tokenizer_json, eos)
        try:
            grammar = await self._maker.make(answer_format.grammar_job, CLIENT.get())
            return answer_format._replace(grammar=grammar)
        except FieldError:
            self._availability.check()  # it may have been given up for that
            raise
        except QueueFull as error:
            raise queue_full("grammars wait to be made") from error
