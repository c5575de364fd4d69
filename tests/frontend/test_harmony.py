"""gpt-oss' answers: channels, calls and thinking, and how they go back into its template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frontend.checkpoints import byte_level, codec, write
from twolane.common.errors import FieldError
from twolane.engine.constrained.matching import matcher_of
from twolane.frontend.answer_formats import FormatOptions, ModelFormats
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.harmony import BEFORE_CALL, THINKING, HarmonyParser
from twolane.frontend.structured.grammar import (
    after_thinking,
    check_grammar,
    json_schema_grammar,
)
from twolane.frontend.structured.jobs import Schema
from twolane.frontend.structured.tools import Tool, calls_grammar, strict_grammar
from twolane.frontend.structured.worker import maker
from twolane.frontend.text.template import ChatTemplate

THOUGHT = "<|channel|>analysis<|message|>We add.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
OTHER = "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
CASES = {
    "answer": (THOUGHT + FINAL + "It is *3*.", "We add.", "It is *3*.", []),
    "no thinking": ("<|channel|>final<|message|>3", "", "3", []),
    "call": (THOUGHT + CALL + '{"a": 1}', "We add.", "", [("add", '{"a": 1}')]),
    "call of a tool with the name of a role": (
        THOUGHT + CALL.replace("add", "assistant") + "{}",
        *("We add.", "", [("assistant", "{}")]),
    ),
    "older call": (THOUGHT + OTHER + '{"a": 1}', "We add.", "", [("add", '{"a": 1}')]),
    "preamble": (
        THOUGHT + "<|start|>assistant<|channel|>commentary<|message|>I call.<|end|>" + CALL + "{}",
        *("We add.", "I call.", [("add", "{}")]),
    ),
    "thoughts": (
        THOUGHT + "<|start|>assistant" + THOUGHT + FINAL + "3",
        "We add.\nWe add.",
        "3",
        [],
    ),
    "cut in a header": (THOUGHT + "<|start|>assistant<|chan", "We add.", "", []),
    "cut in thinking": ("<|channel|>analysis<|message|>We", "We", "", []),
    "text in place of a header": (
        "<|channel|>We add"
        + THOUGHT.removeprefix("<|channel|>analysis<|message|>We add.")
        + "<|start|>assistant"
        + THOUGHT
        + FINAL
        + "3",
        *("We add\nWe add.", "3", []),
    ),
    "text in place of a header, long": (
        "<|channel|>" + "We add. " * 40 + "<|end|>" + FINAL + "3",
        *("We add. " * 40, "3", []),
    ),
    "headers without an end": (
        "<|channel|>analysis We add.<|end|><|start|>assistant<|channel|>final 3<|end|>",
        *(" We add.", " 3", []),
    ),
    "text that begins like a header": ("to", "", "to", []),
    "a channel that is none": ("<|channel|>??", "??", "", []),
    "cut in the name of a channel": ("<|channel|>analy", "", "", []),
    "no channels": ("Just text <b>", "", "Just text <b>", []),
    "two calls": (
        CALL.removeprefix("<|start|>assistant") + '{"a": 1}<|call|>' + CALL + '{"a": 2}',
        *("", "", [("add", '{"a": 1}'), ("add", '{"a": 2}')]),
    ),
}
TEMPLATE = """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{%- if tools %}{{- '\\nCalls to these tools must go to the commentary channel: functions.' }}
{%- for t in tools %}{{- '\\ntype ' + t.function.name + ' = (_: any) => any;' }}{%- endfor %}
{%- endif %}{{- '<|end|>' }}{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- if 'tool_calls' in m %}{%- set call = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{- raise_exception('both') }}{%- endif %}
{%- if m.thinking or m.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' }}
{{- (m.thinking or m.content) + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- endif %}{%- elif m.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
PROMPT = "<|start|>user<|message|>1+2?<|end|><|start|>assistant"


def read(parser: HarmonyParser, texts: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    reader = AnswerReader(parser)
    for text in texts:
        reader.read(text, ended=False)
    reader.read("", ended=True)
    return reader.thinking, reader.content, [(c.name, c.arguments) for c in reader.calls]


@pytest.mark.parametrize("case", CASES)
def test_channels_are_told_apart(case) -> None:
    text, *parts = CASES[case]
    assert read(HarmonyParser(PROMPT), [text]) == tuple(parts)


@given(case=st.sampled_from(sorted(CASES)), data=st.data())
def test_parts_do_not_depend_on_how_the_text_is_cut(case, data) -> None:
    text, *parts = CASES[case]
    places = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=8)))
    texts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(HarmonyParser(PROMPT), texts) == tuple(parts)


@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        (PROMPT + "<|channel|>final<|message|>It", " is 3", ("", " is 3", [])),
        (PROMPT + "<|channel|>analysis<|message|>", "Hm<|end|>" + FINAL + "3", ("Hm", "3", [])),
        (PROMPT + "<|channel|>analysis<|message|>", "Hm", ("Hm", "", [])),
    ],
)
def test_the_prompt_may_have_begun_a_message(prompt, text, parts) -> None:
    assert read(HarmonyParser(prompt), [text]) == parts


def test_without_tools_a_call_is_thinking_and_thinking_may_stay_in_the_text() -> None:
    text = THOUGHT + CALL + "{}"
    assert read(HarmonyParser(PROMPT, calls=False), [text]) == ("We add.\n{}", "", [])
    text = THOUGHT + FINAL + "3"
    assert read(HarmonyParser(PROMPT, reasons=False), [text]) == ("", "We add.3", [])


