"""Events of the prefix tree over ZeroMQ: who follows them knows the tree at every moment.

The client is written from the example in vLLM's documentation, "KV events subscriber".
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.engine.allocations import allocate_if_room
from tests.engine.random_plans import RandomPlans
from tests.engine.test_adapters import Files, write
from tests.engine.test_process import serve, until, with_engine
from tests.engine.world import PAGE, World
from tests.model.checkpoints import make_checkpoint
from tests.server.serving import PATIENCE
from twolane.common.errors import FieldError
from twolane.engine.adapters.registry import AdapterRegistry
from twolane.engine.config import EngineConfig, KVEventsConfig
from twolane.engine.kv import events
from twolane.engine.kv import publisher as publishing
from twolane.engine.kv.events import KVJournal
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.kv.page_hash import page_hashes, salt_bytes
from twolane.engine.kv.prefix_tree import PrefixTree
from twolane.engine.kv.publisher import PEER_BYTES, KVEventPublisher, ReplayBuffer
from twolane.engine.kv.snapshot import TreeSnapshot
from twolane.engine.messages import ToEngine
from twolane.engine.settings import check_settings
from twolane.frontend.engine_client import EngineClient


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


Page = tuple[int | None, tuple[int, ...], str]
"""What is known of a page: the hash of the one before it, its tokens, its salt."""


@dataclass
class Follower:
    """A router's copy of the tree."""

    pages: dict[int, Page] = field(default_factory=dict)
    last: int = -1
    """Number of the last batch."""
    seen: Counter[str] = field(default_factory=Counter)

    def take(self, number: int, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert number == self.last + 1 or isinstance(batch.events[0], AllBlocksCleared)
        self.last = number
        assert batch.ts > 0
        assert batch.events
        for event in batch.events:
            self.seen[type(event).__name__] += 1
            self._apply(event)

    def _apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.pages.clear()
        elif isinstance(event, BlockRemoved):
            for one in event.block_hashes:
                del self.pages[one]
                assert all(parent != one for parent, *_ in self.pages.values())
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        extra = event.extra_keys or [None] * len(event.block_hashes)
        for i, (one, keys) in enumerate(zip(event.block_hashes, extra, strict=True)):
            assert parent is None or parent in self.pages
            assert one not in self.pages
            tokens = tuple(event.token_ids[i * size : (i + 1) * size])
            self.pages[one] = (parent, tokens, keys[0] if keys else "")
            parent = one


class Client:
    """Subscribes, and has replayed what it missed."""

    def __init__(self, context: "zmq.Context[Any]", events: str, replays: str) -> None:
        self.subscriber = context.socket(zmq.SUB)
        self.subscriber.connect(events)
        self.subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        self.replays = context.socket(zmq.DEALER)
        self.replays.connect(replays)
        self.follower = Follower()
        self.replayed = 0

    def read_until(self, number: int) -> None:
        """Take all batches up to this one, which the engine has published."""
        while self.follower.last < number:
            if not self.subscriber.poll(50):
                self._replay()  # nothing shows a gap after the last message
                continue
            topic, numbered, payload = self.subscriber.recv_multipart()
            assert topic == b"kv-events"
            sequence = int.from_bytes(numbered, "big")
            if sequence > self.follower.last + 1:
                self._replay()
            if sequence == self.follower.last + 1:
                self.follower.take(sequence, payload)

    def _replay(self) -> None:
        self.replays.send_multipart((b"", (self.follower.last + 1).to_bytes(8, "big")))
        while True:
            _, numbered, payload = self.replays.recv_multipart()
            if not payload:
                assert int.from_bytes(numbered, "big", signed=True) == -1
                return
            self.follower.take(int.from_bytes(numbered, "big"), payload)
            self.replayed += 1


def config(folder: Path, **changes: Any) -> KVEventsConfig:
    addresses = {
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replays",
        "topic": "kv-events",
    }
    return KVEventsConfig(**{**addresses, **changes})


def pages_of(tree: PrefixTree) -> dict[int, Page]:
    """What a later request can find, as a follower knows it."""
    found: dict[int, Page] = {}
    stack = list(tree._root.children.values())
    while stack:
        node = stack.pop()
        salt, tokens = node.key[: -8 * PAGE], node.key[-8 * PAGE :]
        ids = tuple(int.from_bytes(tokens[i : i + 8], "little") for i in range(0, 8 * PAGE, 8))
        assert node.parent is not None
        found[node.hash] = (node.parent.hash if node.depth > 1 else None, ids, salt.hex())
        stack.extend(node.children.values())
    return found


class Published:
    """Books, their publisher, and a client of it."""

    def __init__(self, books: KVCacheManager, settings: KVEventsConfig) -> None:
        self.books = books
        self.journal = KVJournal(PAGE)
        books.tree.watchers.append(self.journal)
        self.publisher = KVEventPublisher(settings, self.journal)
        self.context: zmq.Context[Any] = zmq.Context()
        self.settings = settings

    def client(self) -> Client:
        assert self.settings.endpoint is not None
        assert self.settings.replay_endpoint is not None
        return Client(self.context, self.settings.endpoint, self.settings.replay_endpoint)

    def check(self, client: Client) -> None:
        """Publish, and compare the client's pages with the tree."""
        self.publisher.publish()
        client.read_until(self.publisher.published - 1)
        assert client.follower.pages == pages_of(self.books.tree)

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.publisher.close()


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    books = KVCacheManager(16, PAGE, 8, prefix_cache=True)
    made = Published(books, config(tmp_path))
    yield made
    made.close()


def share(books: KVCacheManager, tokens: Sequence[int], salt: str | None = None) -> Any:
    allocation = allocate_if_room(books, tokens, salt=salt_bytes(salt))
    assert allocation is not None
    books.share(allocation, tokens, len(tokens))
    return allocation


class FollowedWorld(World):
    """A random schedule whose tree is followed from outside, turn by turn."""

    def follow(self, folder: Path) -> None:
        self.published = Published(self.engine.state.kv, config(folder))
        self.engine._kv_events = self.published.publisher
        self.client = self.published.client()

    def turn(self, messages: Sequence[ToEngine]) -> bool:
        changed = super().turn(messages)
        self.engine.publish()
        self.published.check(self.client)
        return changed


@pytest.mark.parametrize("seed", range(3))
def test_who_follows_the_events_knows_the_tree_after_every_turn(tmp_path: Path, seed: int) -> None:
    world = FollowedWorld(RandomPlans(seed), random.Random(seed))
    world.follow(tmp_path)
    world.run()
    seen = world.client.follower.seen
    assert seen["BlockStored"] > 20
    assert seen["BlockRemoved"] > 5
    world.published.close()


def test_who_comes_late_or_misses_messages_has_them_replayed(published: Published) -> None:
    for first in range(0, 60, 20):
        published.books.give_up(share(published.books, range(first, first + 9)))
        published.publisher.publish()
    client = published.client()
    published.check(client)
    assert client.replayed
    client.subscriber.setsockopt_string(zmq.UNSUBSCRIBE, "kv-events")  # deaf for a while
    before = client.replayed
    for first in range(100, 160, 20):
        published.books.give_up(share(published.books, range(first, first + 9)))
        published.check(client)
    assert client.replayed == before + 3


def test_a_reset_of_the_cache_clears_what_is_known(published: Published) -> None:
    client, books, tokens = published.client(), published.books, list(range(14))
    held = share(books, tokens)
    published.check(client)
    assert len(client.follower.pages) == 3
    books.forget_prefixes()
    published.check(client)
    assert not client.follower.pages
    again = share(books, tokens)  # beside the pages that are forgotten and pinned
    published.check(client)
    books.give_up(held)
    while books.reclaimable_pages:
        assert books.grow(again, len(again.pages) * PAGE + PAGE)
        published.check(client)
    assert list(client.follower.pages) == list(page_hashes(tokens, PAGE))
    assert client.follower.seen["AllBlocksCleared"] == 2  # of the start and of the reset


def test_a_salt_is_told_by_its_digest(published: Published) -> None:
    client, tokens = published.client(), list(range(9))
    share(published.books, tokens, "secret")
    share(published.books, tokens)
    published.check(client)
    salt = salt_bytes("secret")
    assert set(client.follower.pages) == {
        *page_hashes(tokens, PAGE, salt),
        *page_hashes(tokens, PAGE),
    }
    assert {page[2] for page in client.follower.pages.values()} == {"", salt.hex()}
    assert b"secret" not in b"".join(batch for _, batch in published.publisher._buffer.since(0))


def test_pages_of_an_adapter_have_its_name_and_those_of_the_base_have_none(
    published: Published, tmp_path: Path
) -> None:
    registry = AdapterRegistry(Files(), 2)
    for name in ("other", "mine"):
        registry.load_at_start(name, write(tmp_path / name, name.encode()))
    published.journal.adapter = registry.name_of
    mine, tokens = registry.find("mine"), list(range(13))
    assert mine is not None
    for salt in (mine.salt(None), mine.salt("tenant"), salt_bytes("tenant"), b""):
        for end in (5, 13):  # the later pages come in an event of their own
            allocation = allocate_if_room(published.books, tokens[:end], salt=salt)
            assert allocation is not None
            published.books.share(allocation, tokens, end)
            published.books.give_up(allocation)
            published.publisher.publish()
    assert published.publisher._buffer is not None
    stored = [
        event
        for _, batch in published.publisher._buffer.since(0)
        for event in msgspec.msgpack.decode(batch, type=KVEventBatch).events
        if isinstance(event, BlockStored)
    ]
    named = {one for event in stored if event.lora_name == "mine" for one in event.block_hashes}
    salts = mine.salt(None), mine.salt("tenant")
    assert named == {one for salt in salts for one in page_hashes(tokens, PAGE, salt)}


def test_clients_of_earlier_formats_read_the_fields_that_they_know(published: Published) -> None:
    share(published.books, range(9))
    published.publisher.publish()
    [_, (_, batch)] = published.publisher._buffer.since(0)
    first, second = page_hashes(range(9), PAGE)
    assert msgspec.msgpack.decode(batch)[1:] == [
        [["BlockStored", [first, second], None, [*range(8)], PAGE, None, "GPU", *[None] * 5]],
        0,
    ]


def test_an_engine_process_publishes_what_its_cache_has(tmp_path: Path) -> None:
    settings, model = config(tmp_path), make_checkpoint("qwen2", tmp_path / "model")
    context: zmq.Context[Any] = zmq.Context()
    assert settings.endpoint is not None
    assert settings.replay_endpoint is not None
    client = Client(context, settings.endpoint, settings.replay_endpoint)

    async def use(engine: EngineClient) -> None:
        assert await serve(engine, "followed", 30) == 30

        def knows_all() -> bool:
            client._replay()
            cached = engine.stats.kv_pages_cached
            return cached > 30 and len(client.follower.pages) == cached

        await until(knows_all)

    with_engine(use, str(model), kv_events=settings)
    context.destroy(linger=0)


def test_who_binds_is_connected_to(tmp_path: Path) -> None:
    """As a router that many engines publish to."""
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.SUB)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    router.setsockopt_string(zmq.SUBSCRIBE, "")
    books = KVCacheManager(16, PAGE, 8, prefix_cache=True)
    settings = config(tmp_path, endpoint=f"tcp://127.0.0.1:{port}", topic="kv@pod@model")
    made = Published(books, settings)
    tokens = 0
    while not router.poll(50):  # until they are connected, messages go nowhere
        tokens += 10
        books.give_up(share(books, range(tokens, tokens + 9)))
        made.publisher.publish()
    assert router.recv_multipart()[0] == b"kv@pod@model"
    context.destroy(linger=0)
    made.close()


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
def test_a_subscriber_that_sends_too_much_is_disconnected(published: Published, kind: int) -> None:
    """It would be kept in memory, whatever its size."""
    settings = published.settings
    endpoint = settings.endpoint if kind == zmq.SUB else settings.replay_endpoint
    assert endpoint is not None
    with published.context.socket(kind) as client:
        client.setsockopt(zmq.RECONNECT_IVL, -1)
        events = client.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        client.connect(endpoint)
        assert recv_monitor_message(events)["event"] == zmq.EVENT_CONNECTED
        too_much = b"x" * (PEER_BYTES + 1)
        client.subscribe(too_much) if kind == zmq.SUB else client.send(too_much)
        assert events.poll(PATIENCE * 1000), "it is still connected"
        assert recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED
        client.disable_monitor()


