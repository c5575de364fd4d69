"""What a chat answer shows, where no server is needed to see it."""

import json
import re
from itertools import chain

import pytest

from twolane.engine.messages import TokenLogprobs
from twolane.frontend.answer_formats import FormatOptions, ModelFormats
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.pieces import CallArguments, CallStart, Content
from twolane.frontend.parsers.reasoning import ReasoningParser, ThinkingMarks
from twolane.frontend.structured.tools import Tool
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.output_reader import Delta
from twolane.server.http.events import event
from twolane.server.openai.answers import Answer, AnswerOptions, Echo, add_arguments
from twolane.server.openai.logprobs import LogprobWriter, TokenPlace


def calling():
    template = "{{ tools }}<tool_call></think>"
    asked = FormatOptions(tools=[Tool("f", None)])
    form = ModelFormats(template, shows_tools=True).of(asked, "a")
    return form.reader()


def thinking():
    return AnswerReader(ReasoningParser(ThinkingMarks(opened=True)))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_has_the_name_that_the_server_is_told(name):
    options = AnswerOptions(parsed=thinking, reasoning_field=name)
    writer = LogprobWriter(TextCodec(None), 0, as_ids=False)
    delta = Delta(0, "Well.</think>So", [7, 8], [0, 5], finish="stop")
    answer = Answer("chat", "m", [[1]], writer, options)
    answer.add(delta)
    message = answer.whole()["choices"][0]["message"]
    assert (message.pop(name), message["content"]) == ("Well.", "So")
    assert not message.keys() & {"reasoning", "reasoning_content"}
    chunks = Answer("chat", "m", [[1]], writer, options).chunks(delta)
    said = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
    assert said == [{name: "Well."}, {"content": "So"}, {"content": ""}]


def test_of_alternatives_with_one_name_the_likeliest_is_shown():
    """A special token and text may be spelt alike."""

    class Codec(TextCodec):
        has_tokenizer = True

        def token_bytes(self, token):
            return b"a" if token < 9 else b"b"

    entry = TokenLogprobs(8, -3.0, 3, ((7, -0.5), (9, -1.0)))
    shown = LogprobWriter(Codec(None), 2, as_ids=False).completion([TokenPlace(8, 0, entry)])
    assert json.loads(bytes(shown["top_logprobs"])) == [{"a": -0.5, "b": -1.0}]
    assert json.loads(bytes(shown["token_logprobs"])) == [-3.0]


def texts(kind="completion", prompts=((1, 2), (3,)), **options):
    """An answer of which texts and tokens are shown, by a model without a tokenizer."""
    writer = LogprobWriter(TextCodec(None), 0, as_ids=True)
    return Answer(kind, "m", [list(each) for each in prompts], writer, AnswerOptions(**options))


def streamed(answer, index, news):
    """The choices of the chunks of one answer, with their chunks' usage."""
    chunks = [
        chunk
        for place, (text, finish) in enumerate(news)
        for chunk in answer.chunks(Delta(index, text, [place], [0], finish))
    ]
    return [{**chunk["choices"][0], "usage": chunk.get("usage", "none")} for chunk in chunks]


STREAMED = [
    *("Well", "", ".</th", "ink>\n\n", "a", "\u2028\x85", '"b"', "<tool_", "call>", "\n{"),
    *('"name": "f", "argu', 'ments": {"x": 1}}', "\n</tool_call>", "so", "\U0001f600", "end"),
]


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include_usage": True},
        {"continuous_usage": True},
        {"return_token_ids": True},
        {"logprobs": True},
        {"parsed": thinking, "include_usage": True, "reasoning_field": "reasoning"},
        {"parsed": calling, "n": 2},
        {"echo": Echo(["p"], True)},
        {"echo": Echo(["p"], False)},
    ],
)
def test_events_are_byte_for_byte_their_chunks(kind, options):
    """Most events of a stream are not encoded anew: they differ in one text."""
    direct, chunked = (texts(kind, ((1,),), **options) for _ in range(2))
    chunked._head = direct._head
    n = options.get("n", 1)
    for place, text in enumerate(STREAMED):
        for index in range(n):
            entries = [TokenLogprobs(place, -1.0, 1, [(place, -1.0)])]
            delta = Delta(
                *(index, text, [place], [0], "stop" if place + 1 == len(STREAMED) else None),
                logprobs=entries if "logprobs" in options else None,
            )
            made = b"".join(map(event, chunked.chunks(delta)))
            assert masked(direct.events(delta)) == masked(made)


