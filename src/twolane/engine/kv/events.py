"""Events of the prefix tree in vLLM's format, and the journal that collects them.

vLLM calls a page a block. Messages are msgpack: every struct is an array of its fields in order,
and an event begins with the name of its type.
"""

from array import array
from collections.abc import Callable

import msgspec

from twolane.engine.kv.prefix_tree import Node, PageWatcher

DEVICE_MEDIUM = "GPU"
"""vLLM's word for the engine's own KV pool; other media are tiers below it, which there are none
of."""

PAGES, STATES = 0, 1
"""Groups of layers of a model with states: those with keys and values, and those with states, of
which a block is a snapshot."""
KINDS = ("full_attention", "mamba")
"""vLLM's names for the kinds of these groups."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pages that entered the tree, each the child of the one before."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the page before the first of them; None: they begin a sequence."""
    token_ids: list[int]
    """Tokens of all of these pages."""
    block_size: int
    """Number of tokens in a page."""
    lora_id: int | None = None
    medium: str = DEVICE_MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each page what else its hash covers: what keeps it to requests of one `cache_salt` and
    adapter, in hexadecimal, which only the first page of a sequence can have. None: nothing for any
    page."""
    group_idx: int | None = None
    """`PAGES` or `STATES` of a model with states, whose requests can begin after a page that both
    groups have; None: the model has none."""
    kv_cache_spec_kind: str | None = None
    """vLLM's name for the kind of layers of the group."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pages that left the tree, leaves first."""

    block_hashes: list[int]
    medium: str = DEVICE_MEDIUM
    group_idx: int | None = None
    """See `BlockStored`."""


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tree is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one turn of the loop."""

    ts: float
    """Time of publishing in seconds since the epoch."""
    events: list[KVEvent]
    data_parallel_rank: int = 0
    """Each engine is a server of its own, so that there is no other rank."""


class KVJournal(PageWatcher):
    """Collects the changes of a prefix tree, and of the snapshots of states that its nodes hold,
    until they are taken.

    Args:
        page_size: number of tokens in a page.
        states: Whether the model has states.
    """

    def __init__(self, page_size: int, *, states: bool = False) -> None:
        self.adapter: Callable[[bytes], str | None] = lambda salt: None
        """Returns the name of the adapter that computes pages of this salt; None: none does."""
        # A token takes this number of bytes in a page's key.
        self._key_bytes = 8 * page_size
        self._adapters: dict[int, str] = {}
        """Names of the adapters of nodes that have one, by hash."""
        self._page_size = page_size
        self._group = PAGES if states else None
        """Group of pages."""
        self._found: dict[int, Node] = {}
        """Nodes that later requests can find, by hash."""
        self._events: list[KVEvent] = []

    def stored(self, node: Node) -> None:
        """See `PageWatcher`."""
        assert node.parent is not None
        self._found[node.hash] = node
        self._note_adapter(node, node.parent)
        last = self._events[-1] if self._events else None
        joins = isinstance(last, BlockStored) and last.block_hashes[-1] == node.parent.hash
        stored = self._stored(node, node.parent, self._group)
        if isinstance(last, BlockStored) and joins and last.group_idx == self._group:
            last.block_hashes.append(node.hash)
            last.token_ids.extend(stored.token_ids)
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            self._events.append(stored)

    def _stored(self, node: Node, parent: Node, group: int | None) -> BlockStored:
        salt, adapter = node.key[: -self._key_bytes], self._adapters.get(node.hash)
        return BlockStored(
            block_hashes=[node.hash],
            parent_block_hash=None if node.depth == 1 else parent.hash,
            token_ids=array("q", node.key[-self._key_bytes :]).tolist(),
            block_size=self._page_size,
            lora_name=adapter,
            extra_keys=[(salt.hex(),)] if salt else None,
            group_idx=group,
            kv_cache_spec_kind=None if group is None else KINDS[group],
        )

    def saved(self, node: Node) -> None:
        """See `SnapshotWatcher`."""
        if self._found.get(node.hash) is node:
            assert node.parent is not None
            self._events.append(self._stored(node, node.parent, STATES))

    def lost(self, node: Node) -> None:
        """See `SnapshotWatcher`."""
        if self._found.get(node.hash) is node:
            self._events.append(BlockRemoved([node.hash], group_idx=STATES))

    def removed(self, node: Node) -> None:
        """See `PageWatcher`."""
        if self._found.get(node.hash) is not node:
            return  # forgotten before
        del self._found[node.hash]
        self._adapters.pop(node.hash, None)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == self._group:
            last.block_hashes.append(node.hash)
        else:
            self._events.append(BlockRemoved([node.hash], group_idx=self._group))

    def forgotten(self) -> None:
        """See `PageWatcher`; what was noted before does not matter any more."""
        self._found.clear()
        self._adapters.clear()
        self._events = [AllBlocksCleared()]

    def _note_adapter(self, node: Node, parent: Node) -> None:
        if node.depth > 1:
            adapter = self._adapters.get(parent.hash)
        else:
            adapter = self.adapter(node.key[: -self._key_bytes])
        if adapter is not None:
            self._adapters[node.hash] = adapter

    def take(self) -> list[KVEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events