def test_nothing_grows_while_nobody_reads(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "BUFFER_BYTES", 20_000)
    deaf = published.client()  # subscribes and never reads
    for first in range(0, 200_000, 100):
        published.books.give_up(share(published.books, range(first, first + 41)))
        published.publisher.publish()
    buffer = published.publisher._buffer
    assert buffer._bytes <= 20_000
    snapshot, *kept = buffer.since(0)
    assert sum(len(batch) for _, batch in kept) == buffer._bytes
    assert len(snapshot[1]) < 2_000  # of 16 pages
    assert not buffer._dropped
    assert len(published.journal._found) <= 16
    assert deaf.follower.last == -1


def test_a_replay_has_the_latest_batches_behind_a_snapshot_of_the_earlier_ones() -> None:
    buffer, encode = ReplayBuffer(most=3), msgspec.msgpack.encode
    for number in range(5):
        stored = events.BlockStored([number + 1], number or None, [number] * PAGE, PAGE)
        buffer.add(number, encode(events.KVEventBatch(float(number), [stored])))
    assert [number for number, _ in buffer.since(0)] == [1, 2, 3, 4]
    told = msgspec.msgpack.decode(buffer.since(0)[0][1], type=events.KVEventBatch)
    both = events.BlockStored([1, 2], None, [0] * PAGE + [1] * PAGE, PAGE)
    assert told == events.KVEventBatch(1.0, [events.AllBlocksCleared(), both])
    assert [number for number, _ in buffer.since(4)] == [4]


