"""The radix tree of full pages that requests share."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from twolane.engine.kv.page_hash import ROOT_HASH, page_hash, page_key

SPARE_IDLE = 1000
"""Stale entries of a heap of idle nodes, beside one for each node, before they are dropped."""


class Node:
    """One full page in the radix tree; its path from the root spells the tokens before it."""

    __slots__ = (
        "_top", "children", "depth", "hash", "key", "last_used", "page", "parent", "pins", "state",
        "window", "window_pins", "window_used",
    )  # fmt: skip

    def __init__(self, parent: "Node | None", key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Pages of the path that ends here."""
        self.hash: int = ROOT_HASH if parent is None else page_hash(parent.hash, key)
        self.page = page
        self._top = None if parent is None or not parent.depth else parent.top
        self.children: dict[bytes, Node] = {}
        self.pins = 1
        """Allocations that hold it; a root is pinned for ever."""
        self.last_used = 0
        self.state = -1
        """Id of the snapshot of states after this page; -1: it has none."""
        self.window: tuple[int, ...] = ()
        """Pages of its tokens in layers with a sliding window, one for each of their tables; empty:
        they are not held any more."""
        self.window_pins = 0
        """Allocations that hold the pages of `window`, all of which hold the node, too."""
        self.window_used = 0

    @property
    def top(self) -> "Node":
        """The first node of the path, which may be this one: a node that named itself would be a
        cycle, and so garbage when it has left the tree."""
        return self if self._top is None else self._top

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


class HoldingWatcher(Protocol):
    """Observer of the nodes that hold a snapshot, or pages of a window; nodes may be forgotten."""

    def saved(self, node: Node) -> None:
        """Note that a node holds one from now on."""

    def lost(self, node: Node) -> None:
        """Note that a node holds none any more, before it leaves the tree."""


class PrefixTree:
    """A radix tree over pages. A pinned node's ancestors are pinned, too."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root = Node(None, b"", -1)
        self._former_roots: list[Node] = []
        """Roots of trees that were forgotten while pinned; no request finds their pages."""
        self._leaves = _IdleNodes(lambda node: node.last_used, _is_idle_leaf)
        self._windows = _IdleNodes(lambda node: node.window_used, _has_idle_window)
        self._tick = 0
        self.version = 0
        """Changes whenever a match or its cost may."""
        self.unpinned = 0
        """Number of unpinned nodes, all of them reclaimable."""
        self.unpinned_window_pages = 0
        """Number of pages of layers with a window that only nodes hold, all of them reclaimable."""
        self.watchers: list[PageWatcher] = []
        self.window_watchers: list[HoldingWatcher] = []
        self.waiting: dict[bytes, dict[Any, None]] = {}
        """Requests whose matches somebody remembers, by the key of their first page."""
        self.touched: set[bytes] = set()
        """Keys of `waiting` below which pages came or went since somebody last looked."""

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
        self._touch(node)
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
            if not node.pins and not node.children:
                self._leaves.push(node)

    def put_window(self, node: Node, pages: tuple[int, ...]) -> None:
        """Let a node that has none hold the pages of its tokens in layers with a window, pinned
        once."""
        node.window, node.window_pins = pages, 1
        self._touch(node)
        for watcher in self.window_watchers:
            watcher.saved(node)

    def pin_window(self, node: Node) -> None:
        """Keep the window's pages of a node from being reclaimed."""
        if not node.window_pins:
            self.unpinned_window_pages -= len(node.window)
            self.version += 1
        node.window_pins += 1

    def unpin_window(self, node: Node, *, useful: bool) -> None:
        """Unpin the window's pages of a node; those that are not useful are reclaimed first."""
        node.window_pins -= 1
        if node.window_pins:
            return
        self.unpinned_window_pages += len(node.window)
        self.version += 1
        node.window_used = self._tick if useful else 0
        self._windows.push(node)

    def evict(self) -> list[int]:
        """Take the pages of what was used least recently: an unpinned leaf, or what a node has
        unpinned of layers with a window, after which the node stays.

        Raises:
            IndexError: there is none.
        """
        leaf, window = self._leaves.first(), self._windows.first()
        if window is not None and (leaf is None or window.window_used <= leaf.last_used):
            self._touch(window)
            return self._take_window(window)
        if leaf is None:
            raise IndexError("all pages are in use")
        window_pages, parent = self._take_window(leaf), leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        leaf.parent = None
        for watcher in self.watchers:
            watcher.removed(leaf)
        self.unpinned -= 1
        self._touch(leaf)
        if not parent.pins and not parent.children:
            self._leaves.push(parent)
        return [leaf.page, *window_pages]

    def _take_window(self, node: Node) -> list[int]:
        if node.window:
            for watcher in self.window_watchers:
                watcher.lost(node)
        pages, node.window = node.window, ()
        self.unpinned_window_pages -= len(pages)
        return list(pages)

    def forget(self) -> list[int]:
        """Hide all pages in the tree from later requests.

        Returns:
            The unpinned pages; the others become reclaimable when they are unpinned.
        """
        pages: list[int] = []
        while self.unpinned or self.unpinned_window_pages:
            pages += self.evict()
        self._former_roots = [root for root in (*self._former_roots, self._root) if root.children]
        self._root = Node(None, b"", -1)
        self.touch_all()
        for watcher in self.watchers:
            watcher.forgotten()
        return pages

    def first_key(self, tokens: Sequence[int], salt: bytes) -> bytes | None:
        """Return the key of the first page that could be matched; None if there is none."""
        size = self._page_size
        return page_key(tokens, 0, size, salt) if len(tokens) > size else None

    def touch_all(self) -> None:
        """Note that any match may have changed."""
        self.version += 1
        self.touched.update(self.waiting)

    def _touch(self, node: Node) -> None:
        """Note that matches which go through the first page of a node's path may have changed."""
        self.version += 1
        if node.top.key in self.waiting:
            self.touched.add(node.top.key)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, parents before children, and those forgotten but still pinned."""
        roots = (self._root, *self._former_roots)
        stack = [node for root in roots for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class _IdleNodes:
    """Nodes that something can be taken from, the least recently used first.

    Args:
        used: Returns when a node was used.
        idle: Returns whether something can be taken from a node now.
    """

    def __init__(self, used: Callable[[Node], int], idle: Callable[[Node], bool]) -> None:
        self._used, self._idle = used, idle
        self._heap: list[tuple[int, int, Node]] = []
        """Some entries are stale: their nodes were pinned, extended, used or evicted since."""
        self._most = SPARE_IDLE

    def push(self, node: Node) -> None:
        """Add a node that is idle now."""
        heapq.heappush(self._heap, (self._used(node), -node.depth, node))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SPARE_IDLE

    def first(self) -> Node | None:
        """Return the least recently used one; None: there is none."""
        while self._heap and not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _holds(self, entry: tuple[int, int, Node]) -> bool:
        used, _, node = entry
        return used == self._used(node) and self._idle(node)


def _is_idle_leaf(node: Node) -> bool:
    return not node.pins and not node.children and node.parent is not None


def _has_idle_window(node: Node) -> bool:
    return bool(node.window) and not node.window_pins
