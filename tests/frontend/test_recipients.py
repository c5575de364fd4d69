"""Muse Glimmer's answers: messages to recipients, and calls between marks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frontend.checkpoints import byte_level, codec, write
from twolane.common.errors import FieldError
from twolane.engine.constrained.matching import matcher_of
from twolane.frontend.answer_formats import FormatOptions, ModelFormats
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.recipients import NAME, THINKING, RecipientParser
from twolane.frontend.structured.grammar import check_grammar
from twolane.frontend.structured.jobs import Schema
from twolane.frontend.structured.tools import Tool
from twolane.frontend.structured.worker import maker

TEMPLATE = """{{ messages }}{{ tools }}<|start|>assistant to=self<|message|><|eom|>
<atem:function_calls>"""
PROMPT = "<|start|>user<|message|>1+2?<|eot|><|start|>assistant"
NEXT = "<|eom|><|start|>assistant"
THOUGHT = " to=self<|message|>We add."
SAID = " to=user<|message|>"
ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
TYPES = {"add": {"a": frozenset(("integer",))}, "note": {"text": frozenset(("string",))}}


def call(name="add", value="1", key="a"):
    return (
        f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        f'<atem:parameter name="{key}">{value}</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>"
    )


CASES = {
    "answer": (f"{THOUGHT}{NEXT}{SAID}It is *3*.<|eot|>", "We add.", "It is *3*.", []),
    "no thinking": (f"{SAID}3", "", "3", []),
    "call": (f"{THOUGHT}{NEXT}{call()}<|eot|>", "We add.", "", [("add", {"a": 1})]),
    "text and two calls": (
        f"{THOUGHT}{NEXT}{SAID}I call.{NEXT}{call()}{NEXT}{call(value='2')}",
        *("We add.", "I call.", [("add", {"a": 1}), ("add", {"a": 2})]),
    ),
    "two thoughts": (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{SAID}3", "We add.\nWe add.", "3", []),
    "cut in a header": (f"{THOUGHT}{NEXT} to=us", "We add.", "", []),
    "cut in thinking": (" to=self<|message|>We", "We", "", []),
    "no headers": ("Just text <b>", "", "Just text <b>", []),
    "marks of another model": (
        f"{SAID}A <|channel|> mark{NEXT}{call('note', '<|channel|>final', 'text')}<|eot|>",
        *("", "A <|channel|> mark", [("note", {"text": "<|channel|>final"})]),
    ),
    "text in place of a call": (" to=add<|message|>What?<|eot|>", "", "What?", []),
}


def read(parser, texts):
    reader = AnswerReader(parser)
    for text in texts:
        reader.read(text, ended=False)
    reader.read("", ended=True)
    calls = [(each.name, json.loads(each.arguments)) for each in reader.calls]
    return reader.thinking, reader.content, calls


@pytest.mark.parametrize("case", CASES)
def test_messages_are_told_apart(case):
    text, *parts = CASES[case]
    assert read(RecipientParser(PROMPT, types=TYPES), [text]) == tuple(parts)


@given(case=st.sampled_from(sorted(CASES)), data=st.data())
def test_parts_do_not_depend_on_how_the_text_is_cut(case, data):
    text, *parts = CASES[case]
    places = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=8)))
    texts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(RecipientParser(PROMPT, types=TYPES), texts) == tuple(parts)


def test_the_prompt_may_have_begun_a_message():
    begun = RecipientParser(f"{PROMPT}{SAID}It", types=TYPES)
    assert read(begun, [" is 3<|eot|>"]) == ("", " is 3", [])


def test_without_tools_a_call_is_thinking():
    thought, content, calls = read(RecipientParser(PROMPT), [f"{call()}{NEXT}{SAID}3"])
    assert "atem:invoke" in thought and (content, calls) == ("3", [])


def formats():
    return ModelFormats(TEMPLATE, shows_tools=True)


@pytest.mark.parametrize("name", ["self", "user"])
def test_tools_cannot_be_named_like_other_recipients(name):
    with pytest.raises(FieldError, match=f"tools cannot .*{name}"):
        formats().of(FormatOptions([ADD, Tool(name, ADD.parameters)]), PROMPT)


def test_the_format_is_found_from_the_template():
    assert formats().calls == NAME and not formats().tools_as_text
    form = formats().of(FormatOptions(), PROMPT)
    assert form.shows_special and form.thinking == THINKING
    assert read(form.reader().reasoning, [CASES["answer"][0]])[:2] == ("We add.", "It is *3*.")


MARKS = [f"<|{name}|>" for name in ("start", "message", "eom", "eot")]


@pytest.fixture(scope="module")
def takes(tmp_path_factory):
    """Whether the grammar of a request's answers takes a text as a whole."""
    made = codec(write(tmp_path_factory.mktemp("muse"), byte_level(added=MARKS)))
    vocabulary = made.vocabulary().matching([2])

    def whether(options, text):
        grammar = maker(formats().of(options, PROMPT).grammar_job, made.token_of)()
        matcher = matcher_of(vocabulary, check_grammar(grammar, "x"))
        ids = made.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whether


STRICT = Tool("add", ADD.parameters, strict=True)
TYPED = ("response_format", Schema({"type": "integer"}))


@pytest.mark.parametrize(
    ("options", "yes", "no"),
    [
        (FormatOptions([ADD], [ADD]), [f"{THOUGHT}{NEXT}{call()}"], [f"{THOUGHT}{NEXT}{SAID}3"]),
        (FormatOptions([ADD], [ADD]), [], [f"{THOUGHT}{NEXT}{call(value='x')}"]),
        (FormatOptions(constraint=TYPED), [f"{THOUGHT}{NEXT}{SAID}3"], [f"{THOUGHT}{NEXT}3"]),
        (FormatOptions(constraint=TYPED), [], [f"{THOUGHT}{NEXT}{SAID}three"]),
        (
            FormatOptions([ADD], constraint=TYPED),
            [f"{THOUGHT}{NEXT}{SAID}3", f"{THOUGHT}{NEXT}{call(key='b')}"],
            [f"{THOUGHT}{NEXT}{call(name='other')}"],
        ),
        (
            FormatOptions([STRICT]),
            [
                f"{SAID}Hm.",
                f"{THOUGHT}{NEXT}{call()}",
                f"{THOUGHT}{NEXT}{SAID}I call.{NEXT}{call()}",
            ],
            [f"{THOUGHT}{NEXT}{call(key='b')}", call(name="other")],
        ),
    ],
)
def test_what_is_enforced_follows_the_headers(takes, options, yes, no):
    assert [takes(options, text) for text in yes] == [True] * len(yes)
    assert [takes(options, text) for text in no] == [False] * len(no)
