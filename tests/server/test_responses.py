"""/v1/responses through OpenAI's client, with a model that knows answers by heart."""

import json
import time

import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from twolane.server.responses.events import ResponseAnswer

from .parrot import Learnt, write_parrot
from .serving import PATIENCE, serving
from .test_agents import ASK, CALL, FRANCE, SCHEMA

EVENTS = TypeAdapter(ResponseStreamEvent)
PATCH = "*** Begin Patch"
LEARNT = [
    Learnt(ASK, CALL),
    Learnt("21 degrees", "It is 21 degrees in Rome."),
    Learnt(FRANCE, "<think>\nEasy.\n</think>\n\nParis."),
    Learnt("And Spain?", "Madrid."),
    Learnt("Mend it", '<tool_call>{"name": "patch", "arguments": {"input": "' + PATCH + '"}}'),
    Learnt("Make an ab", '{"a": 12, "b": "x"}'),
    Learnt("Close it", '<tool_call>\n{"name": "agents.close", "arguments": {}}'),
]
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather now",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
PLAIN = {"type": "function", "name": "close", "parameters": None}
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "agents", "description": "Others", "tools": [PLAIN]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = str(write_parrot(tmp_path_factory.mktemp("parrot") / "model", LEARNT))
    arguments = ("--kv-tokens", "20000", "--stored-response-bytes", "12000")
    keys = ("--api-key", "none", "--api-key", "other")
    with serving(made, "--served-model-name", "parrot", *arguments, *keys) as server:
        server.key = "none"
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def other(client):
    """A client with another key."""
    return client.with_options(api_key="other")


def ask(client, said, **fields):
    asked = {"model": "parrot", "temperature": 0, "max_output_tokens": 50, **fields}
    return client.responses.create(input=said, **asked)


def last_of(client, said, **fields):
    """The response that a stream ends with, whose events are as the client's types say."""
    events = list(ask(client, said, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event.model_dump(warnings=False))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events[-1].response, events


def same(first, second):
    """Whether two responses say the same, apart from their ids."""

    def said(response):
        items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
        return items, response.status, response.output_text

    return said(first) == said(second)


def test_a_text_is_answered(client):
    penalties = {"presence_penalty": -2, "frequency_penalty": 0.5}
    response = ask(
        client,
        "And Spain?",
        instructions="Be brief.",
        metadata={"a": "b"},
        extra_body=penalties,
    )
    Response.model_validate(response.model_dump(warnings=False), strict=False)
    assert (response.output_text, response.status) == ("Madrid.", "completed")
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    usage = response.usage
    assert usage.output_tokens == 4
    assert usage.total_tokens == usage.input_tokens + 4
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_fields_of_vllm_are_those_of_chat(client):
    """Its Responses API has these, too."""
    one = {"min_p": 0.1, "repetition_penalty": 1.01, "logit_bias": {}, "cache_salt": "x"}
    assert ask(client, "And Spain?", extra_body=one).output_text == "Madrid."
    stopped = ask(client, "And Spain?", extra_body={"stop": ["rid"]})
    assert (stopped.output_text, stopped.status) == ("Mad", "completed")
    for field, wrong in (("min_p", 2), ("repetition_penalty", 0), ("stop", ""), ("cache_salt", "")):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, "And Spain?", extra_body={field: wrong})
        assert refused.value.param == field


def test_a_stream_ends_with_the_whole_response(client):
    streamed, events = last_of(client, "And Spain?")
    assert same(streamed, ask(client, "And Spain?"))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Madrid."
    assert all(deltas)  # a slow reader gets several tokens in one event


