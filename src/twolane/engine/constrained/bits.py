"""Token masks: a bit for each token, the lowest first; a set bit allows its token."""

from collections.abc import Iterable


def no_token(vocab_size: int) -> bytes:
    """Return the mask that allows nothing."""
    return bytes(-(-vocab_size // 8))


def every_token(vocab_size: int) -> bytes:
    """Return the mask that allows all tokens, and has no bit beyond them."""
    return ((1 << vocab_size) - 1).to_bytes(-(-vocab_size // 8), "little")


def with_tokens(mask: bytes, tokens: Iterable[int]) -> bytes:
    """Return the mask with these tokens allowed."""
    changed = bytearray(mask)
    for token in tokens:
        changed[token // 8] |= 1 << token % 8
    return bytes(changed)


def without_tokens(mask: bytes, tokens: Iterable[int]) -> bytes:
    """Return the mask with these tokens not allowed."""
    changed = bytearray(mask)
    for token in tokens:
        changed[token // 8] &= ~(1 << token % 8)
    return bytes(changed)
