"""Sampling parameters, with the names of vLLM and SGLang, and log-probabilities of tokens."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from twolane.common.errors import FieldError
from twolane.common.options import Option

ANSWER = "Answer"
"""Panel of options in the help."""

MAX_LOGPROBS = 20
"""Largest number of alternatives with log-probabilities, as in OpenAI's API."""
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 128, 64
"""Most bad words of a request, and most characters of each."""
MAX_STOP_TOKEN_IDS = 128
"""Most stop tokens of a request."""
MAX_BIASED_TOKENS = 1024
"""Most tokens of a request that have a logit bias."""
MAX_LOGIT_BIAS = 100.0
"""Largest bias of a token, up or down, as in OpenAI's API."""
MAX_SHOWN = 200
"""Most characters of a refused value that its error shows."""
PACKED_TOGETHER = 64
"""Log-probabilities of at most this many tokens are packed and unpacked in one piece."""


_LENGTHS = f"1 to {MAX_BAD_WORD_LENGTH} characters"


class _NamedParams(msgspec.StructMeta):
    """Refuses unknown parameters by name."""

    def __call__(cls, *args: Any, **params: Any) -> Any:
        for name in params:
            if name not in cls.__struct_fields__:
                raise TypeError(
                    f"SamplingParams: {name} is none of {', '.join(cls.__struct_fields__)}; "
                    "docs/guides/from-vllm.md says what those of other engines are here"
                )
        return super().__call__(*args, **params)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=_NamedParams):
    """The parameters by which one request's tokens are chosen and its output ends.

    Raises:
        FieldError: a field is out of range.
    """

    temperature: Annotated[float, Option(ANSWER)] = 1.0
    """Divisor of the logits; 0 always takes the most likely token."""
    top_p: Annotated[float, Option(ANSWER)] = 1.0
    """Probability, from 0 to 1, that the most likely tokens to choose among must reach together; 0
    takes one token."""
    top_k: Annotated[int, Option(ANSWER)] = 0
    """Number of most likely tokens to choose among; 0 and -1 take all."""
    min_p: Annotated[float, Option(ANSWER)] = 0.0
    """Smallest probability of a token, as a share from 0 to 1 of the most likely token's."""
    seed: int | None = None
    """Seed of this request's random numbers, which then do not depend on other requests."""
    max_tokens: Annotated[int | None, Option(ANSWER)] = 16
    """Largest number of tokens to generate; None generates up to the context length."""
    min_tokens: Annotated[int, Option(ANSWER)] = 0
    """Number of tokens before which no end-of-sequence or stop token is chosen."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request; the output includes the one that ended it."""
    ignore_eos: bool = False
    """Whether to continue after the end-of-sequence token."""
    repetition_penalty: float = 1.0
    """Factor against tokens of the prompt and output: their positive logits are divided by it,
    their negative ones multiplied, so that values above 1 make them less likely."""
    presence_penalty: float = 0.0
    """Amount subtracted from the logit of each token that the output has."""
    frequency_penalty: float = 0.0
    """Amount subtracted from a token's logit for each time that the output has it."""
    logit_bias: dict[int, float] = {}
    """Amounts added to the logits, by token id."""
    logprobs: int | None = None
    """Number of alternatives to report with the log-probability of each output token; None reports
    none. Log-probabilities are the model's own, before bias, penalties, temperature and filters."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report with the log-probability of each prompt token but the first;
    None reports none. Such a request reuses no cached prefix."""

    grammar: str | None = None
    """Grammar of the output in llguidance's form, as its `LLMatcher` makes it from a JSON schema or
    a regular expression. Only tokens that it allows are chosen, and the output ends where it allows
    nothing more. Log-probabilities do not depend on it."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that are chosen, at least one; None: all. An end-of-sequence or stop token
    that is not among them is not chosen either. Log-probabilities do not depend on them."""
    bad_words: tuple[str, ...] = ()
    """Words that the output does not contain: a word's last token is never sampled after its
    other tokens. It has the tokens that it has at the beginning of a text, and those after a space;
    space in front of it does not count. Log-probabilities do not depend on them."""
    thinking_token_budget: int | None = None
    """Number of thinking tokens after which the mark that ends the thinking is forced; None and -1
    set no limit. The model's marks of thinking must be single tokens. Log-probabilities do not
    depend on it."""
    embeds: bool = False
    """Whether the prompt's last hidden state is returned with the first token."""

    def __post_init__(self) -> None:
        try:
            checks = (*self._drawing_checks(), *self._ending_checks())
        except (TypeError, AttributeError) as error:
            raise self._mistyped(error) from error
        for name, holds, allowed in checks:
            if not holds:
                given = repr(getattr(self, name))[:MAX_SHOWN]
                raise FieldError(name, f"must be {allowed}, not {given}")

    def _mistyped(self, error: Exception) -> Exception:
        """Return the error of the first field of a wrong type; `error` where there is none."""
        for field in msgspec.structs.fields(type(self)):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as wrong:
                return FieldError(field.name, f"has the wrong type: {wrong}")
        return error

    def _drawing_checks(self) -> tuple[tuple[str, bool, str], ...]:
        biases = self.logit_bias.values()
        return (
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 <= self.top_p <= 1.0, "between 0 and 1"),
            ("top_k", -1 <= self.top_k < 2**63, "-1, 0 (both: all tokens) or positive"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            # Compared, not looked up in a range, which walks to what is no `int`.
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "above 0"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            (
                "logit_bias",
                len(self.logit_bias) <= MAX_BIASED_TOKENS
                and all(0 <= t < 2**63 for t in self.logit_bias),
                f"of up to {MAX_BIASED_TOKENS} token ids",
            ),
            (
                "logit_bias",
                all(-MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS for bias in biases),
                "between -100 and 100 for each token",
            ),
        )

    def _ending_checks(self) -> tuple[tuple[str, bool, str], ...]:
        most, counts = self.max_tokens, range(MAX_LOGPROBS + 1)
        free = self.allowed_token_ids is None
        budget = -1 if self.thinking_token_budget is None else self.thinking_token_budget
        return (
            ("max_tokens", most is None or 1 <= most < 2**63, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens < 2**63, "at least 0"),
            ("min_tokens", most is None or self.min_tokens <= most, f"at most max_tokens ({most})"),
            ("min_tokens", self.grammar is None or not self.min_tokens, "0 with a grammar"),
            ("ignore_eos", self.grammar is None or not self.ignore_eos, "false with a grammar"),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS
                and all(0 <= t < 2**63 for t in self.stop_token_ids),
                f"up to {MAX_STOP_TOKEN_IDS} token ids",
            ),
            ("allowed_token_ids", self._allows_tokens(), "of token ids, at least one"),
            ("allowed_token_ids", free or self.grammar is None, "absent with a grammar"),
            ("bad_words", self._bans_words(), f"up to {MAX_BAD_WORDS} words of {_LENGTHS}"),
            ("bad_words", not self.bad_words or self.grammar is None, "absent with a grammar"),
            ("thinking_token_budget", -1 <= budget < 2**63, "-1 (no limit) or at least 0"),
            ("thinking_token_budget", budget < 0 or self.grammar is None, "absent with a grammar"),
            ("logprobs", self.logprobs is None or self.logprobs in counts, "between 0 and 20"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or self.prompt_logprobs in counts,
                "between 0 and 20",
            ),
        )

    def _allows_tokens(self) -> bool:
        ids = self.allowed_token_ids
        return ids is None or (len(ids) > 0 and all(0 <= token < 2**63 for token in ids))

    def _bans_words(self) -> bool:
        words = self.bad_words
        lengths = range(1, MAX_BAD_WORD_LENGTH + 1)
        within = not isinstance(words, str) and len(words) <= MAX_BAD_WORDS
        return within and all(len(word) in lengths for word in words)

    @property
    def token_ids(self) -> dict[str, Collection[int]]:
        """Token ids by the field that has them."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
        }

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        # Temperatures below this are greedy: the scaled logits would leave the float range.
        return self.temperature < 1e-5 or self.top_p == 0.0

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def check_token_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Refuse token ids that a model does not have.

    Args:
        field: the field that has them.
        ids: the token ids.
        vocab_size: number of tokens in the model's vocabulary.

    Raises:
        FieldError: the vocabulary has no such token.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise FieldError(field, f"has a token id outside 0 to {vocab_size - 1}")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one token and of its alternatives, as natural logarithms."""

    token: int
    logprob: float
    rank: int
    """Number of tokens that are at least as likely, this one included, as in vLLM; 1 is the most
    likely token."""
    top: list[tuple[int, float]]
    """The requested number of alternatives as (token, log-probability), most likely first."""


class PackedLogprobs(msgspec.Struct, array_like=True):
    """Encoded log-probabilities of consecutive tokens.

    As objects they would take ten times the memory, and fragmentation would keep the interpreter
    from returning it.
    """

    count: int = 0
    """Number of tokens."""
    blocks: list[bytes] = []
    """Lists of `TokenLogprobs` as msgpack."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for block in self.blocks:
            yield from msgspec.msgpack.decode(block, type=list[TokenLogprobs])

    def extend(self, entries: Sequence[TokenLogprobs]) -> None:
        """Add the next tokens."""
        for begin in range(0, len(entries), PACKED_TOGETHER):
            block = entries[begin : begin + PACKED_TOGETHER]
            self.blocks.append(msgspec.msgpack.encode(block))
        self.count += len(entries)
