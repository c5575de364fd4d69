"""Structured output, tools and reasoning through OpenAI's client, with a model that knows answers
by heart."""

import contextlib
import json

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from .parrot import TEMPLATE, Learnt, write_parrot
from .serving import serving

ASK = "What is the weather in Rome?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOWNS = (
    '<tool_call>\n{"name": "weather", "arguments": {"ci',
    'ty": "Oslo"}}\n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}',
    "\n</tool_call> ",
)
"""A token begins a call and its arguments, and another one ends it and begins the next."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
FRANCE = "What is the capital of France?"
LEARNT = [
    Learnt(ASK, CALL),
    Learnt("Two towns", TOWNS),
    Learnt("By a mark", ("<tool_call>", "\n{}")),
    Learnt("21 degrees", "It is 21 degrees in Rome."),
    Learnt(FRANCE, "<think>\nEasy.\n</think>\n\nParis."),
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


NAMES = ("--served-model-name", "parrot", "--served-model-name", "macaw")


@contextlib.contextmanager
def client_of(path, learnt, template=TEMPLATE):
    made = str(write_parrot(path / "model", learnt, template))
    with (
        serving(made, *NAMES, "--any-model-name", "--kv-tokens", "20000") as server,
        openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Of a server whose weights are random."""
    unthinking = TEMPLATE.replace("</think>", "")
    with client_of(tmp_path_factory.mktemp("random"), (), unthinking) as client:
        yield client


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """Of a server that knows some answers by heart."""
    with client_of(tmp_path_factory.mktemp("parrot"), LEARNT) as client:
        yield client


def chat(client, messages, **fields):
    asked = {"model": "parrot", "temperature": 0, "max_tokens": 200, **fields}
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return client.chat.completions.create(messages=messages, **asked)


def streamed(client, messages, **fields):
    """The message that a stream adds up to, and why it ended."""
    content, thinking, calls, finish = "", "", {}, None
    for chunk in chat(client, messages, stream=True, **fields):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        thinking += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"arguments": ""})
            if part.id:
                call |= {"id": part.id, "name": part.function.name}
            call["arguments"] += part.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, thinking, [calls[i] for i in sorted(calls)], finish


def test_a_whole_turn_with_a_tool(parrot):
    answer = chat(parrot, ASK, tools=[WEATHER, CLOCK]).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    [call] = answer.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    history = [
        {"role": "user", "content": ASK},
        answer.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    last = chat(parrot, history, tools=[WEATHER, CLOCK]).choices[0]
    assert last.finish_reason == "stop"
    assert last.message.content == "It is 21 degrees in Rome."
    assert last.message.tool_calls is None


def test_a_format_leaves_the_model_free_to_call_and_holds_for_what_it_says(parrot):
    form = {"type": "json_schema", "json_schema": {"name": "made", "schema": SCHEMA}}
    answer = chat(parrot, "By a mark", tools=[WEATHER], response_format=form, max_tokens=60)
    [call] = answer.choices[0].message.tool_calls  # what follows the mark is the grammar's
    assert call.function.name == "weather"
    said = {"structured_outputs": {"regex": r"It is \d+ degrees in Rome\."}}
    answer = chat(parrot, "21 degrees", tools=[WEATHER], extra_body=said).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == (LEARNT[3].answer, None)
    forced = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    answer = chat(parrot, "Hello", response_format=form, **forced).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["clock"]
    wrong = {**CLOCK["function"], "strict": True, "parameters": {"uniqueItems": True}}
    tools = [{"type": "function", "function": wrong}]
    with pytest.raises(openai.BadRequestError, match="400 - tools cannot be served"):
        chat(parrot, ASK, tools=tools, response_format=form)


def test_one_call_is_shown_where_several_are_not_wanted(parrot):
    wanted = {"tools": [WEATHER], "parallel_tool_calls": False}
    answer = chat(parrot, "Two towns", **wanted).choices[0]
    assert [call.function.arguments for call in answer.message.tool_calls] == ['{"city": "Oslo"}']
    _, _, [call], finish = streamed(parrot, "Two towns", **wanted)
    assert (call["arguments"], finish) == ('{"city": "Oslo"}', "tool_calls")


def test_a_call_that_is_cut_is_no_reason_to_run_it(parrot):
    """Clients run the calls of an answer that has ended with `tool_calls`."""
    for fields, reason in (({"stop": "ome"}, "stop"), ({"max_tokens": 2}, "length")):
        answer = chat(parrot, ASK, tools=[WEATHER], **fields).choices[0]
        [call] = answer.message.tool_calls
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.function.arguments)
        assert answer.finish_reason == reason
        assert streamed(parrot, ASK, tools=[WEATHER], **fields)[3] == reason


