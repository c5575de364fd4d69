"""Collects the prefix tree's changes of landmarks for the API process."""

from twolane.engine.kv.prefix_digest import is_landmark
from twolane.engine.kv.prefix_tree import Node


class LandmarkWatcher:
    """A `PageWatcher` that keeps the landmarks (`engine/kv/prefix_digest.py`) of a prefix tree.

    It is a `HoldingWatcher`, too: landmarks of a model with states are the pages after which there
    is a snapshot.

    Args:
        page_size: tokens in a page.
        states: Whether the model has states.
    """

    def __init__(self, page_size: int, *, states: bool = False) -> None:
        self._page_size = page_size
        self._states = states
        self._nodes: dict[int, Node] = {}
        """Pages that are or can become landmarks."""
        self._published: set[int] = set()
        """Hashes of landmarks."""
        self._changes: dict[int, int] = {}
        """Length in pages by hash, 0 for what is gone; since the last `take_changes`."""

    def stored(self, node: Node) -> None:
        """See `PageWatcher.stored`."""
        if self._states:
            self._nodes[node.hash] = node
        elif is_landmark(node.depth, self._page_size):
            self._nodes[node.hash] = node
            self.saved(node)

    def removed(self, node: Node) -> None:
        """See `PageWatcher.removed`."""
        if self._nodes.get(node.hash) is node:
            self.lost(node)
            del self._nodes[node.hash]

    def saved(self, node: Node) -> None:
        """See `HoldingWatcher.saved`."""
        if self._nodes.get(node.hash) is node:
            self._published.add(node.hash)
            self._changes[node.hash] = node.depth

    def lost(self, node: Node) -> None:
        """See `HoldingWatcher.lost`."""
        if self._nodes.get(node.hash) is node and node.hash in self._published:
            self._published.remove(node.hash)
            self._changes[node.hash] = 0

    def forgotten(self) -> None:
        """See `PageWatcher.forgotten`."""
        self._changes.update(dict.fromkeys(self._published, 0))
        self._published.clear()
        self._nodes.clear()

    def take_changes(self) -> dict[int, int]:
        """Return the changes since the last call (see `Outputs.landmarks`)."""
        changes, self._changes = self._changes, {}
        return changes
