"""/v1/messages through Anthropic's client, with a model that knows answers by heart."""

import re

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from twolane.server.anthropic.answers import SIGNATURE
from twolane.server.anthropic.request import MessagesRequest

from .parrot import TEMPLATE, Learnt, write_parrot
from .serving import serving
from .test_agents import ASK, CALL, FRANCE, SCHEMA

EVENTS = TypeAdapter(RawMessageStreamEvent)
LEARNT = [
    Learnt(ASK, CALL),
    Learnt("21 degrees", "It is 21 degrees in Rome."),
    Learnt(FRANCE, "<think>\nEasy.\n</think>\n\nParis."),
    Learnt("Make an ab", '{"a": 12, "b": "x"}'),
    Learnt("And Spain?", "Madrid."),
]
WEATHER = {
    "name": "weather",
    "description": "Weather now",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
KEY = "secret"


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
TEXT = {"type": "document", "source": {"type": "text", "data": "Rome"}}
CITED = {**TEXT, "citations": {"enabled": True}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    shown = TEMPLATE.replace(
        "{{ message.content", "{{ message.reasoning_content }}{{ message.content"
    )
    template = shown + "{%- if enable_thinking is false %}Do not think.{% endif %}"
    made = str(write_parrot(tmp_path_factory.mktemp("parrot") / "model", LEARNT, template))
    arguments = ("--kv-tokens", "20000", "--api-key", KEY)
    with serving(made, "--served-model-name", "parrot", *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.base, api_key=KEY, max_retries=0) as client:
        yield client


def fields_of(said, **fields):
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    given = {"model": "parrot", "max_tokens": 50, "messages": messages, **fields}
    return {"extra_body": {"temperature": 0}, **given}


def whole(client, said, **fields):
    message = client.messages.create(**fields_of(said, **fields))
    return Message.model_validate(message.model_dump(warnings=False))


def streamed(client, said, **fields):
    """The message that the client makes of a stream, whose events are as its types say."""
    raw = client.messages.create(stream=True, **fields_of(said, **fields))
    for event in raw:
        if event.type != "ping":
            EVENTS.validate_python(event.model_dump(warnings=False))
    with client.messages.stream(**fields_of(said, **fields)) as stream:
        return stream.get_final_message()


BOTH = pytest.mark.parametrize("ask", [whole, streamed])


@BOTH
def test_thinking_and_text_are_blocks(client, ask):
    message = ask(client, FRANCE, system="Be brief.")
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Easy.", "Paris.")
    assert thinking.signature == SIGNATURE != ""
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 4
    [text] = ask(client, FRANCE, thinking={"type": "adaptive", "display": "omitted"}).content
    assert text.text == "Paris."


@BOTH
def test_a_whole_turn_with_a_tool(client, ask):
    message = ask(client, ASK, tools=[WEATHER])
    [call] = message.content
    assert message.stop_reason == "tool_use"
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    history = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    [text] = ask(client, history, tools=[WEATHER]).content
    assert text.text == "It is 21 degrees in Rome."


def test_thinking_comes_back_in_the_history(client):
    first = whole(client, FRANCE)
    history = [
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]},
        {"role": "user", "content": [{"type": "text", "text": "And Spain?"}]},
    ]
    assert whole(client, history).content[-1].text == "Madrid."


def test_thinking_of_earlier_answers_is_cleared_as_asked(client):
    thought = {"type": "thinking", "thinking": "Easy, I know that. " * 9, "signature": ""}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "Paris."}]}
    asked = {"role": "user", "content": FRANCE}
    history = [asked, answer, asked, answer, {"role": "user", "content": "And Spain?"}]
    plain = {**answer, "content": "Paris."}

    def counted(said, **keep):
        edits = {"edits": [{"type": "clear_thinking_20251015", **keep}]}
        fields = {"model": "parrot", "messages": said, "context_management": edits}
        return client.beta.messages.count_tokens(betas=["x"], **fields).input_tokens

    every = client.messages.count_tokens(model="parrot", messages=history).input_tokens
    latest = counted([asked, plain, *history[2:]], keep="all")
    assert counted(history, keep="all") == every > latest
    assert counted(history) == latest
    assert counted(history, keep={"type": "thinking_turns", "value": 2}) == every


