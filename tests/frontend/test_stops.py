import pytest
from hypothesis import given
from hypothesis import strategies as st

from twolane.frontend.text.stops import StopStrings


def run(stops, pieces, include=False):
    """Return the pieces shown, and the stop string found."""
    finder = StopStrings(stops, include=include)
    shown = []
    for piece in pieces:
        found = finder.feed(piece)
        shown.append(found.text)
        if found.stop is not None:
            return shown, found.stop
    return [*shown, finder.flush()], None


def reference(stops, text, include):
    """Return what is shown of the whole text: the stop that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    include=st.booleans(),
)
def test_any_cut_gives_what_the_whole_text_gives(stops, pieces, include):
    shown, stop = run(stops, pieces, include)
    assert ("".join(shown), stop) == reference(stops, "".join(pieces), include)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_nothing_is_shown_that_may_begin_a_stop_string_and_all_else_is(stops, pieces):
    finder = StopStrings(stops)
    taken = shown = ""
    for piece in pieces:
        found = finder.feed(piece)
        taken += piece
        shown += found.text
        if found.stop is not None:
            return
        held = taken[len(shown) :]
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((len(b) for b in beginnings if taken.endswith(b)), default=0)
        assert len(held) == longest


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stop"),
    [
        (["END"], ["some E", "N", "D more"], ["some ", "", ""], "END"),
        (["END"], ["some E", "N", "O"], ["some ", "", "ENO", ""], None),
        (["\n\n"], ["a\n", "\nb"], ["a", ""], "\n\n"),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["b", "abc"], ["a", "b"], ["", "a"], "b"),
        ([], ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_examples(stops, pieces, shown, stop):
    assert run(stops, pieces) == (shown, stop)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    pieces=st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=12),
    include=st.booleans(),
)
def test_what_is_hidden_counts_and_is_not_shown(stops, pieces, include):
    finder, shown, stop = StopStrings(stops, include=include), [], None
    for piece, hidden in pieces:
        found = finder.feed(piece, hidden=hidden)
        shown.append(found.text)
        if (stop := found.stop) is not None:
            break
    else:
        shown.append(finder.flush())
    characters = [(char, "" if hidden else char) for piece, hidden in pieces for char in piece]
    kept, expected = reference(stops, "".join(char for char, _ in characters), include=False)
    ending = stop if include and stop else ""
    assert stop == expected
    assert "".join(shown) == "".join(each for _, each in characters[: len(kept)]) + ending
