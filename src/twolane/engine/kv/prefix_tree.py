"""The radix tree of full pages that requests share."""

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

from twolane.engine.kv.page_hash import ROOT_HASH, page_hash, page_key

SPARE_IDLE = 1000
"""Stale entries of the heap of idle leaves, beside one for each leaf, before they are dropped."""


class Node:
    """One full page in the radix tree; its path from the root spells the tokens before it."""

    __slots__ = ("children", "depth", "hash", "key", "last_used", "page", "parent", "pins", "state")

    def __init__(self, parent: "Node | None", key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Pages of the path that ends here."""
        self.hash: int = ROOT_HASH if parent is None else page_hash(parent.hash, key)
        self.page = page
        self.children: dict[bytes, Node] = {}
        self.pins = 1
        """Allocations that hold it; a root is pinned for ever."""
        self.last_used = 0
        self.state = -1
        """Id of the snapshot of states after this page; -1: it has none."""

    def __lt__(self, other: "Node") -> bool:
        return self.last_used < other.last_used


class PageWatcher(Protocol):
    """Observer of the pages that later requests can find in the prefix tree."""

    def stored(self, node: Node) -> None:
        """Note that a page entered the tree, below its parent."""

    def removed(self, node: Node) -> None:
        """Note that a page without children left the tree; it may have been forgotten before."""

    def forgotten(self) -> None:
        """Note that all pages left the tree."""


class PrefixTree:
    """A radix tree over pages. A pinned node's ancestors are pinned, too."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root = Node(None, b"", -1)
        self._former_roots: list[Node] = []
        """Roots of trees that were forgotten while pinned; no request finds their pages."""
        self._idle_leaves: list[tuple[int, Node]] = []
        """A heap of idle leaves, some of them stale."""
        self._max_idle = SPARE_IDLE
        self._tick = 0
        self.version = 0
        """Changes whenever a match or its cost may."""
        self.unpinned = 0
        """Number of unpinned nodes, all of them reclaimable."""
        self.watchers: list[PageWatcher] = []

    def match(
        self, tokens: Sequence[int], pages: int, known: Sequence[Node] = (), salt: bytes = b""
    ) -> list[Node]:
        """Return the longest path of at most `pages` nodes that begins these tokens, by this salt.

        `known` is an earlier answer for the same tokens and pages: what is left of it holds, for
        a node in the tree has its ancestors there, and leads on to what was added since.
        """
        path = list(known) if known and known[0].parent is self._root else []
        while path and path[-1].parent is None:
            path.pop()  # evicted since
        node = path[-1] if path else self._root
        for page in range(len(path), pages):
            child = node.children.get(page_key(tokens, page, self._page_size, salt))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def child(self, path: Sequence[Node], key: bytes) -> Node | None:
        """Return the node that extends this path by this page; None if there is none."""
        return (path[-1] if path else self._root).children.get(key)

    def add(self, path: Sequence[Node], key: bytes, page: int) -> Node:
        """Extend the path by a page, pinned once; the path's nodes are pinned by the caller."""
        parent = path[-1] if path else self._root
        node = Node(parent, key, page)
        parent.children[key] = node
        self.version += 1
        if not path or path[0].parent is self._root:
            for watcher in self.watchers:
                watcher.stored(node)
        return node

    def pin(self, node: Node) -> None:
        """Keep a node from being reclaimed; parents before children."""
        self.unpinned -= node.pins == 0
        self.version += node.pins == 0
        node.pins += 1

    def unpin(self, path: Sequence[Node]) -> None:
        """Unpin a whole path; forgotten pages are reclaimed first."""
        self._tick += 1
        used = self._tick if path and path[0].parent is self._root else 0
        for node in reversed(path):
            node.pins -= 1
            self.unpinned += node.pins == 0
            self.version += node.pins == 0
            node.last_used = used
            self._push_idle(node)

    def evict(self) -> int:
        """Take the page of the least recently used unpinned leaf.

        Raises:
            IndexError: there is none.
        """
        used, node = heapq.heappop(self._idle_leaves)
        while not _still_idle(used, node):
            used, node = heapq.heappop(self._idle_leaves)
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        for watcher in self.watchers:
            watcher.removed(node)
        self.unpinned -= 1
        self.version += 1
        self._push_idle(parent)
        return node.page

    def forget(self) -> list[int]:
        """Hide all pages in the tree from later requests.

        Returns:
            The unpinned pages; the others become reclaimable when they are unpinned.
        """
        pages = [self.evict() for _ in range(self.unpinned)]
        self._former_roots = [root for root in (*self._former_roots, self._root) if root.children]
        self._root = Node(None, b"", -1)
        self.version += 1
        for watcher in self.watchers:
            watcher.forgotten()
        return pages

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, parents before children, and those forgotten but still pinned."""
        roots = (self._root, *self._former_roots)
        stack = [node for root in roots for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _push_idle(self, node: Node) -> None:
        if node.pins or node.children:
            return
        heapq.heappush(self._idle_leaves, (node.last_used, node))
        if len(self._idle_leaves) > self._max_idle:
            self._idle_leaves = [each for each in self._idle_leaves if _still_idle(*each)]
            heapq.heapify(self._idle_leaves)
            self._max_idle = 2 * len(self._idle_leaves) + SPARE_IDLE


def _still_idle(used: int, node: Node) -> bool:
    """Return whether a leaf was not pinned, extended, used or evicted since it was pushed."""
    idle = not node.pins and not node.children
    return idle and used == node.last_used and node.parent is not None
