"""Tokenises text with the checkpoint's programs, which run in a sandbox."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from twolane.frontend.sandbox import LONG_WORK_NICENESS, JobQueue, Limits, Sandbox, SandboxError
from twolane.frontend.text import jobs
from twolane.frontend.text.codec import TextCodec, TextError, no_tokenizer
from twolane.frontend.text.tokenizer import read_file
from twolane.model.load.hub import ModelSource

log = logging.getLogger("twolane.frontend")

TokenSequences = tuple[tuple[int, ...], ...]
LONG_TEXT = 1 << 16
"""Bytes from which a text goes to the queue of long texts, which shorter ones do not wait for."""
UNENCODABLE = (ValueError, OverflowError, TypeError)
"""Errors of msgspec for what cannot be sent to a sandbox."""
OPTION_FIELDS: Mapping[str, str] = {"tools": "tools", "variables": "chat_template_kwargs"}
"""Request fields by the options of a conversation that they become."""


class Texts:
    """The tokenizer and chat template of the served model. All methods belong to one event loop.

    Args:
        codec: turns tokens into text, here.
        sandbox: the checkpoint's programs; None: it has none.
        loaded: result of their setup.
    """

    def __init__(
        self, codec: TextCodec, sandbox: Sandbox | None = None, loaded: jobs.Loaded | None = None
    ) -> None:
        self.codec = codec
        self.template_source = None if loaded is None else loaded.template
        """Source of the chat template for tools; None: there is none that works."""
        self.shows_tools = loaded is not None and loaded.shows_tools
        """Whether that template shows tools."""
        self.has_chat_template = loaded is not None and loaded.has_chat
        """Whether there is a chat template that works without tools."""
        self._loaded = loaded
        self._sequences: tuple[tuple[str, ...], TokenSequences] = (), ()
        """The latest words that an answer must not contain, and their tokens: most clients ban the
        same ones every time."""
        self._sandbox = sandbox
        self._queues: tuple[JobQueue, JobQueue] | None = None
        if sandbox is not None:
            self._queues = sandbox.queue(), sandbox.queue(LONG_WORK_NICENESS)

    @classmethod
    async def load(cls, source: ModelSource, limits: Limits = Limits()) -> "Texts":  # noqa: B008
        """Load a model's tokenizer; a model may have none.

        Raises:
            ValueError: it cannot be read.
        """
        if source.tokenizer is None:
            return cls(TextCodec(None))
        template = None if source.chat_template is None else str(source.chat_template)
        setup = msgspec.msgpack.encode(
            jobs.TokenizerSetup(source.name, str(source.tokenizer), template)
        )
        sandbox = Sandbox(
            "twolane.frontend.text.worker", setup, limits, "long texts wait to be tokenised"
        )
        try:
            await sandbox.start()
            loaded = msgspec.msgpack.decode(sandbox.setup_result, type=jobs.Loaded)
            file, tokenizer = await asyncio.to_thread(read_file, loaded.file, decodes_only=True)
        except SandboxError as error:
            raise ValueError(f"{source.name}: the tokenizer cannot be loaded: {error}") from error
        except BaseException:
            await sandbox.close()
            raise
        for note in file.notes:
            log.warning("%s: %s", source.name, note)
        if tokenizer is None:
            await sandbox.close()
            return cls(TextCodec(None))
        # Decoding takes microseconds a token and is done here; the template runs there alone.
        return cls(
            TextCodec(replace(tokenizer, chat_template=None, tool_template=None)), sandbox, loaded
        )

    def has_variable(self, name: str, *, tools: bool) -> bool:
        """Return whether `chat_template_kwargs` may set this variable of the chat template.

        Args:
            name: the name of the variable.
            tools: true if the template shows tools, for which there may be another one.
        """
        if self._loaded is None:
            return False
        return name in (self._loaded.tool_variables if tools else self._loaded.variables)

    async def tokens(self, job: jobs.Encode | jobs.Chat, client: str = "") -> list[int]:
        """Return the tokens of a text or a conversation.

        Args:
            job: the text or the conversation.
            client: who asks; clients are served in rotation.

        Raises:
            TextError: the model has no tokenizer, or see `TextCodec.chat`; or the tokenizer or
                template failed or took too much.
            QueueFull: too many texts wait.
        """
        encoded = await self._ask(job, client)
        assert isinstance(encoded, jobs.Encoded)
        return jobs.unpacked(encoded.tokens)

    async def sequences(self, words: tuple[str, ...], client: str = "") -> TokenSequences:
        """Return the token sequences of a request's `bad_words`; see `TextCodec.sequences`.

        Raises:
            TextError: see there.
            QueueFull: too many texts wait.
        """
        if not words:
            return ()
        known, sequences = self._sequences
        if words != known:
            try:
                made = await self._ask(jobs.Words(words), client)
            except TextError as error:
                raise TextError(f"bad_words: {error}", "bad_words") from error
            assert isinstance(made, jobs.Sequences)
            sequences = made.sequences
            self._sequences = words, sequences
        return sequences

    async def listed(self, job: jobs.Encode | jobs.Chat, client: str = "") -> jobs.Listed:
        """Return the tokens of a text or conversation as its `listing` asks, in the queue of long
        texts.

        Raises:
            TextError, QueueFull: see `tokens`.
        """
        listed = await self._ask(job, client, long=True)
        assert isinstance(listed, jobs.Listed)
        return listed

    async def decode(self, tokens: Sequence[int], client: str = "") -> str:
        """Return the text of any number of tokens, special ones included.

        Raises:
            TextError: the model has no tokenizer, or the tokenizer failed or took too much.
            QueueFull: too many texts wait.
        """
        decoded = await self._ask(jobs.Decode(jobs.packed(tokens)), client, long=True)
        assert isinstance(decoded, jobs.Decoded)
        return decoded.text

    @property
    def problem(self) -> str | None:
        """See `Sandbox.problem`."""
        return None if self._sandbox is None else self._sandbox.problem

    async def close(self) -> None:
        """Stop the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _ask(self, job: jobs.Job, client: str, *, long: bool = False) -> jobs.Result:
        if self._queues is None:
            raise no_tokenizer()
        try:
            data = msgspec.msgpack.encode(job)
        except UNENCODABLE as error:
            raise unencodable(job, error) from error
        try:
            reply = await self._queues[long or len(data) >= LONG_TEXT].run([data], client)
        except SandboxError as error:
            what = "chat template or tokenizer" if isinstance(job, jobs.Chat) else "tokenizer"
            raise TextError(f"the model's {what} failed: {error}") from error
        result: jobs.Result = jobs.read_result(reply)
        if isinstance(result, jobs.WrongText):
            raise TextError(result.message, result.param)
        return result


def unencodable(job: jobs.Job, error: Exception) -> TextError:
    """Return why a job cannot be sent to a sandbox, with the request field at fault."""
    reason = str(error)
    if isinstance(error, OverflowError):
        reason = "a number is beyond 64 bits"
    elif isinstance(error, UnicodeEncodeError):
        reason = "it is not Unicode text"
    options = job.options if isinstance(job, jobs.Chat) else {}
    for option, field in OPTION_FIELDS.items():
        try:
            msgspec.msgpack.encode(options.get(option))
        except UNENCODABLE:
            return TextError(f"{field}: {reason}", field)
    return TextError(f"the text cannot be tokenised: {reason}")
