"""Prompts of an exact length, with the sharing that a trace prescribes."""

import msgspec
import numpy as np

from twolane.workload.traces import TraceRequest


class TokenRange(msgspec.Struct, frozen=True):
    """Token ids in [low, high) to draw prompts from.

    The default keeps clear of the special tokens of the usual vocabularies: those sit below 1,000
    (Llama 2, Mistral, SmolLM2) or above 100,000 (Llama 3, Qwen).
    """

    low: int = 1000
    high: int = 30000


class PromptMaker:
    """Makes the prompts of a workload; the same seed makes the same prompts.

    A hash id alone (with the seed) decides the content of its block, so that a shared id is
    shared content and a shared prefix of ids a shared prefix of tokens. A request without hash
    ids gets content of its own, decided by its index.
    """

    def __init__(self, tokens: TokenRange, seed: int = 0) -> None:
        if not 0 <= tokens.low < tokens.high:
            raise ValueError(f"no token ids in the range {tokens.low}:{tokens.high}")
        self._tokens = tokens
        self._seed = seed

    def token_ids(self, index: int, request: TraceRequest) -> list[int]:
        """Exactly `request.prompt_tokens` ids; `index` is the request's place in its workload."""
        if not request.hash_ids:
            return self._draw(_OWN, index, request.prompt_tokens)
        ids: list[int] = []
        for block in request.hash_ids:
            ids += self._draw(_SHARED, block, request.block_tokens)
        return ids[: request.prompt_tokens]

    def _draw(self, kind: int, key: int, count: int) -> list[int]:
        rng = np.random.default_rng([self._seed, kind, key])
        ids: list[int] = rng.integers(self._tokens.low, self._tokens.high, count).tolist()
        return ids


def as_text(ids: list[int]) -> str:
    """Words for servers that take no token ids: one common English word an id.

    Most tokenizers make one token of each, so the length in tokens is close but not exact;
    shared ids stay shared text.
    """
    return " ".join(_WORDS[token % len(_WORDS)] for token in ids)


_OWN, _SHARED = 0, 1
_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water been "
    "call who oil its now find long down day did get come made may part over new sound take only "
    "little work know place year live me back give most very after thing our just name good "
    "sentence man think say great where help through much before line right too mean old any same "
    "tell boy follow came want show also around form three small set put end does another well "
    "large must big even such because turn here why ask went men read need land different home us "
    "move try kind hand picture again change off play spell air away animal house point page "
    "letter mother answer found study still learn should world high"
)
_WORDS = _TEXT.split()