def masked(events):
    """Events without the ids of tool calls, which are random."""
    return re.sub(rb"call_\w{24}", b"call", events)


NEWS = [("a", None), ("b", "stop")]


def test_each_stream_begins_with_the_echo_of_its_prompt():
    answer = texts(n=2, echo=Echo(["one ", "two "], only=False), return_token_ids=True)
    for index, echo, prompt in ((1, "one ", [1, 2]), (2, "two ", [3])):
        first, second = streamed(answer, index, NEWS)
        assert (first["text"], second["text"]) == (echo + "a", "b")
        assert (first["index"], first["token_ids"], second["token_ids"]) == (index, [0], [1])
        assert first["prompt_token_ids"] == prompt
        assert "prompt_token_ids" not in second
        assert (first["finish_reason"], second["finish_reason"]) == (None, "stop")
    whole = answer.whole()["choices"]
    assert [choice["text"] for choice in whole] == ["one ", "one ab", "two ab", "two "]
    assert [choice["prompt_token_ids"] for choice in whole] == [[1, 2], [1, 2], [3], [3]]


def test_an_echo_alone_has_nothing_of_its_answer():
    answer = texts(prompts=[(1, 2)], echo=Echo(["one"], only=True), return_token_ids=True)
    first, second = streamed(answer, 0, NEWS)
    for choice in (first, second, answer.whole()["choices"][0]):
        assert choice["token_ids"] == []
        assert choice["stop_reason"] is None
    assert (first["text"], second["text"]) == ("one", "")
    assert (first["finish_reason"], second["finish_reason"]) == (None, "length")
    assert answer.whole()["choices"][0]["text"] == "one"
    assert answer.usage()["completion_tokens"] == 0


