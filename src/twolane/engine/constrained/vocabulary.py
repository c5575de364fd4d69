"""The texts of a model's tokens, by which grammars choose them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from twolane.engine.constrained.matching import Matching


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The model's tokens; sent once, before the first request that has a grammar."""

    texts: list[bytes]
    """Bytes by which each token, by its id, goes on with an answer's text; a special token's are
    its name."""
    special: list[int]
    """Tokens that are no text of an answer: a grammar allows them by their ids or names alone."""
    exact: str | None = None
    """A `tokenizer.json` that makes tokens of the same ids from any text, whose bytes are the text;
    None: there is none."""

    def matching(
        self, eos_token_ids: Sequence[int], slices: Sequence[str] | None = None
    ) -> Matching:
        """Return the form of the vocabulary that matchers take.

        Args:
            eos_token_ids: tokens that end an answer; at least one.
            slices: see `constraints.SLICES`; None: the library's own.

        Raises:
            ValueError: an end token is not in the vocabulary.
        """
        from llguidance import LLTokenizer

        # The library takes a list for the slices, and objects in the form of its TokenizerWrapper.
        texts: Any = _Texts(self, eos_token_ids) if self.exact is None else self.exact
        wanted = None if slices is None else list(slices)
        tokenizer = LLTokenizer(texts, eos_token=list(eos_token_ids), slices=wanted)
        return Matching(tokenizer, chooses=self.exact is None)


class _Texts:
    """What llguidance asks a tokenizer for.

    It would also have texts tokenised to which a grammar has no alternative. A model's tokenizer
    makes special tokens of their names, and changes texts by its normaliser, its added tokens and
    their spaces.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> None:
        self.tokens = vocabulary.texts
        ends = [token for token in eos_token_ids if token < len(vocabulary.texts)]
        self.special_token_ids = [*{*vocabulary.special, *ends}]
        self.eos_token_id = next(iter(ends), 0)
