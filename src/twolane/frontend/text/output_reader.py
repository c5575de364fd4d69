"""Converts the tokens of one answer to text, and finds its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from twolane.engine.messages import FinishReason, Output, PackedLogprobs, TokenLogprobs
from twolane.frontend.parsers.reasoning import AnswerGate, ThinkingMarks
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.stops import StopStrings
from twolane.sampling import SamplingParams


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of detokenising, and the stop strings."""

    stop: tuple[str, ...] = ()
    """Stop strings: the answer ends before the first of them."""
    include_stop: bool = False
    """Whether the stop string or token is part of the text."""
    skip_special_tokens: bool = True
    thinking: ThinkingMarks | None = None
    """Marks of thinking, in which stop strings do not count; None: all text counts."""


class Delta(msgspec.Struct, frozen=True):
    """The addition of one engine event to one answer."""

    index: int
    """Index of the answer within its request."""
    text: str
    tokens: list[int]
    offsets: list[int]
    """Position of each token in the answer's text, in characters, before anything is held back or
    cut off."""
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token or string that ended the answer; None: end of sequence, or length."""
    cached: int | None = None
    """Number of prompt tokens from the prefix cache; with the first delta only."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each token, if requested."""
    prompt_logprobs: PackedLogprobs | None = None
    """Log-probabilities of each prompt token but the first, if requested; with the first delta
    only."""
    embedding: bytes | None = None
    """Hidden state of the prompt's last token in float32, if requested; with the first delta
    only."""


@dataclass
class CollectedAnswer:
    """One answer to one prompt, so far."""

    prompt: list[int]
    """Tokens of the prompt."""
    pieces: list[str] = field(default_factory=list)
    """Pieces of the text."""
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """See `Delta.offsets`."""
    logprobs: PackedLogprobs | None = None
    """Log-probabilities of each token, if requested."""
    prompt_logprobs: PackedLogprobs | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    cached: int = 0
    """Number of prompt tokens from the prefix cache."""
    thinking: int = 0
    """Number of tokens before the answer itself began."""

    @property
    def text(self) -> str:
        """Text so far."""
        return "".join(self.pieces)

    def add(self, delta: Delta) -> bool:
        """Add a delta; return whether it is the first."""
        first = not self.pieces
        self.pieces.append(delta.text)
        self.tokens += delta.tokens
        self.offsets += delta.offsets
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = PackedLogprobs()
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish = delta.finish
        self.stop_reason = delta.stop_reason
        self.cached = self.cached if delta.cached is None else delta.cached
        return first


class OutputReader:
    """Converts the engine's outputs of one answer to text, and finds its stop strings.

    Args:
        index: the index of the answer within its request.
        codec: the tokenizer.
        prompt: the tokens of the prompt.
        params: the sampling parameters of the answer.
        options: the options of the answer's text.
        eos_token_ids: tokens that end an answer without being its reason to stop.
    """

    def __init__(
        self,
        index: int,
        codec: TextCodec,
        prompt: Sequence[int],
        params: SamplingParams,
        options: TextOptions,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.count = 0
        """Number of tokens so far."""
        self.stopped = False
        """Whether a stop string was found, after which nothing belongs to the answer."""
        self._index = index
        self._params = params
        self._include_stop = options.include_stop
        self._hidden = codec.hidden_in(options.stop) if options.skip_special_tokens else {}
        """Texts of tokens that show nothing and yet are part of stop strings."""
        self._no_reason = () if params.ignore_eos else tuple(eos_token_ids)
        self._detokenizer = codec.detokenizer(
            prompt,
            skip_special_tokens=options.skip_special_tokens,
            keep_space=params.grammar is not None,
        )
        self._stops = StopStrings(options.stop, include=options.include_stop)
        gated = options.thinking if options.stop else None
        self._gate = None if gated is None else AnswerGate(gated)
        self._searches = bool(options.stop)
        self._length = 0

    def read(self, output: Output) -> Delta:
        """Convert an output of the engine to a delta."""
        if output.finish is None and not self._searches and len(output.tokens) == 1:
            return self._read_one(output)
        return self._read(output)

    def _read_one(self, output: Output) -> Delta:
        """Do what `_read` does with a token that ends nothing and completes no stop string."""
        self.count += 1
        text = self._detokenizer.step(output.tokens[0])
        offset = self._length + self._detokenizer.before
        self._length += len(text)
        return Delta(
            *(self._index, text, output.tokens, [offset], None, None, output.cached),
            *(output.logprobs, output.prompt_logprobs, output.embedding),
        )

    def _read(self, output: Output) -> Delta:
        texts: list[str] = []
        offsets: list[int] = []
        stop: int | str | None = None
        for token in output.tokens:
            self.count += 1
            offsets.append(self._length)
            last = output.finish == "stop" and len(offsets) == len(output.tokens)
            if last and token not in self._no_reason:
                stop = token
            if last and not self._include_stop:
                break
            piece = self._detokenizer.step(token)
            offsets[-1] += self._detokenizer.before
            text, stop_string = self._show(piece)
            texts.append(text)
            if stop_string is None and token in self._hidden:
                text, stop_string = self._hide(self._hidden[token])
                texts.append(text)
            if stop_string is not None:
                self.stopped, stop = True, stop_string
                break
        if output.finish is not None and not self.stopped:
            text, stop_string = self._show(self._detokenizer.flush(), last=True)
            self.stopped, stop = stop_string is not None, stop_string or stop
            texts += [text, self._stops.flush()]
            if offsets and output.finish == "stop" and not self._include_stop:
                offsets[-1] = self._length  # the token that is not shown comes after all text
        kept = len(offsets)
        return Delta(
            self._index,
            "".join(texts),
            output.tokens[:kept],
            offsets,
            "stop" if self.stopped else output.finish,
            stop,
            output.cached,
            None if output.logprobs is None else output.logprobs[:kept],
            output.prompt_logprobs,
            output.embedding,
        )

    def _show(self, piece: str, *, last: bool = False) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that ended it, if any."""
        self._length += len(piece)
        thought, early = "", self.count < self._params.min_tokens
        if self._gate is not None:
            thought, piece = self._gate.feed(piece)
            piece += self._gate.release() if early or last else ""
        if early:
            return thought + piece, None
        shown = self._stops.feed(piece)
        return thought + shown.text, shown.stop

    def _hide(self, name: str) -> tuple[str, str | None]:
        """See `_show`: of a token that shows nothing, but has this name in stop strings."""
        if self.count < self._params.min_tokens:
            return "", None
        before = ""
        if self._gate is not None:
            if self._gate.thinks:
                return "", None
            before = self._gate.release()
        found = self._stops.feed(before)
        if found.stop is not None:
            return found.text, found.stop
        ended = self._stops.feed(name, hidden=True)
        return found.text + ended.text, ended.stop
