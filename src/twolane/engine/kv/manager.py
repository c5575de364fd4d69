"""Manages the KV cache: its pages, their allocations, and the tree that shares them.

Every page is in exactly one place: on the free list, in the tree, or private to one allocation
(`KVCacheManager.check` asserts it). A page in the tree is read-only and full. An allocation pins
the path of tree nodes that its tokens begin with; an unpinned node is reclaimable.

Layers with a sliding window have pages of their own (`model/page_layout.py`), which go back as soon
as no later token sees them. A node holds those of its tokens apart from its page: they can be
reclaimed alone, and a prefix is found where the window before its end is still held.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from twolane.engine.kv.page_hash import page_key
from twolane.engine.kv.prefix_digest import OPENING_TOKENS
from twolane.engine.kv.prefix_tree import Node, PrefixTree
from twolane.engine.kv.states import Snapshots
from twolane.lanes.base import Ticket


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of looking a request up in the prefix tree."""

    reused: int
    """Tokens found."""
    cost: int
    """Free or reclaimable pages that allocating takes."""
    version: int
    """Version of the tree: the answer holds until it changes."""
    path: Sequence[Node] = ()
    """Nodes of the tokens found."""
    matched: Sequence[Node] = ()
    """Nodes of tokens of which there are pages, though not all that is needed to begin after them;
    a later lookup begins there."""
    seen: int = 0
    """Tokens of which there are pages, if states or windows are to be kept there; else 0."""