def test_the_model_is_told_of_allowed_tools_alone(parrot):
    clock = {"type": "function", "function": {"name": "clock"}}
    allowed = {"mode": "required", "tools": [clock]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    fields = {"tools": [WEATHER, CLOCK], "max_tokens": 60}
    answer = chat(parrot, "Hello", tool_choice=choice, **fields)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["clock"]
    assert answer.choices[0].finish_reason == "tool_calls"
    only = chat(parrot, "Hello", tools=[CLOCK], max_tokens=1).usage.prompt_tokens
    assert answer.usage.prompt_tokens == only
    clock["function"]["name"] = "other"
    with pytest.raises(openai.BadRequestError, match="is not one of the tools"):
        chat(parrot, "Hello", tool_choice=choice, **fields)


def test_what_proxies_write_into_a_history_is_no_error(parrot):
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    call |= {"provider_specific_fields": {}, "extra_content": {"google": {}}, "cache_control": {}}
    blocks = [{"type": "thinking", "thinking": "So"}]
    answer = {"role": "assistant", "content": "x", "id": "1", "tool_calls": [call], "images": []}
    answer |= {"provider_specific_fields": {}, "reasoning_content": "So", "thinking_blocks": blocks}
    answer |= {"reasoning_details": [{"type": "reasoning.text", "text": "So"}]}
    history = [{"role": "user", "content": "Hello"}, answer]
    history.append({"role": "tool", "tool_call_id": "a", "content": "21 degrees"})
    said = chat(parrot, history, tools=[CLOCK]).choices[0].message.content
    assert said == "It is 21 degrees in Rome."


@pytest.mark.parametrize(
    "arguments", ['{"city": "Ro', "[1]", "\\", '"Rome"', "", "null", '{"\\ud83d": "\\ude00"}']
)
def test_a_call_with_broken_arguments_does_not_end_the_conversation(parrot, arguments):
    """A model wrote them, and the client sends them back with what came of it."""
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "a", "content": "No: but it has 21 degrees"})
    said = chat(parrot, history, tools=[CLOCK]).choices[0].message.content
    assert said == "It is 21 degrees in Rome."


def test_a_model_has_several_names_and_any_other_if_the_operator_says_so(client):
    assert [card.id for card in client.models.list()] == ["parrot", "macaw"]
    assert client.models.retrieve("macaw").root == "parrot"
    for name in ("parrot", "macaw", "gpt-4o", "dummy"):
        asked = {"messages": [{"role": "user", "content": ASK}], "max_tokens": 1}
        assert client.chat.completions.create(model=name, **asked).model == "parrot"


def test_tokens_of_a_conversation_are_those_of_its_prompt(client):
    fields = {"messages": [{"role": "user", "content": "Hello"}], "tools": [CLOCK]}
    counted = client.post("../tokenize", body=fields, cast_to=object)["count"]
    assert (
        counted
        == client.chat.completions.create(
            model="parrot", max_tokens=1, **fields
        ).usage.prompt_tokens
    )
    del fields["tools"]
    assert client.post("../tokenize", body=fields, cast_to=object)["count"] < counted
    with pytest.raises(openai.BadRequestError, match="tools needs messages"):
        client.post("../tokenize", body={"prompt": "a", "tools": [CLOCK]}, cast_to=object)


def test_a_streamed_call_adds_up_to_the_whole_one(parrot):
    content, _, [call], finish = streamed(parrot, ASK, tools=[WEATHER])
    assert (content, finish) == ("", "tool_calls")
    assert call["name"] == "weather"
    assert call["id"]
    assert json.loads(call["arguments"]) == {"city": "Rome"}


def test_openais_own_helper_adds_up_calls_that_begin_in_one_delta(parrot):
    state = ChatCompletionStreamState()
    for chunk in chat(parrot, "Two towns", stream=True, tools=[WEATHER]):
        [choice] = chunk.choices
        indexes = [part.index for part in choice.delta.tool_calls or ()]
        assert len(indexes) == len(set(indexes))
        state.handle_chunk(chunk)
    calls = state.get_final_completion().choices[0].message.tool_calls
    towns = [json.loads(call.function.arguments)["city"] for call in calls]
    assert towns == ["Oslo", "Bern"]


def test_without_tools_a_call_is_text(parrot):
    assert chat(parrot, ASK).choices[0].message.content == CALL
    none = chat(parrot, ASK, tools=[WEATHER], tool_choice="none").choices[0]
    assert not none.message.tool_calls