def test_the_system_speaks_in_front_wherever_it_is_written(client):
    """Claude Code says what agents there are behind its user's first message."""
    asked = {"role": "user", "content": "And Spain?"}
    more = [{"role": "system", "content": text} for text in ("Agents: none.", "Be kind.")]

    def counted(messages, **system):
        return client.messages.count_tokens(model="parrot", messages=messages, **system)

    every = "Be brief.\n\nAgents: none.\n\nBe kind."
    behind = counted([asked, *more], system="Be brief.")
    assert behind == counted([asked], system=every) != counted([asked], system="Be brief.")
    answer = whole(client, "x", messages=[asked, *more], system="Be brief.")
    assert answer.content[-1].text == whole(client, "And Spain?").content[-1].text
    fields = {"model": "x", "max_tokens": 1, "messages": [asked, *more], "system": "Be brief."}
    chat = MessagesRequest.model_validate(fields).request(lambda _: False).conversation
    assert [(turn["role"], turn["content"]) for turn in chat.turns] == [
        ("system", every),
        ("user", "And Spain?"),
    ]
    alone = MessagesRequest.model_validate({**fields, "messages": more[:1], "system": None})
    [turn] = alone.request(lambda _: False).conversation.turns
    assert turn["content"] == "Agents: none."


def test_what_claude_code_says_of_itself_is_not_for_the_model(client):
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=12345;"}
    brief = {"type": "text", "text": "Be brief.\nx-anthropic-billing-header: no"}

    def counted(**system):
        said = [{"role": "user", "content": "And Spain?"}]
        return client.messages.count_tokens(model="parrot", messages=said, **system).input_tokens

    assert counted(system=[header, brief]) == counted(system=brief["text"]) > counted()
    assert counted(system=[header]) == counted()


def test_calls_are_enforced(client):
    fields = {"tools": [WEATHER], "max_tokens": 200}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        message = whole(client, ASK, tool_choice=choice, **fields)
        assert message.content[-1].name == "weather"
    none = whole(client, ASK, tool_choice={"type": "none"}, **fields)
    assert [block.type for block in none.content] == ["text"]


FORM = {"type": "json_schema", "schema": SCHEMA}


def test_answers_follow_a_schema(client):
    [text] = whole(client, "Make an ab", output_config={"format": FORM}).content
    assert text.text == '{"a": 12, "b": "x"}'


def test_the_former_name_of_a_schema_is_known(client):
    asked = fields_of("Make an ab")
    asked["extra_body"] |= {"output_format": FORM}
    [text] = client.messages.create(**asked).content
    assert text.text == '{"a": 12, "b": "x"}'


def test_what_ends_an_answer(client):
    stopped = whole(client, "And Spain?", stop_sequences=["rid"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "rid")
    assert stopped.content[0].text == "Mad"
    assert whole(client, "And Spain?", max_tokens=1).stop_reason == "max_tokens"
    cut = whole(client, ASK, tools=[WEATHER], stop_sequences=["ome"])
    assert (cut.content[-1].type, cut.stop_reason) == ("tool_use", "stop_sequence")


def test_documents_of_text_and_tools_that_were_found_are_text(client):
    """Claude Code's search for tools has references as its result, which stay in the history."""
    source = {"type": "text", "media_type": "text/plain", "data": "21 degrees"}
    document = {"type": "document", "title": "Rome", "source": source}
    passage = {"type": "search_result", "title": "Rome", "source": "https://rome.example"}
    passage |= {"content": [{"type": "text", "text": "21 degrees"}], "citations": {}}
    reference = {"type": "tool_reference", "tool_name": "weather"}
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [reference, found]}
        for found in (document, passage)
    ]
    for result in ([results[0]], [results[1]], [document], [passage]):
        said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": [call]}]
        message = whole(client, [*said, {"role": "user", "content": result}])
        assert message.content[0].text == "It is 21 degrees in Rome."