def test_who_comes_after_batches_gave_way_learns_the_whole_tree(tmp_path: Path) -> None:
    """In a tree that branches, has salts and loses pages."""
    settings = config(tmp_path, buffer_steps=2)
    published = Published(KVCacheManager(24, PAGE, 8, prefix_cache=True), settings)
    draw = random.Random(0)
    for turn in range(60):
        tokens = [*range(draw.randrange(1, 9)), *draw.choices(range(50, 53), k=12)]
        salt = draw.choice([None, "secret"])
        published.books.give_up(share(published.books, tokens, salt))
        published.publisher.publish()
        if turn % 10 == 9:
            late = published.client()
            published.check(late)
            assert late.follower.pages
    published.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"endpoint": "nowhere"}, "kv_events_endpoint"),
        ({"endpoint": "ipc:///nowhere/at/all"}, "kv_events_endpoint"),
        ({"replay_endpoint": "tcp://nowhere"}, "kv_events_replay_endpoint"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(
    tmp_path: Path, changes: dict[str, str], named: str
) -> None:
    with pytest.raises(FieldError) as refused:
        KVEventPublisher(config(tmp_path, **changes), KVJournal(PAGE))
    assert refused.value.field == named


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_events": KVEventsConfig(replay_endpoint="tcp://*:1")}, "kv_events_replay_endpoint"),
        (
            {"kv_events": KVEventsConfig(endpoint="tcp://*:1"), "prefix_cache": False},
            "kv_events_endpoint",
        ),
        *(
            ({"kv_events": KVEventsConfig(endpoint=f"tcp://*:{port}")}, "kv_events_endpoint")
            for port in ("80808", "-1", "5x", "")
        ),
    ],
)
def test_events_that_cannot_be_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(FieldError) as refused:
        check_settings(EngineConfig(model="m", **changes))
    assert refused.value.field == named