def test_thinking_is_an_item_of_its_own(client):
    for response in (ask(client, FRANCE), last_of(client, FRANCE)[0]):
        thinking, message = response.output
        assert (thinking.type, thinking.content[0].text) == ("reasoning", "Easy.")
        assert message.content[0].text == "Paris."
        assert response.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(
    ("said", "kinds"), [(FRANCE, ("reasoning_text", "output_text")), (ASK, ("function_call",))]
)
def test_each_item_is_added_grows_and_is_done_in_order(client, said, kinds):
    _, events = last_of(client, said, tools=[WEATHER])
    order = []
    for event in events[2:-1]:
        if event.type != (order or [None])[-1]:  # deltas follow each other
            order.append(event.type)
    expected = []
    for kind in kinds:
        steps = ("content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done")
        if kind == "function_call":
            steps = ("function_call_arguments.delta", "function_call_arguments.done")
        expected += ["output_item.added", *steps, "output_item.done"]
    assert order == [f"response.{step}" for step in expected]


def test_a_whole_turn_with_a_tool(client):
    streamed, events = last_of(client, ASK, tools=[WEATHER])
    response = ask(client, ASK, tools=[WEATHER], store=False)
    assert same(streamed, response)
    [call] = response.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments) == {"city": "Rome"}
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    history = [{"role": "user", "content": ASK}, call.to_dict(), result]
    assert ask(client, history, tools=[WEATHER]).output_text == "It is 21 degrees in Rome."


def test_a_tool_that_takes_free_text(client):
    for response in (
        ask(client, "Mend it", tools=[CUSTOM]),
        last_of(client, "Mend it", tools=[CUSTOM])[0],
    ):
        [call] = response.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", PATCH)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "21 degrees"}
    history = [{"role": "user", "content": "Mend it"}, call.to_dict(), result]
    assert ask(client, history, tools=[CUSTOM]).output_text == "It is 21 degrees in Rome."


def test_items_are_found_by_their_ids(client):
    """As Vercel's AI SDK sends what an earlier response has said, unless `store` is false."""
    said = ask(client, ASK, tools=[WEATHER])
    known = [{"type": "item_reference", "id": item.id} for item in said.output]
    result = {"type": "function_call_output", "call_id": said.output[-1].call_id}
    history = [{"role": "user", "content": ASK}, *known, {**result, "output": "21 degrees"}]
    answer = ask(client, history, tools=[WEATHER])
    assert answer.output_text == "It is 21 degrees in Rome."
    whole = [history[0], *(item.to_dict() for item in said.output), history[-1]]
    assert ask(client, whole, tools=[WEATHER]).usage.input_tokens == answer.usage.input_tokens
    client.responses.delete(said.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, history, tools=[WEATHER])
    assert refused.value.param == "input[1].id"


