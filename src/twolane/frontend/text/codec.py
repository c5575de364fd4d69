"""Text to tokens and back: prompts, chat templates and incremental detokenising."""

import codecs
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from jinja2 import TemplateSyntaxError
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders

from twolane.common.surrogates import with_whole_characters
from twolane.engine.messages import Vocabulary
from twolane.frontend.sandboxed import TookTooLong, within
from twolane.frontend.text.histories import other_forms, with_all_keys
from twolane.frontend.text.template import ChatTemplate, missing_words, spellings
from twolane.frontend.text.template_form import Message, TemplateForm
from twolane.frontend.text.tokenizer import ModelTokenizer
from twolane.frontend.text.tools_as_text import with_tools_as_text
from twolane.frontend.text.vocabulary import (
    BYTE_TOKEN,
    anchor_of,
    byte_alphabet,
    decoder_steps,
    exact_tokenizer,
    vocabulary_of,
)

T = TypeVar("T")
REPLACEMENT = "\ufffd"
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that clients set for all models; false has no effect on a template without
them."""
EFFORTS = ("reasoning_effort", "reasoning_strength")
"""Template variables that take an effort; the second is Muse Glimmer's."""
NO_THINKING: Mapping[str, object] = {"thinking_budget": 0}
"""Other variables by which a template lets the model answer at once (Seed-OSS)."""
COMPILING_SECONDS = 5.0
"""Most seconds of compiling a chat template."""
MAX_HELD_TOKENS = 8
"""Tokens after which an incomplete character is given up: it has at most four bytes."""


class TextError(ValueError):
    """A prompt that cannot be turned into tokens.

    Args:
        message: why.
        param: the request field at fault, where it is not the prompt.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def guarded(call: Callable[[], T]) -> T:
    """Call the tokenizers library, whose panics are no `Exception`.

    Raises:
        TextError: it failed.
    """
    try:
        return call()
    except MemoryError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TextError(f"the model's tokenizer failed: {error}") from error
        raise


class Detokenizer(Protocol):
    """Incremental detokeniser of one answer.

    The pieces put together are the decoded text of all tokens without the special ones, as it
    reads after the prompt, and no piece ends inside a character. Each call takes constant time.
    """

    before: int
    """Number of characters of the latest piece that are of earlier tokens: those of a character
    that stays broken."""

    def step(self, token: int) -> str:
        """Take the next token; return the text that it completes, which may be empty."""

    def flush(self) -> str:
        """Return the text that is still held back; called once, at the end."""


class ByteVocabulary:
    """Bytes of each token of a byte-level tokenizer, looked up once a token.

    Args:
        tokenizer: the tokenizer that made the tokens.
        skip_special_tokens: true if special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = special_tokens(tokenizer) if skip_special_tokens else frozenset()
        self._added = tokenizer.get_added_tokens_decoder().keys()
        self._byte_of = byte_alphabet()
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def text_of(self, token: int) -> str | None:
        """Return the text of `token`; None: its bytes alone are not valid text."""
        try:
            return self._texts[token]
        except KeyError:
            data = self.bytes_of(token)
            text = data.decode(errors="ignore")
            self._texts[token] = text if text.encode() == data else None
            return self._texts[token]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of `token`: none if it is hidden or beyond the vocabulary."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        name = None if token in self._hidden else self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:  # which is plain text, whatever its characters are
            return name.encode()
        try:
            return bytes(self._byte_of[char] for char in name)
        except KeyError:
            return name.encode()


