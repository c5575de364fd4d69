"""The prefix tree by its events so far, for subscribers that join late."""

from collections.abc import Iterator

from msgspec.structs import replace

from twolane.engine.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)


class TreeSnapshot:
    """The pages that batches of events have stored, parents before their children."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int | None, int], BlockStored] = {}
        """An event for each page alone, by its group and hash."""
        self._ts = 0.0

    def apply(self, batch: KVEventBatch) -> None:
        """Take in the batch that follows those before."""
        self._ts = batch.ts
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._pages.clear()
            elif isinstance(event, BlockRemoved):
                for gone in event.block_hashes:
                    self._pages.pop((event.group_idx, gone), None)
            else:
                self._pages.update(((one.group_idx, hashed), one) for hashed, one in _single(event))

    def batch(self) -> KVEventBatch:
        """Return a batch after which a subscriber knows these pages and no others."""
        events: list[KVEvent] = [AllBlocksCleared()]
        for page in self._pages.values():
            last = events[-1]
            if isinstance(last, BlockStored) and _joins(last, page):
                last.block_hashes.extend(page.block_hashes)
                last.token_ids.extend(page.token_ids)
                if last.extra_keys is not None:
                    last.extra_keys.append(None)
            else:
                events.append(_copied(page))
        return KVEventBatch(self._ts, events)


def _single(event: BlockStored) -> Iterator[tuple[int, BlockStored]]:
    """Cut an event into one for each of its pages."""
    parent, size = event.parent_block_hash, event.block_size
    for i, hashed in enumerate(event.block_hashes):
        keys = event.extra_keys[i] if event.extra_keys else None
        tokens = event.token_ids[i * size : (i + 1) * size]
        extra: list[tuple[str, ...] | None] | None = None if keys is None else [keys]
        changed = {"block_hashes": [hashed], "parent_block_hash": parent, "token_ids": tokens}
        yield hashed, replace(event, **changed, extra_keys=extra)
        parent = hashed


def _joins(last: BlockStored, page: BlockStored) -> bool:
    follows = last.block_hashes[-1] == page.parent_block_hash
    return follows and last.group_idx == page.group_idx


def _copied(page: BlockStored) -> BlockStored:
    """Return a copy of an event that may be extended."""
    extra = None if page.extra_keys is None else list(page.extra_keys)
    hashes, tokens = list(page.block_hashes), list(page.token_ids)
    return replace(page, block_hashes=hashes, token_ids=tokens, extra_keys=extra)