def test_tools_may_be_many(client):
    tools = [{**WEATHER, "name": f"t{i}", "input_schema": {"type": "object"}} for i in range(200)]
    counted = client.messages.count_tokens(
        model="parrot", messages=[{"role": "user", "content": "Hello"}], tools=tools
    )
    assert counted.input_tokens > 200


def test_a_stream_ends_with_the_input_it_began_with(client):
    """Clients keep the counts of the stream's beginning; here most of it is in the prefix cache."""
    asked = fields_of(FRANCE, system="Be brief. " * 20)
    whole(client, FRANCE, system="Be brief. " * 20)
    events = [*client.messages.create(stream=True, **asked)]
    [begun] = [event.message.usage for event in events if event.type == "message_start"]
    [ended] = [event.usage for event in events if event.type == "message_delta"]
    assert begun.cache_read_input_tokens == ended.cache_read_input_tokens >= 16
    assert begun.input_tokens == ended.input_tokens


def test_tokens_are_counted(client):
    asked = {"model": "parrot", "messages": [{"role": "user", "content": FRANCE}]}
    count = client.messages.count_tokens(**asked).input_tokens
    usage = whole(client, FRANCE).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    unthinking = client.messages.count_tokens(**asked, thinking={"type": "disabled"})
    assert unthinking.input_tokens > count
    long = [{"role": "user", "content": "ab " * 40_000}]
    assert client.messages.count_tokens(**{**asked, "messages": long}).input_tokens > 65536


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"nope": 1}}, "nope"),
        ({"extra_body": {"container": "x"}}, "container"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}},
            "context_management.edits[0].type",
        ),
        ({"extra_body": {"max_tokens": 10**6}}, "max_tokens"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {"tools": [WEATHER], "extra_body": {"tool_choice": {"type": "any", "name": "x"}}},
            "tool_choice.name",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "output_config.format",
        ),
        (
            {"extra_body": {"output_format": FORM, "output_config": {"format": FORM}}},
            "output_format",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [RESULT]}]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [PDF]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [CITED]}]},
            "messages[0].content[0].citations",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, fields, param):
    with pytest.raises(anthropic.BadRequestError) as refused:
        whole(client, "Hello", **fields)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.body["error"]["param"] == param


def test_a_context_too_short_is_told_in_words_that_claude_code_finds(client):
    """By these it asks for fewer tokens, or shortens the conversation."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        whole(client, "Hello", extra_body={"max_tokens": 10**6})
    found = r"input length and `max_tokens` exceed context limit: (\d+) \+ 1000000 > 20000"
    tokens = re.match(found, refused.value.body["error"]["message"])[1]
    count = client.messages.count_tokens(
        model="parrot", messages=[{"role": "user", "content": "Hello"}]
    )
    assert int(tokens) == count.input_tokens
    with pytest.raises(anthropic.BadRequestError) as refused:
        whole(client, "ab " * 40_000)
    found = r"prompt is too long: (at least )?\d+ tokens > 20000 maximum"
    assert re.match(found, refused.value.body["error"]["message"])


def test_the_key_comes_in_anthropics_header(server):
    with anthropic.Anthropic(base_url=server.base, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            whole(client, "Hello")
        assert refused.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            client.with_options(api_key=KEY).messages.create(**fields_of("Hello") | {"model": "x"})


def test_the_clients_know_the_id_of_a_request(client):
    """They read it from a header that is not OpenAI's."""
    mine = {"X-Request-Id": "mine-1"}
    answer = client.messages.create(**fields_of("Hello"), extra_headers=mine)
    assert answer._request_id == "mine-1"
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**fields_of("Hello") | {"model": "x"}, extra_headers=mine)
    assert refused.value.request_id == "mine-1"
