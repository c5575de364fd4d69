"""Snapshots of the states of linear attention, which nodes of the prefix tree hold.

A prompt that goes on where an earlier one was needs the pages of its beginning and the states at
its end. Snapshots lie beside the states of running requests, within a budget: an id is free, or
reserved by an allocation whose launch writes it, or held by the node whose page it follows.
"""

from collections import Counter
from collections.abc import Iterable

from twolane.engine.kv.prefix_tree import HoldingWatcher, Node


class Snapshots:
    """The snapshots of a pool, and which nodes hold them.

    A watcher of the prefix tree: a page that leaves it gives its snapshot back.

    Args:
        first: Id of the first snapshot; those below are slots of requests.
        count: Number of snapshots.
    """

    def __init__(self, first: int, count: int) -> None:
        self.ids = range(first, first + count)
        self._free = list(self.ids)
        self._held: dict[Node, None] = {}
        """Nodes with a snapshot, the least recently used first."""
        self._read = Counter[int]()
        """Snapshots that launches read, and how many allocations do."""
        self.hits = 0
        """Number of allocations that began with a snapshot."""
        self.watchers: list[HoldingWatcher] = []

    @property
    def held(self) -> int:
        """Snapshots that later requests can begin with."""
        return len(self._held)

    def reserve(self) -> int | None:
        """Return the id of a snapshot to write, if need be one that a node holds and no launch
        reads; None: all are in use."""
        if self._free:
            return self._free.pop()
        idle = next((node for node in self._held if not self._read[node.state]), None)
        if idle is None:
            return None
        return self._take(idle)

    def put(self, node: Node | None, snapshot: int) -> None:
        """Let a node hold a snapshot that was written; it is free if there is no such node, or the
        node has one."""
        if node is None or node.parent is None or node.state >= 0:
            self._free.append(snapshot)
            return
        node.state = snapshot
        self._held[node] = None
        for watcher in self.watchers:
            watcher.saved(node)

    def use(self, node: Node) -> int:
        """Return the snapshot of a node, which is the latest used from now on; it stays until it is
        `read`."""
        self._held[node] = self._held.pop(node)
        self._read[node.state] += 1
        self.hits += 1
        return node.state

    def read(self, snapshot: int) -> None:
        """Note that an allocation's launch has read a snapshot, or will not."""
        self._read[snapshot] -= 1
        if not self._read[snapshot]:
            del self._read[snapshot]

    def stored(self, node: Node) -> None:
        """See `PageWatcher.stored`."""

    def removed(self, node: Node) -> None:
        """See `PageWatcher.removed`."""
        if node.state >= 0:
            self._free.append(self._take(node))

    def forgotten(self) -> None:
        """See `PageWatcher.forgotten`."""

    def _take(self, node: Node) -> int:
        for watcher in self.watchers:
            watcher.lost(node)
        del self._held[node]
        taken, node.state = node.state, -1
        return taken

    def check(self, reserved: Iterable[int]) -> None:
        """Assert that no snapshot is lost or owned twice, given those that allocations reserve."""
        held = [node.state for node in self._held]
        assert sorted([*self._free, *held, *reserved]) == list(self.ids), "a snapshot is lost"
        assert all(node.parent is not None for node in self._held), "an evicted page has a snapshot"
