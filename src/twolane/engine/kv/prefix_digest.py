"""Digest of a server's prefix tree that it publishes: hashes of prefixes at certain lengths.

A *landmark* is a page at one of these lengths. They are close together at the beginning of a
sequence, where instructions are shared, and `STRIDE_TOKENS` apart further on, so that a pool of a
million tokens has about two thousand of them. Of a model with linear attention, landmarks are the
pages after which there is a snapshot of states: only there can a request begin.
"""

import hashlib
import heapq
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from twolane.engine.kv.page_hash import HASH_BYTES, page_hashes

OPENING_TOKENS = 4
"""Tokens at the end of a prompt before which its last snapshot of states is taken: templates begin
the answer's thinking there, and leave it out of later turns."""
STRIDE_TOKENS = 512
"""Tokens between two landmarks of a long prefix."""
MAX_LANDMARKS = 4096
"""Most landmarks of a digest; those of shorter prefixes take precedence."""


def is_landmark(pages: int, page_size: int) -> bool:
    """Return whether a prefix of this many pages is published: a power of two, or a multiple of the
    stride."""
    stride = max(1, STRIDE_TOKENS // page_size)
    return pages % stride == 0 if pages >= stride else pages & (pages - 1) == 0


class Landmarks(NamedTuple):
    """The landmarks of one prompt, shortest first."""

    tokens: Sequence[int] = ()
    """Lengths of the prefixes in tokens."""
    hashes: Sequence[int] = ()
    states: bool = False
    """Whether they are all pages, since the model has states: who has a prefix may lack shorter
    ones."""

    @classmethod
    def of(
        cls, prompt: Sequence[int], page_size: int, salt: bytes = b"", *, states: bool = False
    ) -> "Landmarks":
        """Return the landmarks of a prompt without its last token, which is always computed.

        Args:
            prompt: token ids.
            page_size: tokens in a page of the server that is looked up.
            salt: see `page_hash.salt_bytes`.
            states: Whether the model has states.
        """
        pages = enumerate(page_hashes(prompt[: len(prompt) - 1], page_size, salt), 1)
        marks = [
            (page * page_size, each)
            for page, each in pages
            if states or is_landmark(page, page_size)
        ]
        tokens, hashes = zip(*marks, strict=True) if marks else ((), ())
        return cls(tokens, hashes, states)

    def left_by(self, prompt_tokens: int) -> Sequence[int]:
        """Return the hashes that a server has after it has computed such a prompt."""
        if not self.states:
            return self.hashes
        last = bisect_right(self.tokens, prompt_tokens - OPENING_TOKENS)
        return self.hashes[max(0, last - 1) : last]

    def reused(self, has: Callable[[int], bool]) -> int:
        """Return the number of tokens of the longest prefix that `has` knows by its hash. Without
        states, who has a prefix has all shorter ones."""
        if self.states:
            longest = zip(reversed(self.tokens), reversed(self.hashes), strict=True)
            return next((tokens for tokens, hashed in longest if has(hashed)), 0)
        found = bisect_right(self.hashes, False, key=lambda hashed: not has(hashed))
        return self.tokens[found - 1] if found else 0


class PrefixDigest(msgspec.Struct, frozen=True):
    """The landmarks of a server's prefix tree at one moment."""

    version: int
    """Number that changes whenever the landmarks do."""
    page_size: int
    """Tokens in a page."""
    hashes: bytes
    """Hashes of `HASH_BYTES` little-endian bytes each, those of shorter prefixes first."""

    def as_set(self) -> frozenset[int]:
        """Return the hashes as integers."""
        whole = len(self.hashes) // HASH_BYTES
        return frozenset(np.frombuffer(self.hashes, f"<u{HASH_BYTES}", whole).tolist())


class PrefixBook:
    """The landmarks of a server, updated by changes that its engine reports.

    Args:
        page_size: tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self.version = 0
        self.key: bytes | None = None
        """Key of the published hashes, so that who sees them cannot guess prompts; None: they are
        those of pages. Set before the first change."""
        self._page_size = page_size
        self._pages: dict[int, int] = {}
        """Length in pages, by hash."""
        self._digest: PrefixDigest | None = None

    def change(self, changes: Mapping[int, int]) -> None:
        """Apply changes: prefix length in pages by hash; 0 removes the landmark."""
        for page_hash, pages in changes.items():
            hashed = self.keyed(page_hash)
            if pages:
                self._pages[hashed] = pages
            else:
                self._pages.pop(hashed, None)
        self.version += 1

    def keyed(self, page_hash: int) -> int:
        """Return the published hash of a prefix by the hash of its last page."""
        if self.key is None:
            return page_hash
        data = page_hash.to_bytes(HASH_BYTES, "little")
        keyed = hashlib.blake2b(data, digest_size=HASH_BYTES, key=self.key)
        return int.from_bytes(keyed.digest(), "little")

    def has(self, page_hash: int) -> bool:
        """Return whether the tree has the prefix with this hash of its last page."""
        return self.keyed(page_hash) in self._pages

    def digest(self) -> PrefixDigest:
        """Return at most `MAX_LANDMARKS` landmarks; the same object until something changes."""
        if self._digest is None or self._digest.version != self.version:
            top = heapq.nsmallest(MAX_LANDMARKS, self._pages, key=self._pages.__getitem__)
            packed = b"".join(each.to_bytes(HASH_BYTES, "little") for each in top)
            self._digest = PrefixDigest(self.version, self._page_size, packed)
        return self._digest
