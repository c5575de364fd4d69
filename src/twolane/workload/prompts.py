"""Prompts of exact lengths, with the shared prefixes of a trace."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from twolane.workload.traces import TraceRequest

_Numbers = npt.NDArray[np.uint64]


class TokenRange(msgspec.Struct, frozen=True):
    """Token ids in [low, high) to draw prompts from.

    The default keeps clear of the special tokens of the usual vocabularies: those sit below 1,000
    (Llama 2, Mistral, SmolLM2) or above 100,000 (Llama 3, Qwen).
    """

    low: int = 1000
    high: int = 30000

    @classmethod
    def parse(cls, text: str) -> "TokenRange":
        """Parse a range in the format LOW:HIGH.

        Raises:
            ValueError: the text has another form.
        """
        low, _, high = text.partition(":")
        if not (low.isdecimal() and high.isdecimal()):
            raise ValueError(f"{text!r} is not LOW:HIGH")
        return cls(int(low), int(high))

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"


class PromptMaker:
    """Generates the prompts of a workload; the same seed gives the same prompts.

    A hash id alone (with the seed) decides the content of its block, so that a shared id is
    shared content and a shared prefix of ids a shared prefix of tokens. A request without hash
    ids gets content of its own, decided by its index.

    Args:
        tokens: the ids to draw from.
        seed: Seed of all prompts.

    Raises:
        ValueError: there are no ids in the range.
    """

    def __init__(self, tokens: TokenRange, seed: int = 0) -> None:
        if not 0 <= tokens.low < tokens.high:
            raise ValueError(f"no token ids in the range {tokens.low}:{tokens.high}")
        self._tokens = tokens
        self._starts = np.random.SeedSequence(seed).generate_state(2, np.uint64).astype(np.uint64)
        """Initial states by kind of prompt."""

    def token_ids(self, index: int, request: TraceRequest) -> list[int]:
        """Return exactly `request.prompt_tokens` ids; `index` is the request's index in its
        workload."""
        if request.hash_ids:
            drawn = self._draw(_SHARED, request.hash_ids, request.block_tokens)
        else:
            drawn = self._draw(_OWN, (index,), request.prompt_tokens)
        ids: list[int] = drawn[: request.prompt_tokens].tolist()
        return ids

    def _draw(self, kind: int, keys: Sequence[int], count: int) -> _Numbers:
        """Return `count` tokens for each key, in order of keys.

        Hashes of (seed, kind, key, place): to seed a generator for each of a prompt's blocks takes
        longer than to serve the prompt in simulation.
        """
        streams = _mixed(self._starts[kind] + np.array(keys, dtype=np.uint64))
        places: _Numbers = np.arange(count, dtype=np.uint64)
        drawn = _mixed(streams[:, None] + places).ravel()
        low, high = self._tokens.low, self._tokens.high
        return ((drawn >> np.uint64(32)) * np.uint64(high - low) >> np.uint64(32)) + np.uint64(low)


def _mixed(numbers: _Numbers) -> _Numbers:
    """Return SplitMix64's output function, each bit of which depends on all input bits."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def as_text(ids: list[int]) -> str:
    """Return words for servers that accept no token ids: one common English word per id.

    Most tokenizers make one token of each, so the length in tokens is close but not exact;
    shared ids stay shared text.
    """
    return " ".join(_WORDS[token % len(_WORDS)] for token in ids)


_OWN, _SHARED = 0, 1
_WORDS = Path(__file__).with_name("words.txt").read_text().split()