def test_a_port_may_be_any() -> None:
    for port in ("0", "65535", "*"):
        check_settings(
            EngineConfig(model="m", kv_events=KVEventsConfig(endpoint=f"tcp://*:{port}"))
        )


def test_pages_of_windows_are_a_group_that_says_what_is_found() -> None:
    """A subscriber finds of a prompt what the engine finds, while pages come and go."""
    window, tables, rng = 6, 2, random.Random(3)
    journal, known = KVJournal(PAGE, window=window), {0: set[int](), 1: set[int]()}
    books = KVCacheManager(60, PAGE, 4, prefix_cache=True, window=window, window_tables=tables)
    books.tree.watchers.append(journal)
    books.tree.window_watchers.append(journal)
    prompts, partial = [[n // 3, *range(5), *[n] * rng.randrange(30)] for n in range(9)], 0
    for _ in range(200):
        tokens = [*rng.choice(prompts), 99]
        hashes = [*page_hashes(tokens[:-1], PAGE)]
        held = 0
        for end in range(1, len(hashes) + 1):
            first = max(0, end * PAGE - window + 1) // PAGE
            if {*hashes[:end]} <= known[0] and {*hashes[first:end]} <= known[1]:
                held = end * PAGE
        assert books.lookup(tokens).reused == held
        partial += 0 < held < len(hashes) * PAGE
        allocation = allocate_if_room(books, tokens)
        assert allocation is not None
        books.share(allocation, tokens, len(tokens) - 1)
        books.slide(allocation, len(tokens) - 1)
        books.give_up(allocation)
        for event in journal.take():
            assert not isinstance(event, events.AllBlocksCleared)
            assert event.group_idx is not None
            if isinstance(event, events.BlockStored):
                kind = ("full_attention", "sliding_window")[event.group_idx]
                assert event.kv_cache_spec_kind == kind
                assert event.kv_cache_spec_sliding_window == (window if event.group_idx else None)
                known[event.group_idx] |= {*event.block_hashes}
            else:
                known[event.group_idx] -= {*event.block_hashes}
    assert partial


def test_a_snapshot_of_the_tree_tells_pages_from_states() -> None:
    """A late subscriber learns both groups, and what is gone of one is not gone of the other."""
    journal, tree = KVJournal(PAGE, states=True), TreeSnapshot()
    books = KVCacheManager(8, PAGE, 2, prefix_cache=True, snapshots=2)
    assert books.snapshots is not None
    books.tree.watchers.append(journal)
    books.snapshots.watchers.append(journal)
    tokens = [*range(14)]
    held = allocate_if_room(books, tokens)
    assert held is not None
    books.plan_saves(held, 14, 0, 14)
    books.share(held, tokens, 14)
    books.saved(held, 14)
    books.give_up(held)
    tree.apply(events.KVEventBatch(0.0, journal.take()))

    def known() -> list[tuple[int | None, int]]:
        stored = [one for one in tree.batch().events if isinstance(one, events.BlockStored)]
        return [(one.group_idx, len(one.block_hashes)) for one in stored]

    assert known() == [(0, 3), (1, 1)]
    assert books.snapshots.reserve() is not None
    assert books.snapshots.reserve() is not None, "it takes the one of the node"
    tree.apply(events.KVEventBatch(1.0, journal.take()))
    assert known() == [(0, 3)]
