"""The prefix tree by its events so far, for subscribers that join late."""

from collections.abc import Iterator

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
        self._pages: dict[int, BlockStored] = {}
        """An event for each page alone, by its hash."""
        self._ts = 0.0

    def apply(self, batch: KVEventBatch) -> None:
        """Take in the batch that follows those before."""
        self._ts = batch.ts
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._pages.clear()
            elif isinstance(event, BlockRemoved):
                for gone in event.block_hashes:
                    self._pages.pop(gone, None)
            else:
                self._pages.update(_single(event))

    def batch(self) -> KVEventBatch:
        """Return a batch after which a subscriber knows these pages and no others."""
        events: list[KVEvent] = [AllBlocksCleared()]
        for page in self._pages.values():
            last = events[-1]
            if isinstance(last, BlockStored) and last.block_hashes[-1] == page.parent_block_hash:
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
        yield (
            hashed,
            BlockStored(
                [hashed], parent, tokens, size, lora_name=event.lora_name, extra_keys=extra
            ),
        )
        parent = hashed


def _copied(page: BlockStored) -> BlockStored:
    """Return a copy of an event that may be extended."""
    extra = None if page.extra_keys is None else list(page.extra_keys)
    return BlockStored(
        list(page.block_hashes),
        page.parent_block_hash,
        list(page.token_ids),
        page.block_size,
        lora_name=page.lora_name,
        extra_keys=extra,
    )