@dataclass(slots=True, eq=False)
class Allocation:
    """A request's slot and pages while it is in prefill or decode.

    It outlives the request's interest in it: its slot and pages go back when the last launch
    that names them has ended (`in_flight` is 0), never earlier.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    """Pages in the order of their tokens; only ever appended to."""
    path: list[Node] = field(default_factory=list)
    """Pinned nodes for the first `len(path)` pages. A node's page may differ from ours, when
    another request computed the same tokens at the same time: then ours stays private."""
    private: set[int] = field(default_factory=set)
    """Pages of ours that are not in the tree."""
    pages_sent: int = 0
    """Number of the pages that launches have sent to the lanes."""
    salt: bytes = b""
    """Salt of its pages, which only requests of the same salt share."""
    adapter: int = -1
    """The slot of its request's adapter; -1: none."""
    in_flight: int = 0
    """Launches that name this allocation and have not been reaped."""
    last_ticket: Ticket | None = None
    """Ticket of the last launch that names it; a launch in another lane waits for it."""
    given_up: bool = False
    """Whether its request has released it."""
    source: int = -1
    """Snapshot of the states with which its next tokens begin; -1: those of its slot."""
    reads: int = -1
    """Snapshot that stays until a launch has read it; -1: none."""
    seen: int = 0
    """See `Lookup.seen`."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """Numbers of tokens after which a launch saves its states, and the snapshots."""
    windows: list[tuple[int, ...]] = field(default_factory=list)
    """Pages in layers with a window, one for each of their tables, beside each of `pages`."""
    slid: int = 0
    """Number of `windows` at the beginning that it does not hold: no token to come sees them."""
    borders: tuple[int, ...] = ()
    """Numbers of pages where prefixes end that other requests are likely to share."""


class KVCacheManager:
    """Slots, pages and the prefix tree.

    Args:
        pages: Number of pages in the pool.
        page_size: tokens in a page.
        slots: the most allocations at a time.
        prefix_cache: Whether pages are shared between requests.
        snapshots: Snapshots of states of a model with linear attention, whose prefixes cannot be
            reused without one; None: the model has no states.
        borders: Where prompts save them, see `EngineConfig.snapshot_borders`.
        window: Tokens that layers with a sliding window see, if these have pages of their own.
        window_tables: Number of pages that they have for each page of tokens.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        slots: int,
        *,
        prefix_cache: bool,
        snapshots: int | None = None,
        borders: str = "prompt+branch",
        window: int = 0,
        window_tables: int = 0,
    ) -> None:
        self.total_pages, self.total_slots = pages, slots
        self.page_cost = 1 + window_tables
        """Number of pages that a page of tokens takes while its window is held."""
        self.window = window
        """Tokens that layers with a window see, if these have pages of their own, else 0."""
        self._window_tables = window_tables
        self.page_size = page_size
        self.tree = PrefixTree(page_size)
        self._free_pages = list(reversed(range(pages)))  # a sequence's are neighbours at first
        self._free_slots = list(range(slots))
        self._allocations: set[Allocation] = set()
        self._copies: dict[Node, dict[Allocation, None]] = {}
        """Allocations that pin a node and have a private copy of its page."""
        self.prefix_cache = prefix_cache
        self._borders = frozenset(borders.split("+"))
        self.snapshots = None if snapshots is None else Snapshots(slots, snapshots)
        """The snapshots of states; None: the model has no states."""
        if self.snapshots is not None:
            self.tree.watchers.append(self.snapshots)

    @property
    def free_pages(self) -> int:
        """Pages on the free list."""
        return len(self._free_pages)

    @property
    def reclaimable_pages(self) -> int:
        """Pages that only the prefix tree holds."""
        return self.tree.unpinned + self.tree.unpinned_window_pages

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds in all layers, windows that no token sees any more included:
        the most that one request can have."""
        return self.total_pages // self.page_cost * self.page_size

    @property
    def windowed(self) -> bool:
        """Whether layers with a window have pages of their own."""
        return self._window_tables > 0

    @property
    def free_slots(self) -> int:
        """Allocations that can be made."""
        return len(self._free_slots)

    def state_counts(self) -> dict[str, int]:
        """Return the fields of `Stats` about states; none if the model has none."""
        if (snapshots := self.snapshots) is None:
            return {}
        return {
            "states": self.total_slots,
            "states_free": self.free_slots,
            "snapshots": len(snapshots.ids),
            "snapshots_held": snapshots.held,
            "snapshot_hits": snapshots.hits,
        }

    def forget_prefixes(self) -> None:
        """Share no page that is in the prefix tree now with a later request, and free those that
        nobody else holds."""
        self._free_pages.extend(self.tree.forget())

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def match(
        self, tokens: Sequence[int], *, before: Lookup | None = None, salt: bytes = b""
    ) -> list[Node]:
        """Return the shared pages that begin these tokens; at least the last token is left over.

        A full hit must recompute its last token, for its logits; pages in the tree are never
        written, so the page that holds it is left out. `before` is an earlier answer for the same
        tokens, which saves most of the work.
        """
        known = () if before is None else before.matched
        return self.tree.match(tokens, (len(tokens) - 1) // self.page_size, known, salt)

    def lookup(
        self,
        tokens: Sequence[int],
        *,
        reuse: bool = True,
        before: Lookup | None = None,
        salt: bytes = b"",
    ) -> Lookup:
        """Return what `begin` and `fill` would find and take; `before` as for `match`.

        Pages in the tree are left out if `reuse` is false, so that all tokens are computed, and so
        are those of allocations that have another salt.
        """
        path = matched = self.match(tokens, before=before, salt=salt) if reuse else []
        seen = 0
        if path and ("branch" if path[-1].children else "turn") in self._borders:
            seen = len(path) * self.page_size
        if self.snapshots is not None:
            held = (i for i in reversed(range(len(path))) if path[i].state >= 0)
            path = path[: next(held, -1) + 1]
        if self.windowed:
            path = path[: self._reach(path)]
        # A pinned node's ancestors are pinned: the pinned ones come first.
        pinned = bisect_left(path, True, key=lambda node: node.pins == 0)
        return Lookup(
            reused=len(path) * self.page_size,
            cost=self.pages_for(len(tokens)) - pinned + self._window_cost(path, len(tokens)),
            version=self.tree.version,
            path=path,
            matched=matched,
            seen=seen,
        )

    def begin(self, match: Lookup, salt: bytes = b"") -> Allocation:
        """Allocate a slot and pin what was found, so that others can be allocated before its pages
        are filled up (`fill`) without taking it.

        Raises:
            IndexError: there is no slot.
        """
        path = list(match.path)
        for node in path:
            self.tree.pin(node)
        pages = [node.page for node in path]
        allocation = Allocation(self._free_slots.pop(), pages, path, salt=salt, seen=match.seen)
        if self.windowed:
            self._hold_windows(allocation)
        if self.snapshots is not None and path:
            allocation.source = allocation.reads = self.snapshots.use(path[-1])
        self._allocations.add(allocation)
        return allocation

    def fill(self, allocation: Allocation, tokens: int) -> bool:
        """Add the pages of these tokens to an allocation that has begun; False, and nothing is
        added: no room."""
        if not self.grow(allocation, tokens):
            return False
        if (slid := allocation.slid) and not allocation.pages_sent:
            # Nothing reads what is sent in the place of pages that are not held, but it is a page.
            allocation.windows[:slid] = [allocation.windows[slid]] * slid
        return True

    def grow(self, allocation: Allocation, tokens: int) -> bool:
        """Add pages until that many tokens fit; False, and nothing is added: no room."""
        missing = self.pages_for(tokens) - len(allocation.pages)
        if missing <= 0:
            return True
        if missing * self.page_cost > self.free_pages + self.reclaimable_pages:
            return False
        for _ in range(missing):
            while len(self._free_pages) < self.page_cost:
                self._free_pages += self.tree.evict()
            page, *window = [self._free_pages.pop() for _ in range(self.page_cost)]
            allocation.pages.append(page)
            if self.windowed:
                allocation.windows.append(tuple(window))
            allocation.private.update((page, *window))
        return True

    def missing(self, allocation: Allocation, tokens: int) -> int:
        """Return the number of pages that an allocation lacks to hold this many tokens."""
        return max(0, self.pages_for(tokens) - len(allocation.pages)) * self.page_cost

    def held(self, allocation: Allocation) -> int:
        """Return the number of pages that an allocation holds."""
        windows = len(allocation.windows) - allocation.slid
        return len(allocation.pages) + windows * self._window_tables

    def _first_seen(self, tokens: int) -> int:
        """Return the first page that the token after this many sees through a window."""
        return max(0, tokens - self.window + 1) // self.page_size

    def _reach(self, path: Sequence[Node]) -> int:
        """Return the length of the longest part of a path whose last window is held."""
        depth = len(path)
        while depth:
            seen = range(self._first_seen(depth * self.page_size), depth)
            gap = next((place for place in reversed(seen) if not path[place].window), None)
            if gap is None:
                break
            depth = gap
        return depth

    def _window_cost(self, path: Sequence[Node], tokens: int) -> int:
        """Return the free or reclaimable pages that the windows of an allocation take."""
        if not self.windowed:
            return 0
        first = self._first_seen(len(path) * self.page_size)
        pinned = sum(node.window_pins > 0 for node in path[first:])
        return (self.pages_for(tokens) - first - pinned) * self._window_tables

    def _hold_windows(self, allocation: Allocation) -> None:
        """Pin the window before the tokens that a new allocation is to compute."""
        path, size = allocation.path, self.page_size
        allocation.slid = first = self._first_seen(len(path) * size)
        allocation.windows = [node.window for node in path]
        allocation.borders = len(path), allocation.seen // size
        for node in path[first:]:
            self.tree.pin_window(node)

    def slide(self, allocation: Allocation, computed: int) -> None:
        """Let go of the pages that have left the window.

        The caller vouches that launches which compute the first `computed` tokens have ended, and
        that these are shared if they are to be: all others see only what the next token sees.
        """
        if not self.windowed:
            return
        first = min(self._first_seen(computed), len(allocation.windows))
        for place in range(allocation.slid, first):
            useful = any(
                self._first_seen(border * self.page_size) <= place < border
                for border in allocation.borders
            )
            self._let_go(allocation, place, useful=useful)
        allocation.slid = max(allocation.slid, first)

    def _let_go(self, allocation: Allocation, place: int, *, useful: bool) -> None:
        """Let go of the window's pages of an allocation in this place."""
        pages = allocation.windows[place]
        if place < len(allocation.path) and allocation.path[place].window == pages:
            self.tree.unpin_window(allocation.path[place], useful=useful)
            return
        allocation.private.difference_update(pages)
        self._free_pages += pages

    def share(self, allocation: Allocation, tokens: Sequence[int], written: int) -> None:
        """Put its full pages into the tree.

        The caller vouches that the first `written` tokens are in the KV cache of all layers and
        were delivered or sent by the client.
        """
        if not self.prefix_cache:
            return
        path = allocation.path
        for i in range(len(path), written // self.page_size):
            key = page_key(tokens, i, self.page_size, allocation.salt)
            node = self.tree.child(path, key)
            if node is None:
                node = self.tree.add(path, key, allocation.pages[i])
                allocation.private.remove(node.page)
            else:
                self.tree.pin(node)
                self._copies.setdefault(node, {})[allocation] = None
                self._adopt(node, i)
            path.append(node)
            if self.windowed and i >= allocation.slid and not node.window:
                self.tree.put_window(node, allocation.windows[i])
                allocation.private.difference_update(node.window)

    def plan_saves(self, allocation: Allocation, tokens: int, start: int, count: int) -> None:
        """Reserve snapshots of the states that a launch of `count` tokens from `start` on saves.

        They are taken at the last page border before a prompt of this many `tokens` opens the
        answer, and at the border where it leaves what earlier ones had computed.
        """
        if self.snapshots is None or not self.prefix_cache:
            return
        last = max(0, tokens - OPENING_TOKENS) // self.page_size * self.page_size
        last *= "prompt" in self._borders
        for border in sorted({last, allocation.seen}):
            there = len(allocation.path) * self.page_size >= border
            if not start < border <= start + count or there:
                continue
            if (snapshot := self.snapshots.reserve()) is not None:
                allocation.saves.append((border, snapshot))
                self.tree.touch_all()

    def saved(self, allocation: Allocation, written: int) -> None:
        """Let nodes hold the snapshots of an allocation whose first `written` tokens were computed
        by launches that have ended, and whose pages are shared if they are to be."""
        if self.snapshots is None:
            return
        self._read(allocation)
        for border, snapshot in [each for each in allocation.saves if each[0] <= written]:
            place = border // self.page_size - 1
            node = allocation.path[place] if place < len(allocation.path) else None
            self.snapshots.put(node, snapshot)
            allocation.saves.remove((border, snapshot))
            self.tree.touch_all()

    def _read(self, allocation: Allocation) -> None:
        """Let go of the snapshot that an allocation began with."""
        if self.snapshots is not None and allocation.reads >= 0:
            self.snapshots.read(allocation.reads)
            allocation.reads = -1

    def _adopt(self, node: Node, place: int) -> None:
        """Replace a page that nobody uses, since all who pin its node have copies, by one of these.

        So a request that has the pool to itself holds no page twice.
        """
        copies = self._copies.get(node)
        if not copies or len(copies) < node.pins:
            return
        owner, _ = copies.popitem()
        self._free_pages.append(node.page)
        node.page = owner.pages[place]
        owner.private.remove(node.page)

    def give_up(self, allocation: Allocation) -> None:
        """Release an allocation; it is freed now, or when its last launch has ended."""
        allocation.given_up = True
        self._free_if_idle(allocation)

    @property
    def returning_pages(self) -> int:
        """Pages that will be free when launches now in flight have ended."""
        return sum(
            len(a.private)
            + sum(node.pins == 1 for node in a.path)
            + self._window_tables * sum(node.window_pins == 1 for node in self._windowed(a))
            for a in self._allocations
            if a.given_up
        )

    def _windowed(self, allocation: Allocation) -> list[Node]:
        """Return the nodes whose pages of a window an allocation holds."""
        pairs = zip(allocation.path, allocation.windows, strict=False)
        return [node for node, pages in [*pairs][allocation.slid :] if node.window == pages]

    @property
    def returning_slots(self) -> int:
        """Slots that will be free when launches now in flight have ended."""
        return sum(a.given_up for a in self._allocations)

    def launched(self, allocations: Iterable[Allocation], ticket: Ticket) -> None:
        """Note a launch that names these allocations."""
        for allocation in allocations:
            allocation.in_flight += 1
            allocation.last_ticket = ticket

    def reaped(self, allocations: Iterable[Allocation]) -> None:
        """Note that a launch that named these allocations was reaped."""
        for allocation in allocations:
            allocation.in_flight -= 1
            if allocation.given_up:
                self._free_if_idle(allocation)

    def _free_if_idle(self, allocation: Allocation) -> None:
        if allocation.in_flight:
            return
        self._allocations.remove(allocation)
        for node in allocation.path:
            self._copies.get(node, {}).pop(allocation, None)
        self.tree.unpin(allocation.path)
        for node in self._windowed(allocation):
            self.tree.unpin_window(node, useful=True)
        for place, node in enumerate(allocation.path):
            self._adopt(node, place)
            if not self._copies.get(node, True):
                del self._copies[node]
        self._free_pages.extend(sorted(allocation.private, reverse=True))
        self._free_slots.append(allocation.slot)
        self._read(allocation)
        if self.snapshots is not None:
            for _, snapshot in allocation.saves:
                self.snapshots.put(None, snapshot)

    def check(self) -> None:
        """Assert that no page or slot is lost or owned twice, and that every pin has an owner."""
        nodes = list(self.tree.nodes())
        owned = [*self._free_pages, *(page for n in nodes for page in (n.page, *n.window))]
        for allocation in self._allocations:
            owned.extend(allocation.private)
            windows = [page for each in allocation.windows[allocation.slid :] for page in each]
            assert allocation.private <= {*allocation.pages, *windows}
        assert sorted(owned) == list(range(self.total_pages)), "a page is lost or owned twice"
        pins: dict[Node, int] = {}
        for allocation in self._allocations:
            for node in allocation.path:
                pins[node] = pins.get(node, 0) + 1
        assert all(node.pins for node in self._copies), "copies of a page are remembered too long"
        assert all(node.pins == pins.pop(node, 0) for node in nodes), "a pin is wrong"
        assert not pins, "an evicted node is pinned"
        used = {page for allocation in self._allocations for page in allocation.pages}
        assert all(node.page in used for node in nodes if node.pins), "nobody uses a pinned page"
        assert self.tree.unpinned == sum(node.pins == 0 for node in nodes)
        held = Counter(node for a in self._allocations for node in self._windowed(a))
        assert all(node.window_pins == held[node] for node in nodes), "a window's pin is wrong"
        idle = sum(len(node.window) for node in nodes if not node.window_pins)
        assert self.tree.unpinned_window_pages == idle
        if self.snapshots is not None:
            self.snapshots.check(s for a in self._allocations for _, s in a.saves)
        slots = [*self._free_slots, *(a.slot for a in self._allocations)]
        assert len(set(slots)) == len(slots), "a slot is owned twice"