class ByteDetokenizer:
    """Detokeniser of byte-level tokenizers (GPT-2's kind); exact for any tokens.

    Args:
        vocabulary: the bytes of the tokenizer's tokens.
        prompt: the tokens before those that will come. The rest of a character that the prompt
            breaks off is shown as the whole character.
    """

    def __init__(self, vocabulary: ByteVocabulary, prompt: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-MAX_HELD_TOKENS:]:
            self._decoder.decode(vocabulary.bytes_of(token))
        self._broken_off = self._holds = bool(self._decoder.getstate()[0])
        """Whether the tokens so far, or those of the prompt, end within a character."""
        self.before = 0

    def step(self, token: int) -> str:
        """See `Detokenizer.step`."""
        if not self._holds:
            text = self._vocabulary.text_of(token)
            if text is not None:
                self.before = 0
                return text
        text = self._step(token)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def _step(self, token: int) -> str:
        data, held = self._vocabulary.bytes_of(token), self._decoder.getstate()[0]
        breaks = held and data and not begins_character(held + data[:1])
        self.before = int(bool(breaks) and not self._broken_off)
        return self._own(self._decoder.decode(data))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """Drop the mark of a character that the prompt breaks off and nothing completes."""
        if not text or not self._broken_off:
            return text
        self._broken_off = False
        return text.removeprefix(REPLACEMENT)