def formats(**options) -> ModelFormats:
    return ModelFormats(TEMPLATE, shows_tools=True, **options)


def test_the_format_is_found_from_the_template() -> None:
    form = formats().of(FormatOptions(), PROMPT)
    assert formats().calls == "harmony" and form.shows_special and form.thinking == THINKING
    assert form.reader is not None
    reader = form.reader()
    reader.read(CASES["answer"][0], ended=True)
    assert (reader.thinking, reader.content) == ("We add.", "It is *3*.")
    assert formats(reasons=False).of(FormatOptions(), PROMPT).thinking is None
    assert formats().of(FormatOptions(), PROMPT + "<|channel|>final<|message|>").thinking is None


def test_enforced_calls_come_one_at_a_time() -> None:
    form = formats().of(FormatOptions([ADD], [ADD]), PROMPT)
    assert form.grammar_job is not None and not form.grammar_job.answer.several
    assert form.grammar_job.thinking.end == BEFORE_CALL
    strict = Tool("add", ADD.parameters, strict=True)
    assert formats().of(FormatOptions([strict], [strict]), PROMPT).grammar_job is not None
    form = formats().of(FormatOptions([strict]), PROMPT)
    assert form.grammar_job is not None and form.grammar_job.thinking is None
    with pytest.raises(FieldError, match=r"tools.*continues a message"):
        formats().of(FormatOptions([strict]), PROMPT, "It")
    form = formats().of(FormatOptions(constraint=("response_format", Schema({}))), PROMPT)
    assert form.grammar_job is not None and form.grammar_job.thinking == THINKING


MARKS = [f"<|{name}|>" for name in ("channel", "message", "constrain", "call", "return")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer with the special tokens of Harmony."""
    return codec(write(tmp_path_factory.mktemp("harmony"), byte_level(added=MARKS)))


@pytest.fixture(scope="module")
def takes(made):
    """Whether a grammar takes a text as a whole."""
    vocabulary = made.vocabulary().matching([2])

    def whether(grammar: str, text: str) -> bool:
        matcher = matcher_of(vocabulary, check_grammar(grammar, "x"))
        ids = made.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whether


def test_grammars_of_calls_and_schemas_follow_the_analysis(made, takes) -> None:
    grammar = calls_grammar("harmony", [ADD], made.token_of, several=False)
    marks = formats().of(FormatOptions([ADD], [ADD]), PROMPT).grammar_job.thinking
    after = after_thinking(grammar, made.token_of, marks)
    head = CALL.removeprefix("<|start|>assistant")
    assert takes(after, THOUGHT + "<|start|>assistant" + head + '{"a": 1}')
    assert not takes(after, THOUGHT + FINAL + '{"a": 1}')
    assert not takes(after, THOUGHT + "<|start|>assistant" + head + '{"b": 1}')
    schema = after_thinking(json_schema_grammar({"type": "integer"}), made.token_of, THINKING)
    assert takes(schema, THOUGHT + FINAL + "12")
    assert not takes(schema, THOUGHT + FINAL + "twelve")
    assert not takes(schema, "12")


def test_an_answer_with_a_format_may_be_a_call_instead(made, takes) -> None:
    options = FormatOptions([ADD], constraint=("response_format", Schema({"type": "integer"})))
    grammar = maker(formats().of(options, PROMPT).grammar_job, made.token_of)()
    call = CALL.removeprefix("<|start|>assistant")
    for text, fits in (
        (THOUGHT + FINAL + "12", True),
        (THOUGHT + FINAL + "twelve", False),
        (THOUGHT + "<|start|>assistant" + call + '{"b": 1}', True),  # the tool is not strict
        (THOUGHT + "<|start|>assistant" + call.replace("add", "other") + "{}", False),
        (THOUGHT + FINAL.replace("final", "commentary") + "12", False),
    ):
        assert takes(grammar, text) is fits, text
    continued = maker(formats().of(options, PROMPT, "1").grammar_job, made.token_of)()
    assert takes(continued, "12")
    assert not takes(continued, call + '{"b": 1}')


def test_strict_calls_follow_their_schemas_where_the_model_may_choose(made, takes) -> None:
    """As the Agents SDK asks, which makes all tools strict."""
    tools = [Tool("add", ADD.parameters, strict=True), Tool("any", ADD.parameters)]
    grammar = strict_grammar("harmony", tools, made.token_of, several=True)
    call = CALL.removeprefix("<|start|>assistant")
    said = "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant"
    for text, fits in (
        (THOUGHT + FINAL + "It is *3*.", True),
        ("<|channel|>final<|message|>3", True),
        (call + '{"a": 1}', True),
        (call + '{"b": 1}', False),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}<|start|>assistant{said}{call}" + '{"a": 1}', True),
        (THOUGHT + "<|start|>assistant" + call.replace("add", "any") + '{"b": 1}', True),
        (call.replace("add", "other") + "{}", False),
        (call.replace("commentary", "analysis") + "{}", False),
    ):
        assert takes(grammar, text) is fits, text
    with pytest.raises(ValueError, match="special tokens"):
        strict_grammar("harmony", tools, lambda _: None, several=True)


def test_thinking_before_a_call_goes_back_into_the_template() -> None:
    template = ChatTemplate(TEMPLATE, {})
    assert template.form.thinking_key and template.form.arguments == "object"
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm"}
    [adapted] = template.form.adapted(turn)
    assert adapted["thinking"] == "Hm" and not adapted["content"]
    [adapted] = template.form.adapted({**turn, "content": "I call."})
    assert adapted["thinking"] == "Hm\n\nI call." and adapted["content"] == ""
