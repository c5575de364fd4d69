"""Collects the prefix tree's changes of landmarks for the API process."""

from twolane.engine.kv.prefix_digest import is_landmark
from twolane.engine.kv.prefix_tree import Node


class LandmarkWatcher:
    """A `PageWatcher` that keeps the landmarks (`engine/kv/prefix_digest.py`) of a prefix tree.

    Args:
        page_size: tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._nodes: dict[int, Node] = {}
        self._changes: dict[int, int] = {}
        """Length in pages by hash, 0 for what is gone; since the last `take_changes`."""

    def stored(self, node: Node) -> None:
        """See `PageWatcher.stored`."""
        if is_landmark(node.depth, self._page_size):
            self._nodes[node.hash] = node
            self._changes[node.hash] = node.depth

    def removed(self, node: Node) -> None:
        """See `PageWatcher.removed`."""
        if self._nodes.get(node.hash) is node:
            del self._nodes[node.hash]
            self._changes[node.hash] = 0

    def forgotten(self) -> None:
        """See `PageWatcher.forgotten`."""
        self._changes.update(dict.fromkeys(self._nodes, 0))
        self._nodes.clear()

    def take_changes(self) -> dict[int, int]:
        """Return the changes since the last call (see `Outputs.landmarks`)."""
        changes, self._changes = self._changes, {}
        return changes