def begins_character(data: bytes) -> bool:
    """Return whether bytes are a character in UTF-8 or the beginning of one."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


class WindowDetokenizer:
    """Detokeniser of all other tokenizers (SentencePiece's kind), which decodes the last few tokens
    twice.

    Where the bytes of the tokens are not valid UTF-8, the number of replacement characters may
    differ from that of a decode of the whole.

    Args:
        tokenizer: the tokenizer that made the tokens.
        prompt: the tokens before those that will come. Decoders drop the space that a text begins
            with; after a prompt it is one between two words, or of an indentation.
        skip_special_tokens: true if special tokens are left out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = special_tokens(tokenizer) if skip_special_tokens else frozenset()
        self._window = [token for token in prompt[-MAX_HELD_TOKENS:] if token not in self._hidden]
        self._sent_tokens = len(self._window)
        # The text of the window's first `_sent_tokens` tokens, already returned or the prompt's. A
        # character that the prompt breaks off is still to be shown.
        self._held = self._decode()
        """Text of the window."""
        self._part = b""
        """Bytes of a character that is incomplete, where tokens are single bytes."""
        self._sent = self._held.rstrip(REPLACEMENT)
        self.before = 0

    def step(self, token: int) -> str:
        """See `Detokenizer.step`."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        earlier, text = self._held, self._decode()
        self._held = text
        held = len(self._window) - self._sent_tokens
        if not self._continues(token) or held == 1:
            self.before = 0 if earlier == self._sent else self._shared(earlier, text)
        if text.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS:
            return ""
        piece = text[len(self._sent) :]
        # Keep the tokens of this piece: how the next one is written depends on what is before it.
        self._window = self._window[self._sent_tokens :]
        self._sent_tokens = len(self._window)
        self._sent = self._held = self._decode()
        return piece

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decode()[len(self._sent) :]

    def _shared(self, earlier: str, text: str) -> int:
        """Return the number of new characters that two texts of the window begin with."""
        pairs = zip(earlier, text, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        return max(0, sum(1 for _ in same) - len(self._sent))

    def _continues(self, token: int) -> bool:
        """Return whether a token may be a part of the character that the last one began."""
        byte = BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "")
        data = bytes.fromhex(byte[1]) if byte else b""
        continues = bool(data and self._part) and begins_character(self._part + data)
        whole = (self._part if continues else b"") + data
        self._part = b"" if whole.decode(errors="ignore") else whole
        return continues

    def _decode(self) -> str:
        # What is to be hidden is not in the window.
        decode = self._tokenizer.decode
        return guarded(lambda: decode(self._window, skip_special_tokens=False))


class NoText:
    """Detokeniser of models without a tokenizer (dummy weights), which returns no text."""

    before = 0

    def step(self, token: int) -> str:
        """Return nothing."""
        return ""

    def flush(self) -> str:
        """Return nothing."""
        return ""


class TextCodec:
    """The tokenizer of the served model, as the API process uses it.

    Args:
        tokenizer: None for a model that has none. Its chat template is compiled in the main thread,
            and neither that nor running it is safe but in a sandbox: see `Texts`.
    """

    def __init__(self, tokenizer: ModelTokenizer | None) -> None:
        self._backend = None if tokenizer is None else tokenizer.backend
        self._template: ChatTemplate | None = None
        self._tool_template: ChatTemplate | None = None
        self.ends: tuple[int, ...] = () if tokenizer is None else tokenizer.ends
        """Tokens that end an answer, besides those of the model's config."""
        self._no_chat = "this model has no chat template: use /v1/completions"
        if tokenizer is not None:
            self._template = self._compiled(tokenizer, tokenizer.chat_template, tokenizer.form)
            self._tool_template = self._compiled(
                tokenizer, tokenizer.tool_template, tokenizer.tool_form
            )
        self._shown: ByteVocabulary | None = None
        self._longest = None if tokenizer is None else tokenizer.longest
        self._json = None if tokenizer is None else tokenizer.json
        if self._backend is not None and is_byte_level(self._backend.decoder):
            self._shown = ByteVocabulary(self._backend, skip_special_tokens=False)
            self._text = ByteVocabulary(self._backend, skip_special_tokens=True)

    def _compiled(
        self, tokenizer: ModelTokenizer, source: str | None, form: TemplateForm | None
    ) -> ChatTemplate | None:
        if not source:
            return None
        try:
            special = tokenizer.special_tokens
            return within(COMPILING_SECONDS, lambda: ChatTemplate(source, special, form))
        except (TookTooLong, RecursionError, MemoryError) as error:
            self._no_chat = f"the model's chat template cannot be run: {type(error).__name__}"
        except TemplateSyntaxError as error:
            self._no_chat = f"the model's chat template is broken: {error}"
        return None

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer."""
        return self._backend is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template that works without tools."""
        return self._template is not None

    @property
    def template_source(self) -> str | None:
        """Source of the chat template for tools; None: there is none."""
        template = self._template_for(tools=True)
        return None if template is None else template.source

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows the tools that the model may call."""
        template = self._template_for(tools=True)
        return template is not None and template.form.shows_tools

    def template_variables(self, *, tools: bool) -> frozenset[str]:
        """Return the variables of the chat template, or of that for conversations with tools, which
        `chat_template_kwargs` may set."""
        template = self._template_for(tools=tools)
        return frozenset() if template is None else frozenset(template.variables)

    def _template_for(self, *, tools: bool) -> ChatTemplate | None:
        return (self._tool_template if tools else None) or self._template

    def vocabulary(self) -> Vocabulary:
        """Return the texts of the tokens in answers; it takes some tenths of a second.

        Raises:
            TextError: the model has no tokenizer.
            ValueError: its decoder writes a token differently after different ones.
        """
        bytes_of = None if self._shown is None else self._shown.bytes_of
        made = vocabulary_of(self._tokenizer, bytes_of, self.ends)
        if bytes_of is None:
            return made
        exact = exact_tokenizer(self._json or self._tokenizer.to_str(), made)
        return replace(made, exact=exact)

    @property
    def added_tokens(self) -> dict[str, int]:
        """The tokens that were added to the tokenizer's own, by text.

        Raises:
            TextError: the model has no tokenizer.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a plain prompt.

        Args:
            text: the prompt.
            add_special_tokens: true if the tokens that the model expects around it are added.

        Raises:
            TextError: the model has no tokenizer.
        """
        return encode(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tools_as_text: bool = False,
    ) -> list[int]:
        """Return the tokens of a conversation; see `ChatTemplate.render`.

        With `tools_as_text`, the template is given tools, calls and results as text in Hermes'
        form, except calls of a conversation without tools that it shows itself.

        Where the template refuses the messages, or shows but some of them, it gets them in
        `histories.other_forms`.

        Raises:
            TextError: the model has no tokenizer or chat template, the template refuses, or what
                was said is not in the prompt that it makes.
        """
        tokenizer, template = self._tokenizer, self._template_for(tools=bool(tools))
        if template is None:
            raise TextError(self._no_chat)
        check_variables(template, variables or {})
        turns = messages
        if tools_as_text and (tools or not template.form.shows_calls):
            turns = with_tools_as_text(messages, tools, system=template.form.has_role("system"))
            tools = None
        check_calls(template, turns, tools)
        rendered = partial(
            rendering,
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        text = with_whole_characters(rendered_somehow(rendered, turns, tools))
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens.

        Raises:
            TextError: the model has no tokenizer, or it failed.
        """
        if self._shown is not None:
            vocabulary = self._text if skip_special_tokens else self._shown
            return b"".join(map(vocabulary.bytes_of, tokens)).decode(errors="replace")
        # `Tokenizer.decode` would keep the interpreter's lock; see `encode`.
        decode = self._tokenizer.decode_batch
        [text] = guarded(lambda: decode([tokens], skip_special_tokens=skip_special_tokens))
        return text

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them.

        Raises:
            TextError: the model has no tokenizer.
        """
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, special tokens included; empty without a tokenizer."""
        if self._shown is not None:
            return self._shown.bytes_of(token)
        name = None if self._backend is None else self._backend.id_to_token(token)
        if name is None:
            return b""
        if byte := BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(byte[1])
        return name.replace("\u2581", " ").encode()

    def token_of(self, text: str) -> int | None:
        """Return the token that a text is as a whole; None: there is none."""
        return None if self._backend is None else self._backend.token_to_id(text)

    def hides(self, text: str) -> bool:
        """Return whether a text is a special token, which `skip_special_tokens` leaves out."""
        return text in self._hidden

    def hidden_in(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the special tokens in some texts, with their spelling there."""
        hidden: dict[int, str] = {}
        begins, lengths = self._spellings if texts else ("", ())
        for text in texts:
            for place, character in enumerate(text):
                if character in begins:
                    names = (text[place : place + length] for length in lengths)
                    hidden |= {self._hidden[name]: name for name in names if name in self._hidden}
        return hidden

    @cached_property
    def _hidden(self) -> Mapping[str, int]:
        """Special tokens by text."""
        tokens = () if self._backend is None else special_tokens(self._backend)
        names = {self._tokenizer.id_to_token(token): token for token in tokens}
        return {name: token for name, token in names.items() if name}

    @cached_property
    def _spellings(self) -> tuple[str, Sequence[int]]:
        """First characters and lengths of the special tokens' texts."""
        names = self._hidden
        return "".join({name[0] for name in names}), sorted({len(name) for name in names})

    def check_stop(self, stop: Sequence[str]) -> None:
        """Refuse stop strings where there is no text to find them in.

        Raises:
            TextError: the model has no tokenizer.
        """
        if stop and self._backend is None:
            raise TextError("stop needs text: this model was loaded without a tokenizer", "stop")

    def sequences(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token sequences of words that an answer must not contain: of each as it is at
        the beginning of a text, and after a space.

        Raises:
            TextError: the model has no tokenizer, or it failed, or makes no tokens of a word.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                tokens = tuple(self.encode(text, add_special_tokens=False))
                if not tokens:
                    raise TextError(f"the model's tokenizer makes no tokens of {text!r}")
                found[tokens] = None
        return [*found]

    def min_tokens_of(self, length: int) -> int:
        """Return the smallest number of tokens of a text with this many characters; 0: unknown."""
        return 0 if self._longest is None else length // self._longest

    def detokenizer(
        self,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        keep_space: bool = False,
    ) -> Detokenizer:
        """Return a detokeniser for an answer to this prompt.

        Args:
            prompt: the tokens of the prompt.
            skip_special_tokens: true if special tokens are left out of the text.
            keep_space: true if the answer's first space is kept even if the prompt shows no text.
        """
        if self._backend is None:
            return NoText()
        if self._shown is not None:
            return ByteDetokenizer(self._text if skip_special_tokens else self._shown, prompt)
        if keep_space and self._anchor is not None:
            prompt = [self._anchor, *prompt[1 - MAX_HELD_TOKENS :]]
        return WindowDetokenizer(self._backend, prompt, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _anchor(self) -> int | None:
        """See `anchor_of`."""
        tokenizer = self._tokenizer
        return guarded(lambda: anchor_of(tokenizer, tokenizer.get_vocab_size()))

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._backend is None:
            raise no_tokenizer()
        return self._backend


def is_byte_level(decoder: decoders.Decoder | None) -> bool:
    """Return whether a decoder only joins bytes."""
    return [s["type"] for s in decoder_steps(decoder) if s["type"] != "Fuse"] == ["ByteLevel"]


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text, in pieces so that other threads run meanwhile.

    `Tokenizer.encode` keeps the interpreter's lock until it is done, 1.1 s for a million
    characters, and no stream goes on meanwhile; that of batches does not.

    Raises:
        TextError: the tokenizer failed.
    """
    encode_all = tokenizer.encode_batch_fast
    [encoding] = guarded(lambda: encode_all([text], add_special_tokens=add_special_tokens))
    ids: list[int] = encoding.ids
    return ids


def check_variables(template: ChatTemplate, variables: Mapping[str, Any]) -> None:
    """Refuse variables that the template does not read, unless they have no effect.

    Raises:
        TextError: there is one.
    """
    for name in sorted(variables.keys() - template.variables):
        if name in SWITCHES and not variables[name]:
            continue
        raise TextError(
            f"the model's chat template has no variable {name[:200]!r}",
            param="chat_template_kwargs",
        )


def rendered_somehow(
    rendered: Callable[..., str],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return a conversation as text, in another form if the template refuses it as it is.

    Args:
        rendered: Renders messages with some `tools`.
        messages: The conversation.
        tools: The tools that the model may call.

    Raises:
        TextError: it refuses all of them.
    """
    try:
        return rendered(messages, tools=tools)
    except TextError:
        forms = [*other_forms(messages)]
        others = [(form, tools) for form in forms]
        if tools and (whole := with_all_keys(tools)) != [*tools]:
            others = [(messages, whole), *others, *((form, whole) for form in forms[-2:])]
        for form, told in others:
            with suppress(TextError):
                return rendered(form, tools=told)
        raise


def check_calls(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> None:
    """Refuse tools and tool calls that the template does not show.

    Raises:
        TextError: there are some.
    """
    if tools and not template.form.shows_tools:
        raise TextError("the model's chat template shows no tools", param="tools")
    for place, message in enumerate(messages):
        if message.get("tool_calls") and not template.form.shows_calls:
            param = f"messages[{place}].tool_calls"
            raise TextError("the model's chat template does not show tool calls", param=param)


def rendering(
    template: ChatTemplate, messages: Sequence[Message], turns: Sequence[Message], **options: Any
) -> str:
    """Return a conversation as text; see `ChatTemplate.render`.

    Args:
        template: The chat template.
        messages: The messages as they were given, whose words the text must have.
        turns: The messages as the template gets them.
        options: Further arguments of `ChatTemplate.render`.

    Raises:
        TextError: the template refuses, or what was said is not in the prompt that it makes.
    """
    try:
        text = template.render(turns, **options)
    except Exception as error:  # templates are programs that come with the model
        raise TextError(f"the model's chat template refused the messages: {error}") from error
    check_words(messages, text)
    return text


def check_words(messages: Sequence[Message], text: str) -> None:
    """Refuse a prompt that lacks words of the messages, or has a tool's name less often than there
    are calls of it; some of the assistant's words may be dropped.

    Raises:
        TextError: it does.
    """
    called: dict[str, list[int]] = {}
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            for call in message.get("tool_calls", ()):
                called.setdefault(call["function"]["name"], []).append(place)
            continue
        content = message["content"]
        for part in [content] if isinstance(content, str) else content or ():
            word = missing_words(part if isinstance(part, str) else part["thinking"], text)
            if word is not None:
                raise lost(f"messages[{place}].content", word)
    for name, places in called.items():
        if not any(text.count(form) >= len(places) for form in spellings(name)):
            raise lost(f"messages[{places[-1]}].tool_calls", name)


def lost(param: str, word: str) -> TextError:
    """Return the refusal of a prompt that lacks a word."""
    return TextError(
        f"the model's chat template does not show {param}: the prompt lacks {word[:200]!r}", param
    )


def no_tokenizer() -> TextError:
    """Return the refusal of text where there is no tokenizer."""
    return TextError(
        "this model was loaded without a tokenizer: send prompts of token ids to /v1/completions, "
        'with "return_token_ids": true'
    )


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that are never part of the text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)