def test_thinking_is_told_apart(parrot):
    ask = FRANCE
    answer = chat(parrot, ask).choices[0].message
    assert (answer.content, answer.reasoning_content) == ("Paris.", "Easy.")
    assert streamed(parrot, ask)[:2] == ("Paris.", "Easy.")
    usage = chat(parrot, ask).usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    again = [{"role": "user", "content": ask}, answer.model_dump(exclude_none=True)]
    assert chat(parrot, [*again, {"role": "user", "content": ASK}], max_tokens=5).choices


def test_stop_strings_count_in_the_answer_alone(parrot):
    """As at hosted APIs: harnesses send them with every question, and thinking repeats those."""
    answer = chat(parrot, FRANCE, stop=["Easy", "ri"]).choices[0]
    assert (answer.message.reasoning_content, answer.message.content) == ("Easy.", "Pa")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "ri")
    assert streamed(parrot, FRANCE, stop=["Easy", "ri"])[:2] == ("Pa", "Easy.")
    whole = chat(parrot, FRANCE, stop="Easy").choices[0]
    assert (whole.message.content, whole.stop_reason) == ("Paris.", None)
    assert chat(parrot, ASK, stop="name").choices[0].message.content == '<tool_call>\n{"'
    between = chat(parrot, FRANCE, stop=["\n", "\n\n"]).choices[0]
    assert (between.message.content, between.stop_reason) == ("Paris.", None)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_calls_are_enforced(client, temperature):
    named = {"type": "function", "function": {"name": "clock"}}
    fields = {"tools": [WEATHER, CLOCK], "temperature": temperature, "seed": 3}
    answer = chat(client, "Hello", tool_choice=named, **fields).choices[0]
    assert [each.function.name for each in answer.message.tool_calls] == ["clock"]
    answer = chat(
        client, "Hello", tool_choice="required", parallel_tool_calls=False, **fields
    ).choices[0]
    if answer.finish_reason == "tool_calls":  # not cut in the city's name
        [call] = answer.message.tool_calls
        assert call.function.name in ("weather", "clock")
        json.loads(call.function.arguments)


@pytest.mark.parametrize("n", [1, 3])
def test_answers_follow_a_schema(client, n):
    wanted = {"type": "json_schema", "json_schema": {"name": "ab", "schema": SCHEMA}}
    answer = chat(client, "Hello", response_format=wanted, n=n, temperature=1.2, seed=1)
    assert len(answer.choices) == n
    for choice in answer.choices:
        value = json.loads(choice.message.content)
        assert value.keys() == {"a", "b"}
        assert value["b"] in ("x", "y")


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[ab]{3}[0-9]"}, "aaa0"),
        ({"choice": ["yes", "no"]}, "yes"),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, "((x))"),
        ({"json": {"type": "boolean"}}, "true"),
        ({"json": None, "choice": ["no"], "regex": None, "json_object": False}, "no"),
        ({"regex": "yes", "whitespace_pattern": None, "disable_fallback": False}, "yes"),
    ],
)
def test_structured_outputs_hold_completions_too(client, asked, pattern):
    fields = {"model": "parrot", "prompt": "Hello", "max_tokens": 60, "temperature": 1.0, "seed": 7}
    got = client.completions.create(extra_body={"structured_outputs": asked}, **fields).choices[0]
    assert got.finish_reason == "stop"
    assert set(got.text) <= set(pattern + "abyesnofalse0123456789()x")
    assert got.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "none"}}},
            "tool_choice",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 3}},
            "min_tokens",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "Hello", **fields)
    assert refused.value.param.startswith(param)


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        (
            "/chat/completions",
            "response_format",
            lambda schema: {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema},
                }
            },
        ),
        (
            "/responses",
            "text.format",
            lambda schema: {
                "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}
            },
        ),
        (
            "/messages",
            "output_config.format",
            lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
    ],
)
def test_a_schema_that_allows_nothing_is_told_by_the_field_that_has_it(parrot, path, param, fields):
    """It is found out behind the thinking, when the engine has the request."""
    said = {"input" if path == "/responses" else "messages": [{"role": "user", "content": FRANCE}]}
    most = {"max_output_tokens" if path == "/responses" else "max_tokens": 99}
    asked = {"model": "parrot", "temperature": 0, **said, **most, **fields({"$ref": "#"})}
    with pytest.raises(openai.BadRequestError, match="no text that the model can write") as told:
        parrot.post(path, body=asked, cast_to=object)
    assert told.value.body["param"] == param
    assert told.value.body["message"].startswith(param)
