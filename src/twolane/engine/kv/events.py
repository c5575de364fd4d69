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

PAGES, OTHERS = 0, 1
"""Groups of layers of a model with two kinds: those that keep keys and values of all tokens, and
those with states, of which a block is a snapshot, or with a window."""
FULL, STATES, WINDOW = "full_attention", "mamba", "sliding_window"
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
    """`PAGES` or `OTHERS` of a model with two kinds of layers. Requests can begin after a page that
    both groups have, with a window if the second has all pages of it; None: there is one kind."""
    kv_cache_spec_kind: str | None = None
    """vLLM's name for the kind of layers of the group."""
    kv_cache_spec_sliding_window: int | None = None
    """Tokens of the window of the group; None: its layers have none."""


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
    """Collects the changes of a prefix tree, and of what its nodes hold beside their pages, until
    they are taken.

    Args:
        page_size: number of tokens in a page.
        states: Whether the model has states.
        window: Tokens of the window of layers with pages of their own; 0: there are none.
    """

    def __init__(self, page_size: int, *, states: bool = False, window: int = 0) -> None:
        self.adapter: Callable[[bytes], str | None] = lambda salt: None
        """Returns the name of the adapter that computes pages of this salt; None: none does."""
        # A token takes this number of bytes in a page's key.
        self._key_bytes = 8 * page_size
        self._adapters: dict[int, str] = {}
        """Names of the adapters of nodes that have one, by hash."""
        self._page_size = page_size
        self._group = PAGES if states or window else None
        """Group of pages."""
        self._window = window or None
        self._found: dict[int, Node] = {}
        """Nodes that later requests can find, by hash."""
        self._events: list[KVEvent] = []

    def stored(self, node: Node) -> None:
        """See `PageWatcher`."""
        assert node.parent is not None
        self._found[node.hash] = node
        self._note_adapter(node, node.parent)
        self._note_stored(node, node.parent, self._group)

    def _note_stored(self, node: Node, parent: Node, group: int | None) -> None:
        """Note a page of a group, in the event of the page before it if it is among the latest:
        those of the two groups may take turns."""
        stored, latest = self._stored(node, parent, group), self._events[-2:]
        if not all(isinstance(event, BlockStored) for event in latest):
            latest = latest[-1:]
        for last in latest:
            if not isinstance(last, BlockStored) or last.group_idx != group:
                continue
            if last.block_hashes[-1] == parent.hash:
                last.block_hashes.append(node.hash)
                last.token_ids.extend(stored.token_ids)
                if last.extra_keys is not None:
                    last.extra_keys.append(None)
                return
        self._events.append(stored)

    def _stored(self, node: Node, parent: Node, group: int | None) -> BlockStored:
        salt, adapter = node.key[: -self._key_bytes], self._adapters.get(node.hash)
        other, window = (STATES, None) if self._window is None else (WINDOW, self._window)
        return BlockStored(
            block_hashes=[node.hash],
            parent_block_hash=None if node.depth == 1 else parent.hash,
            token_ids=array("q", node.key[-self._key_bytes :]).tolist(),
            block_size=self._page_size,
            lora_name=adapter,
            extra_keys=[(salt.hex(),)] if salt else None,
            group_idx=group,
            kv_cache_spec_kind=None if group is None else other if group == OTHERS else FULL,
            kv_cache_spec_sliding_window=window if group == OTHERS else None,
        )

    def saved(self, node: Node) -> None:
        """See `HoldingWatcher`."""
        if self._found.get(node.hash) is node:
            assert node.parent is not None
            self._note_stored(node, node.parent, OTHERS)

    def lost(self, node: Node) -> None:
        """See `HoldingWatcher`."""
        if self._found.get(node.hash) is node:
            self._events.append(BlockRemoved([node.hash], group_idx=OTHERS))

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