def test_usage_counts_each_prompt_once_and_all_answers():
    answer = texts(n=2, continuous_usage=True)
    for index, cached in enumerate((1, 0, 1, 5)):
        answer.add(Delta(index, "x", [7] * (index + 1), [0] * (index + 1), "stop", cached=cached))
    usage = {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    assert answer.usage() == {**usage, "prompt_tokens_details": {"cached_tokens": 2}}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_chunks_have_usage_as_it_was_asked_for(kind):
    """At the end alone, in every chunk, or nowhere."""
    for options, in_chunks in (
        ({}, ["none"]),
        ({"include_usage": True}, [None]),
        ({"continuous_usage": True}, [1, 2]),
        ({"continuous_usage": True, "include_usage": True}, [1, 2]),
    ):
        answer = texts(kind, [(1,)], **options)
        usages = [choice["usage"] for choice in streamed(answer, 0, NEWS)]
        counts = [usage and usage["completion_tokens"] for usage in usages if usage != "none"]
        assert sorted(set(counts or ["none"]), key=str) == in_chunks
        *last, done = answer.closing().split(b"\n\n")[:-1]
        assert done == b"data: [DONE]"
        assert len(last) == ("include_usage" in options)
        for each in last:
            chunk = json.loads(each.removeprefix(b"data: "))
            assert (chunk["choices"], chunk["usage"]) == ([], answer.usage())


def test_a_chat_stream_has_no_empty_chunks_but_what_was_asked_for():
    """A parser holds a mark back that may begin the thinking's end."""
    for asked, shown in (({}, 4), ({"return_token_ids": True}, 5)):
        answer = texts("chat", [(1,)], parsed=thinking, **asked)
        opening, *rest = streamed(answer, 0, [("a", None), ("</th", None), ("ink>b", "stop")])
        assert opening["delta"] == {"role": "assistant", "content": ""}
        assert len([opening, *rest]) == shown
        said = [choice["delta"] for choice in rest]
        assert said[0] == {"reasoning_content": "a"}
        assert said[-2:] == [{"content": "b"}, {"content": ""}]
        assert said[1:-2] == [{"content": ""}] * (shown - 4)
        assert [choice["finish_reason"] for choice in rest] == [None] * (shown - 2) + ["stop"]
        assert answer.usage()["completion_tokens_details"] == {"reasoning_tokens": 2}
        ids = [choice.get("token_ids") for choice in rest]
        assert ids == ([[0], [1], [2], []] if asked else [None] * 3)
        first = texts("chat", [(1,)], **asked).chunks(Delta(0, "a", [7], [0]))[0]
        assert first.get("prompt_token_ids") == ([1] if asked else None)


def test_arguments_of_one_call_are_one_entry_of_a_delta():
    said = [{"content": "So"}]
    for call, text in ((0, "a"), (0, "b"), (1, "c"), (1, "d"), (2, "e"), (2, "f")):
        add_arguments(said, call, text)
    calls = [call for each in said[1:] for call in each["tool_calls"]]
    assert [(each["index"], each["function"]["arguments"]) for each in calls] == [
        *((0, "ab"), (1, "cd"), (2, "ef"))
    ]
    assert len(said) == 4


def test_a_chunk_has_one_thing_and_the_last_one_nothing_but_the_end():
    """Clients drop the text beside thinking or the reason to finish, and all calls but the first,
    where one delivery of the engine's has them all."""

    class TwoCalls(Calls):
        def feed(self, text):
            text, *words = text.split()
            return [Content(text), *chain(*(Calls.feed(self, word) for word in words))]

    def parsed():
        return AnswerReader(ReasoningParser(ThinkingMarks(opened=True)), TwoCalls("{}"))

    class Codec(TextCodec):
        def token_bytes(self, token):
            return b"t"

    options = AnswerOptions(parsed=parsed, logprobs=True, return_token_ids=True)
    answer = Answer("chat", "m", [[1]], LogprobWriter(Codec(None), 0, as_ids=True), options)
    entries = [TokenLogprobs(7, -0.5, 1, ())] * 2
    news = Delta(0, "Hm.</think>So F G", [7, 8], [0, 1], "stop", logprobs=entries)
    _, *chunks = [chunk["choices"][0] for chunk in answer.chunks(news)]
    calls = answer.whole()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["f", "g"]
    assert [choice["delta"] for choice in chunks] == [
        {"reasoning_content": "Hm."},
        {"content": "So"},
        *({"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)),
        {"content": ""},
    ]
    assert [choice["finish_reason"] for choice in chunks] == [*[None] * 4, "tool_calls"]
    assert [choice["token_ids"] for choice in chunks] == [[7, 8], [], [], [], []]
    first, *others = [choice["logprobs"] for choice in chunks]
    assert len(json.loads(bytes(first["content"]))) == 2
    assert others == [None] * 4


@pytest.mark.parametrize(
    ("kind", "name", "chunk", "prefix"),
    [
        ("chat", "chat.completion", "chat.completion.chunk", "chatcmpl-"),
        ("completion", "text_completion", "text_completion", "cmpl-"),
    ],
)
def test_answers_say_what_they_are(kind, name, chunk, prefix):
    answer = texts(kind, [(1, 2)])
    answer.add(Delta(0, "x", [7], [0], "stop", 9))
    whole, last = answer.whole(), answer.usage_chunk()
    assert (whole["object"], last["object"]) == (name, chunk)
    assert whole["id"] == last["id"] == answer.id
    assert whole["id"].startswith(prefix)
    assert whole["usage"] == answer.usage()
    assert not whole.keys() & {"prompt_logprobs", "prompt_token_ids"}
    [choice] = whole["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", 9, None)
    assert not choice.keys() & {"prompt_logprobs", "token_ids", "prompt_token_ids"}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_all_answers_to_a_prompt_show_its_logprobs(kind):
    class Codec(TextCodec):
        def token_bytes(self, token):
            return b"t"

    options = AnswerOptions(n=2, prompt_logprobs=True, return_token_ids=True)
    prompts = [[1, 2], [3, 4]][: 1 if kind == "chat" else 2]
    answer = Answer(kind, "m", prompts, LogprobWriter(Codec(None), 0, as_ids=True), options)
    for index in range(2 * len(prompts)):
        prompt = prompts[index // 2]
        scored = [TokenLogprobs(prompt[1], -float(prompt[1]), 1, ())] if index % 2 == 0 else None
        answer.add(Delta(index, "x", [7], [0], "stop", prompt_logprobs=scored))
    whole = answer.whole()
    shown = [whole] if kind == "chat" else whole["choices"]
    for index, each in enumerate(shown):
        prompt = prompts[index // 2]
        first, second = json.loads(bytes(each["prompt_logprobs"]))
        assert first is None
        assert second[str(prompt[1])]["logprob"] == -prompt[1]
        assert each["prompt_token_ids"] == prompt
    assert all(choice["token_ids"] == [7] for choice in whole["choices"])


class Calls:
    """A parser to which every word in capitals is a call with these arguments."""

    def __init__(self, arguments):
        self.arguments, self.count = arguments, 0

    def feed(self, text):
        if not text.isupper():
            return [Content(text)]
        self.count += 1
        place = self.count - 1
        return [CallStart(place, text.lower()), CallArguments(place, self.arguments)]

    def finish(self):
        return []


@pytest.mark.parametrize(
    ("arguments", "finish", "forced", "shown"),
    [
        ("{}", "stop", False, "tool_calls"),
        ("{}", "stop", True, "stop"),
        ("{}", "length", False, "length"),
        ('{"a"', "stop", False, "stop"),
    ],
)
def test_whole_calls_are_a_reason_to_finish_unless_they_were_named(
    arguments, finish, forced, shown
):
    def parsed():
        return AnswerReader(tools=Calls(arguments))

    for news, content in ((["F", "G"], None), (["Well", "F"], "Well"), (["F", "then"], "then")):
        answer = texts("chat", [(1,)], parsed=parsed, forced_call=forced)
        chunks = streamed(answer, 0, [(news[0], None), (news[1], finish)])
        assert chunks[-1]["finish_reason"] == shown
        told = [call for each in chunks for call in each["delta"].get("tool_calls", ())]
        [choice] = answer.whole()["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == (shown, content)
        assert told == [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        said = [call["function"] for call in message["tool_calls"]]
        names = [word.lower() for word in news if word.isupper()]
        assert said == [{"name": name, "arguments": arguments} for name in names]
        assert "reasoning_content" not in message


@pytest.mark.parametrize("several", [True, False])
def test_texts_before_and_behind_a_call_are_lines_of_their_own(several):
    """The white space around calls is dropped, and so would be what parts them."""

    def parsed():
        return AnswerReader(tools=Calls("{}"), several=several)

    answer = texts("chat", [(1,)], parsed=parsed)
    news = [("F", None), ("one", None), (" two", None), ("G", None), ("three", "stop")]
    chunks = streamed(answer, 0, news)
    [choice] = answer.whole()["choices"]
    told = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert told == choice["message"]["content"] == "one two\nthree"
    assert len(choice["message"]["tool_calls"]) == 1 + several


def test_who_may_call_and_does_not_has_said_text():
    answer = texts("chat", [(1,)], parsed=lambda: AnswerReader(tools=Calls("{}")))
    *_, last = streamed(answer, 0, [("so", None), ("", "stop")])
    [choice] = answer.whole()["choices"]
    assert last["finish_reason"] == choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "so", "refusal": None}
    empty = texts("chat", [(1,)], parsed=lambda: AnswerReader(tools=Calls("{}")))
    streamed(empty, 0, [("", "stop")])
    assert empty.whole()["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_logprobs_of_chunks_are_those_of_the_whole(kind):
    class Codec(TextCodec):
        def token_bytes(self, token):
            return b"t"

    def shown(choices):
        name = "content" if kind == "chat" else "token_logprobs"
        parts = [json.loads(bytes(choice["logprobs"][name])) for choice in choices]
        return [part["logprob"] if kind == "chat" else part for part in chain(*parts)]

    writer = LogprobWriter(Codec(None), 0, as_ids=True)
    answer = Answer(kind, "m", [[1]], writer, AnswerOptions(logprobs=True))
    chunks = []
    for place, logprob in enumerate((-0.5, -1.5)):
        entry = TokenLogprobs(7, logprob, 1, ())
        chunks += answer.chunks(Delta(0, "x", [7], [place], logprobs=[entry]))[-1:]
    assert shown([chunk["choices"][0] for chunk in chunks]) == [-0.5, -1.5]
    assert shown(answer.whole()["choices"]) == [-0.5, -1.5]
