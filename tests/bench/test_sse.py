import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from twolane.bench.sse import Event, SSEParser

line = st.sampled_from(
    [
        "data: {}", "data:x", "data: a:b", "data", "data: é€", ": comment", ":", "event: error",
        "event:", "id: 3", "retry: 5", "nonsense", "", "", "", "data: [DONE]",
    ]
)  # fmt: skip
streams = st.lists(st.tuples(line, st.sampled_from(["\n", "\r\n", "\r"]))).map(
    lambda pairs: "".join(text + end for text, end in pairs).encode()
)


def parse(pieces) -> list[Event]:
    parser = SSEParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.close()


@given(streams, st.lists(st.integers(0, 400)))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 9, 10, 11])
def test_any_cut_gives_the_same_events(stream, cuts):
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in itertools.pairwise(places)]
    assert parse(pieces) == parse([stream])
    assert parse([bytes([byte]) for byte in stream]) == parse([stream])


@given(
    st.lists(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), min_size=1))
)
def test_written_events_are_read_back(messages):
    stream = "".join("".join(f"data: {one}\n" for one in lines) + "\n" for lines in messages)
    want = [Event("message", "\n".join(lines)) for lines in messages]
    assert parse([stream.encode()]) == want


def test_fields_comments_and_types():
    stream = b"\xef\xbb\xbf: hi\nevent: error\ndata: {\ndata:  }\n\nevent: lost\n\ndata: x\n\n"
    assert parse([stream]) == [Event("error", "{\n }"), Event("message", "x")]


def test_an_event_is_out_as_soon_as_its_blank_line_is():
    for end in (b"\n", b"\r", b"\r\n"):
        parser = SSEParser()
        assert parser.feed(b"data: a" + end) == []
        assert parser.feed(end) == [Event("message", "a")]
        assert parser.feed(b"data: b" + end + end) == [Event("message", "b")]


def test_the_last_event_needs_no_blank_line():
    assert parse([b"data: [DONE]"]) == [Event("message", "[DONE]")]
    assert parse([b"data: [DONE]\n"]) == [Event("message", "[DONE]")]
    assert parse([b": bye"]) == []


class Slow(SSEParser):
    """Without the shortcut for one whole event."""

    feed = SSEParser._feed_lines


whole = st.sampled_from(
    [
        b"data: {}\n\n", b"data: \n\n", b"data: \xff\xc3\n\n", b"data: a\ndata: b\n\n",
        b"data: a\r\n\n", b"data: a\n", b"\n", b"\r", b"data: a\r", b"event: error\n", b"",
        b"\xef\xbb\xbf", b": x\n\n", b"data: \xc3", b"data: a\n\ndata: b\n\n", b"data:a\n\n",
        b"data: a\n\n\n", b"id: 1\n",
    ]
)  # fmt: skip


@given(st.lists(whole | streams))
@example([b"data: a\r", b"data: b\n\n", b"\n"])
@example([b"\r", b"data: b\n\n", b"\ndata: c\n\n"])
def test_the_shortcut_for_one_whole_event_changes_nothing(pieces):
    fast, slow = SSEParser(), Slow()
    for piece in pieces:
        assert fast.feed(piece) == slow.feed(piece)
    assert fast.close() == slow.close()
