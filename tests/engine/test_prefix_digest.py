"""What a server publishes of its prefix tree."""

from tests.engine.allocations import allocate_if_room
from twolane.engine.kv.landmarks import LandmarkWatcher
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.kv.page_hash import page_hashes
from twolane.engine.kv.prefix_digest import (
    MAX_LANDMARKS,
    STRIDE_TOKENS,
    Landmarks,
    PrefixBook,
    is_landmark,
)

PAGE = 16


def test_landmarks_are_close_at_the_start_and_a_stride_apart_later() -> None:
    found = [pages for pages in range(1, 130) if is_landmark(pages, PAGE)]
    assert found == [1, 2, 4, 8, 16, 32, 64, 96, 128]
    assert STRIDE_TOKENS // PAGE == 32
    assert all(is_landmark(pages, 1024) for pages in range(1, 10))


def test_the_landmarks_of_a_prompt_are_hashes_of_its_pages() -> None:
    prompt = range(1000)
    hashes = list(page_hashes(prompt, PAGE))
    found = Landmarks.of(prompt, PAGE)
    assert list(found.tokens) == [16, 32, 64, 128, 256, 512]
    assert list(found.hashes) == [hashes[tokens // PAGE - 1] for tokens in found.tokens]
    assert Landmarks.of(range(PAGE), PAGE) == Landmarks()  # its last token is computed anyway


def test_the_digest_follows_the_tree() -> None:
    kv, watcher, book = KVCacheManager(64, PAGE, 4, prefix_cache=True), LandmarkWatcher(PAGE), None
    kv.tree.watchers.append(watcher)
    book = PrefixBook(PAGE)
    prompts = [list(range(500)), [*range(100), *range(900, 1300)]]
    held = [allocate_if_room(kv, prompt) for prompt in prompts]
    for allocation, prompt in zip(held, prompts, strict=True):
        assert allocation is not None
        kv.share(allocation, prompt, len(prompt))
        kv.give_up(allocation)
    book.change(watcher.take_changes())
    both = {h for prompt in prompts for h in Landmarks.of([*prompt, 0], PAGE).hashes}
    assert book.digest().as_set() == both
    first = book.digest()
    assert book.digest() is first
    assert (
        allocate_if_room(kv, list(range(5000, 5900))) is not None
    )  # the oldest leaves are evicted
    book.change(watcher.take_changes())
    left = book.digest()
    assert left.version != first.version
    assert left.as_set() < both
    kv.forget_prefixes()
    book.change(watcher.take_changes())
    assert book.digest().as_set() == frozenset()


def test_a_digest_is_bounded_and_keeps_the_shortest_prefixes() -> None:
    book = PrefixBook(PAGE)
    book.change({hashed: 1 + hashed % 7 for hashed in range(1, 3 * MAX_LANDMARKS)})
    kept = book.digest().as_set()
    assert len(kept) == MAX_LANDMARKS
    assert max(1 + hashed % 7 for hashed in kept) <= 3
