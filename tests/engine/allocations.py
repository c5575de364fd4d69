"""Allocations of the KV cache's pages, as the engine makes them when it admits a request."""

from collections.abc import Sequence

from twolane.engine.kv.manager import Allocation, KVCacheManager


def allocate_if_room(
    kv: KVCacheManager, tokens: Sequence[int], *, reuse: bool = True, salt: bytes = b""
) -> Allocation | None:
    """Allocate a slot and pages for all of these tokens, the shared ones pinned; None: no room."""
    found = kv.lookup(tokens, reuse=reuse, salt=salt)
    if not kv.free_slots or found.cost > kv.free_pages + kv.reclaimable_pages:
        return None
    allocation = kv.begin(found, salt)
    assert kv.fill(allocation, len(tokens))
    return allocation