def test_tools_may_be_among_the_items(client):
    """As Codex sends them, with messages of its agents to each other."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    offered = {"type": "additional_tools", "role": "developer"}
    offered["tools"] = [{**SPACE, "tools": [PLAIN, {**CUSTOM, "format": grammar}]}]
    parts = [
        {"type": "input_text", "text": "Task: "},
        {"type": "encrypted_content", "encrypted_content": "Close it"},
    ]
    message = {"type": "agent_message", "author": "/root", "recipient": "/a", "content": parts}
    response = ask(client, [offered, message])
    [call] = response.output
    assert (call.type, call.name, call.namespace) == ("function_call", "close", "agents")
    told = ask(client, [{**offered, "tools": [SPACE]}, message])
    assert response.usage.input_tokens > told.usage.input_tokens + len(grammar["definition"])


def test_tools_of_a_namespace_and_tools_that_openai_runs(client):
    tools = [SPACE, {"type": "web_search", "external_web_access": False}]
    response = ask(client, "Close it", tools=tools)
    [call] = response.output
    assert (call.name, call.namespace, call.arguments) == ("close", "agents", "{}")
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "Close it", tools=[{"type": "file_search"}])
    assert refused.value.param == "tools[0].type"


def test_calls_are_enforced(client):
    named = {"type": "function", "name": "weather"}
    [call] = ask(client, "Hello", tools=[WEATHER, CUSTOM], tool_choice=named).output
    assert call.name == "weather"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    [call] = ask(client, "Hello", tools=[WEATHER, CUSTOM], tool_choice=allowed).output
    assert call.name == "weather"


def test_answers_follow_a_schema(client):
    form = {"type": "json_schema", "name": "ab", "schema": SCHEMA, "strict": True}
    response = ask(client, "Make an ab", text={"format": form})
    assert json.loads(response.output_text) == {"a": 12, "b": "x"}
    assert response.text.format.schema_ == SCHEMA


def test_an_answer_that_is_cut_is_incomplete(client):
    for response in (
        ask(client, FRANCE, max_output_tokens=1),
        last_of(client, FRANCE, max_output_tokens=1)[0],
    ):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_goes_on_with_its_id(client):
    first = ask(client, FRANCE)
    second = last_of(client, "And Spain?", previous_response_id=first.id)[0]
    assert second.output_text == "Madrid."
    assert second.previous_response_id == first.id
    alone = ask(client, "And Spain?").usage.input_tokens
    assert second.usage.input_tokens > alone + len(FRANCE)
    call = ask(client, ASK, tools=[WEATHER], previous_response_id=second.id).output[0]
    assert call.name == "weather"
    assert same(client.responses.retrieve(first.id), first)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


@pytest.mark.parametrize("said", ["And Spain?", FRANCE, ASK, "Mend it"])
def test_a_chain_has_the_prompt_of_its_inputs_and_outputs(client, said):
    """Also after an empty answer, whose output is no item."""
    tools = {"tools": [WEATHER, CUSTOM]}
    for stop in (None, ["Madrid", "Easy"]):
        first = ask(client, said, extra_body={"stop": stop} if stop else None, **tools)
        given = [item.model_dump(exclude_none=True) for item in first.output]
        items = [{"role": "user", "content": said}, *given, {"role": "user", "content": "So?"}]
        count = client.responses.input_tokens.count
        chained = count(input="So?", previous_response_id=first.id, **tools)
        assert chained.input_tokens == count(input=items, **tools).input_tokens
    assert bool(first.output) == (said != "And Spain?")


SAID = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Be"}] * 2},
    {"role": "assistant", "content": "Yes", "id": "msg_mine", "phase": "commentary"},
    {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "Rain", "status": "incomplete"},
    {"role": "user", "content": "And Spain?", "id": "msg_mine"},
]


def test_the_items_that_made_a_response_are_listed(client):
    """In pages, newest first, with those of the responses before it; `encrypted_content` was never
    seen by the model."""
    first = ask(client, FRANCE)
    last = ask(client, SAID, previous_response_id=first.id)
    page = client.responses.input_items.list(last.id, order="asc", include=[])
    ResponseItemList.model_validate(page.model_dump(warnings=False))
    items = [item.model_dump(exclude_none=True) for item in page.data]
    kinds = ["message", "reasoning", "message", *[item.get("type", "message") for item in SAID]]
    assert [item["type"] for item in items] == kinds
    assert items[0]["content"] == [{"type": "input_text", "text": FRANCE}]
    assert items[1]["id"] == first.output[0].id
    assert [part["text"] for part in items[3]["content"]] == ["Be", "Be"]
    assert items[4]["content"][0] == {
        "type": "output_text",
        "text": "Yes",
        "annotations": [],
        "logprobs": [],
    }
    assert (items[4]["id"], items[7]["status"]) == ("msg_mine", "incomplete")
    assert not {"phase", "encrypted_content"} & {name for item in items for name in item}
    assert [item["id"].split("_")[0] for item in items] == [
        "msg",
        "rs",
        "msg",
        "msg",
        "msg",
        "rs",
        "fc",
        "fco",
        "msg",
    ]
    assert (page.first_id, page.last_id, page.has_more) == (items[0]["id"], items[-1]["id"], False)
    assert [*client.responses.input_items.list(last.id, limit=2)] == page.data[::-1]
    turned = client.responses.input_items.list(last.id, limit=5, after=items[6]["id"]).data
    assert turned == page.data[5::-1][:5]
    [same] = client.responses.input_items.list(first.id).data
    assert same == page.data[0]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_0", "after"),
        ("before=msg_0", "before"),
        ("include[]=message.output_text.logprobs", "include[][0]"),
    ],
)
def test_a_list_of_items_refuses_by_name(client, server, query, param):
    id = ask(client, "And Spain?").id
    status, _, body = server.request(f"/v1/responses/{id}/input_items?{query}")
    assert (status, body["error"]["param"]) == (400, param), body


def test_a_response_belongs_to_the_key_that_made_it(client, other):
    """Another key gets what it gets for an id that there is not."""
    made = ask(client, "And Spain?")
    calls = [
        lambda client, id: client.responses.retrieve(id),
        lambda client, id: client.responses.delete(id),
        lambda client, id: client.responses.cancel(id),
        lambda client, id: client.responses.input_items.list(id),
        lambda client, id: ask(client, "And Spain?", previous_response_id=id),
    ]
    for call in calls:
        refusals = []
        for id in (made.id, "resp_" + "0" * 32):
            with pytest.raises(openai.APIStatusError) as refused:
                call(other, id)
            said = refused.value.body["message"].replace(id, "")
            refusals.append((refused.value.status_code, refused.value.code, said))
        assert refusals[0] == refusals[1]
        assert refusals[0][1].endswith("not_found")
    for id in (made.output[0].id, "msg_0"):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(other, [{"type": "item_reference", "id": id}])
        assert refused.value.code == "item_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(made.id)
    assert "in the background" in refused.value.message
    ask(client, "And Spain?", previous_response_id=made.id)
    client.responses.delete(made.id)


def test_a_key_that_stores_very_much_evicts_its_own_responses(client, other):
    mine = ask(client, "And Spain?")
    for _ in range(12):
        ask(other, "And Spain?")
    client.responses.delete(mine.id)


def test_responses_are_kept_within_a_bound(client):
    first = ask(client, FRANCE)
    for _ in range(12):
        ask(client, "And Spain?")
    unstored = ask(client, FRANCE, store=False)
    for response in (first, unstored):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, "And Spain?", previous_response_id=response.id)
        assert refused.value.param == "previous_response_id"
        assert refused.value.code == "previous_response_not_found"  # what clients look for


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"extra_body": {"nope": 1}}, "nope"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
            "tools[0].format.definition",
        ),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}},
            "text.format",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "Hello", **fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].id"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[0].type"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0]"),
        ({"role": "nobody", "content": "x"}, "input[0].role"),
    ],
)
def test_items_that_cannot_be_served_are_refused_by_name(client, item, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, [item])
    assert refused.value.param.startswith(param)


def test_a_response_is_not_completed_before_it_is_created(monkeypatch):
    answer = ResponseAnswer("m", 1, {}, None, {}, lambda response: None)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock is set back
    shown = answer.shown("completed")
    assert 0 <= shown["completed_at"] - shown["created_at"] < PATIENCE


REQUIRED = (
    "id object created_at completed_at status incomplete_details model previous_response_id "
    "instructions output error tools tool_choice truncation parallel_tool_calls text top_p "
    "presence_penalty frequency_penalty top_logprobs temperature reasoning user usage "
    "max_output_tokens max_tool_calls store background service_tier metadata safety_identifier "
    "prompt_cache_key"
)
"""The fields that Open Responses requires, whose clients refuse a response without one."""


def test_a_response_has_every_field_with_the_value_that_was_used(server):
    said = {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "max_tool_calls": 2}
    asked = {"input": "And Spain?", "temperature": 0, **said}
    status, _, response = server.request("/v1/responses", asked)
    assert (status, set(REQUIRED.split()) - response.keys()) == (200, set())
    assert {name: response[name] for name in said} == said
    assert response["completed_at"] >= response["created_at"]
    numbers = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs")
    assert [response[name] for name in numbers] == [0, 1, 0, 0, 0]
    assert (response["metadata"], response["service_tier"]) == ({}, "default")
    _, _, cut = server.request("/v1/responses", {"input": "And Spain?", "max_output_tokens": 1})
    assert (cut["status"], cut["completed_at"], cut["user"]) == ("incomplete", None, None)


def test_the_tokens_of_the_input_are_counted(client, server):
    """As those of a response with the same fields, which may be longer than the context."""
    fields = {"instructions": "Be brief.", "tools": [WEATHER], "tool_choice": "auto"}
    first = ask(client, "And Spain?", **fields)
    count = client.responses.input_tokens.count(model="parrot", input="And Spain?", **fields)
    assert (count.object, count.input_tokens) == (
        "response.input_tokens",
        first.usage.input_tokens,
    )
    more = {"previous_response_id": first.id, "input": "And Spain?"}
    counted = client.responses.input_tokens.count(model="parrot", **more).input_tokens
    assert counted == ask(client, more.pop("input"), **more).usage.input_tokens
    path = "/v1/responses/input_tokens"
    status, _, answer = server.request(path, {"input": "a" * 25_000})
    assert (status, answer["input_tokens"] > 20_000) == (200, True)
    for body, param in (
        ({"input": "Hi", "temperature": 0}, "temperature"),
        ({"input": "Hi", "truncation": "last"}, "truncation"),
        ({"input": "Hi", "previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": "Hi", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ):
        status, _, answer = server.request(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


def message(role, text):
    return {"role": role, "content": text}


def called(number, output):
    call = {"type": "function_call", "call_id": f"c{number}", "name": "weather", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": f"c{number}", "output": output}]


BEGUN = message("system", "Be brief.")
SPAIN = message("user", "And Spain?")
LONG = 19_500
"""Tokens of an answer beside which a prompt may have 500 in this context."""


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ([BEGUN, SPAIN], [-1]),
        ([BEGUN, *(message("user", "a" * 200) for _ in range(9)), SPAIN], [-3, -2, -1]),
        ([message("user", "Hi"), message("assistant", "a" * 20_000), SPAIN], [-1]),
        ([message("user", "a" * 500), message("assistant", "Oh"), BEGUN, SPAIN], [-1]),
        ([BEGUN, SPAIN, *called(1, "a" * 500), *called(2, "b" * 100)], [1, -2, -1]),
        ([message("user", "Hi"), SPAIN, *called(1, "a" * 500), *called(2, "b")], [1, -2, -1]),
    ],
)
def test_the_oldest_items_of_a_long_conversation_are_left_out(client, said, left):
    """As few as leave room for the answer, and never the first instructions; `left` has the places
    of the others that stay."""
    kept = [*([BEGUN] if said[0] is BEGUN else []), *(said[place] for place in left)]
    fields = {"instructions": "Now.", "max_output_tokens": LONG}
    shown = ask(client, said, truncation="auto", **fields)
    assert shown.usage.input_tokens == ask(client, kept, **fields).usage.input_tokens
    assert shown.truncation == "auto"
    if kept[-1] is SPAIN:
        assert shown.output_text == "Madrid."


def test_what_is_left_out_is_stored_all_the_same(client):
    fields = {"max_output_tokens": LONG, "truncation": "auto"}
    first = ask(client, "a" * 300, **fields)
    second = ask(client, "b" * 300, previous_response_id=first.id, **fields)
    assert second.usage.input_tokens < 400
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [listed[0].content[0].text, listed[-1].content[0].text] == ["a" * 300, "b" * 300]


def test_the_tokens_of_a_shortened_input_are_counted(client, server):
    long = [message("user", "a" * 25_000), SPAIN]
    counted = server.request("/v1/responses/input_tokens", {"input": long, "truncation": "auto"})
    assert counted[2]["input_tokens"] == ask(client, [SPAIN]).usage.input_tokens


@pytest.mark.parametrize(
    ("said", "fields", "param"),
    [
        ("a" * 20_000, {}, "input"),
        ([message("assistant", "a" * 20_000)], {}, "input"),
        ([message("user", "a" * 600), SPAIN], {"truncation": "disabled"}, "max_output_tokens"),
        ([SPAIN, message("user", "a" * 600)], {}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_shortened_is_refused(client, said, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, said, max_output_tokens=LONG, **{"truncation": "auto", **fields})
    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")
