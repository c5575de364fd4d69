"""Hashes of full KV pages that are the same on every server; each covers all tokens up to its
page's end.

The prefix tree, the KV events and whoever chooses a replica by prefix use the same hashes, so that
the pages of a prompt can be looked up in what a server publishes.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence

ROOT_HASH = 0
"""Parent hash of the first page of a sequence."""
HASH_BYTES = 8
"""Bytes of a page's hash, which is an unsigned 64-bit integer."""
ADAPTER_MARK = b"lora"
"""First bytes of the salt of an adapter's pages; the adapter's digest follows."""
DIGEST_BYTES = 32
"""Bytes of a SHA-256 digest."""


def page_key(tokens: Sequence[int], page: int, page_size: int, salt: bytes = b"") -> bytes:
    """Return a full page of a sequence as bytes: its tokens as 64-bit little-endian integers.

    The first page begins with the salt, so that sequences of different salts share no page.
    """
    key = array("q", tokens[page * page_size : (page + 1) * page_size])
    if sys.byteorder == "big":
        key.byteswap()
    return key.tobytes() if page else salt + key.tobytes()


def page_hash(parent: int, key: bytes) -> int:
    """Return the hash of a page from the hash of the page before it and its own `page_key`.

    It is the first 64 bits of BLAKE2b over both, as an unsigned little-endian integer.
    """
    digest = hashlib.blake2b(parent.to_bytes(HASH_BYTES, "little") + key, digest_size=HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")


def page_hashes(tokens: Sequence[int], page_size: int, salt: bytes = b"") -> Iterator[int]:
    """Yield the hashes of all full pages of a sequence, in the order of its tokens."""
    hashed = ROOT_HASH
    for page in range(len(tokens) // page_size):
        hashed = page_hash(hashed, page_key(tokens, page, page_size, salt))
        yield hashed


def salt_bytes(cache_salt: str | None, adapter: bytes = b"") -> bytes:
    """Return the salt of a request's first page.

    Args:
        cache_salt: The request's salt; None if it has none.
        adapter: digest of the adapter that it asks for, `DIGEST_BYTES` long; empty: of none.
    """
    tenant = b"" if cache_salt is None else hashlib.sha256(cache_salt.encode()).digest()
    return ADAPTER_MARK + adapter + tenant if adapter else tenant


def adapter_of(salt: bytes) -> bytes:
    """Return the digest of the adapter that pages with this salt belong to; empty: none."""
    end = len(ADAPTER_MARK) + DIGEST_BYTES
    if not salt.startswith(ADAPTER_MARK) or len(salt) not in (end, end + DIGEST_BYTES):
        return b""
    return salt[len(ADAPTER_MARK) : end]
