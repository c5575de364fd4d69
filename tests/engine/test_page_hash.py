"""Hashes of KV pages."""

from array import array

from twolane.engine.kv.page_hash import page_hashes, salt_bytes

PAGE = 4


def hashes(tokens: list[int], salt: bytes = b"") -> list[int]:
    return list(page_hashes(tokens, PAGE, salt))


def test_a_hash_covers_every_token_before_its_end() -> None:
    first, second = hashes([1, 2, 3, 4, 5, 6, 7, 8])
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[0] == first
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[1] != second
    assert hashes([0, 2, 3, 4, 5, 6, 7, 8])[1] != second


def test_a_page_that_is_not_full_has_no_hash() -> None:
    assert hashes([1, 2, 3]) == []
    assert hashes([1, 2, 3, 4, 5]) == hashes([1, 2, 3, 4])


def test_another_salt_changes_every_hash() -> None:
    tokens = list(range(12))
    plain, salted = hashes(tokens), hashes(tokens, salt_bytes("tenant"))
    assert not set(plain) & set(salted)
    assert salt_bytes(None) == b""


def test_hashes_are_the_same_in_every_release_and_for_every_kind_of_sequence() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    assert hashes(tokens) == list(page_hashes(array("q", tokens), PAGE))
    assert hashes(tokens) == [2821693476514209883, 4335464902204770104]
