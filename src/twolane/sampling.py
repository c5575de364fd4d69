"""What a request asks of the sampler, with the names that vLLM and SGLang use."""

import msgspec

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: the scaled logits would leave the float range."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when it ends.

    Raises:
        ValueError: a field is out of range; the message begins with the field's name.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities add up to this, in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one, in [0, 1]."""
    seed: int | None = None
    """Fixes the random numbers of this request, whatever runs beside it."""
    max_tokens: int | None = 16
    """The most tokens to generate; None is up to the model's context length."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are not chosen before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request; the one that did is the last token of the output."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "-1, 0 (both: all tokens) or positive"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"at most max_tokens ({self.max_tokens})",
            ),
            ("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "not negative"),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE
