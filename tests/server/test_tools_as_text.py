"""Tools on models whose chat template shows none, over each API, and on README's own model."""

import json
from concurrent.futures import ThreadPoolExecutor

import anthropic
import jsonschema
import openai
import pytest

from .parrot import Learnt, write_parrot
from .serving import serving
from .test_agents import ASK, CALL, TOWNS, WEATHER, chat, streamed

PLAIN = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LEARNT = [
    Learnt("21 degrees", "It is 21 degrees in Rome."),
    Learnt(ASK, CALL),
    Learnt("Two towns", TOWNS),
]
NAMES = ("paint", "mix")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"enum": [1, 2]}},
    "required": ["colour", "coats"],
    "additionalProperties": False,
}
KEYS = {"api_key": "none", "max_retries": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose template comes from a file: the one beside the weights knows no answer."""
    made = write_parrot(tmp_path_factory.mktemp("plain") / "model", LEARNT, PLAIN)
    beside = made / "tokenizer_config.json"
    config = json.loads(beside.read_text())
    (made / "own.txt").write_text(config["chat_template"])
    beside.write_text(json.dumps({**config, "chat_template": "{{ messages[0].content }}"}))
    arguments = ("--served-model-name", "parrot", "--chat-template", str(made / "own.txt"))
    with serving(str(made), *arguments, "--kv-tokens", "20000") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.base}/v1", **KEYS) as client:
        yield client


def test_a_turn_whose_call_and_result_are_text(client):
    answer = chat(client, ASK, tools=[WEATHER]).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    history = [
        {"role": "user", "content": ASK},
        answer.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    for fields in ({"tools": [WEATHER]}, {}):  # clients leave the tools out of the last turn
        last = chat(client, history, **fields).choices[0]
        assert last.message.content == "It is 21 degrees in Rome."
    content, _, calls, finish = streamed(client, "Two towns", tools=[WEATHER])
    towns = [json.loads(call["arguments"])["city"] for call in calls]
    assert (content, towns, finish) == ("", ["Oslo", "Bern"], "tool_calls")


def chat_calls(base, stream, *, named):
    tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES]
    named = {"type": "function", "function": {"name": NAMES[1]}} if named else "required"
    fields = {"tools": tools, "tool_choice": named, "parallel_tool_calls": False}
    with openai.OpenAI(base_url=f"{base}/v1", **KEYS) as client:
        if stream:
            calls = streamed(client, "Go", **fields)[2]
            return [(call["name"], call["arguments"]) for call in calls]
        calls = chat(client, "Go", **fields).choices[0].message.tool_calls
        return [(call.function.name, call.function.arguments) for call in calls]


def response_calls(base, stream, *, named):
    tools = [{"type": "function", "name": n, "parameters": SCHEMA, "strict": True} for n in NAMES]
    named = {"type": "function", "name": NAMES[1]} if named else "required"
    fields = {"tools": tools, "tool_choice": named, "parallel_tool_calls": False, "input": "Go"}
    with openai.OpenAI(base_url=f"{base}/v1", **KEYS) as client:
        made = client.responses.create(model="parrot", temperature=0, stream=stream, **fields)
        if stream:
            [made] = [event.response for event in made if event.type == "response.completed"]
    return [(i.name, i.arguments) for i in made.output if i.type == "function_call"]


def message_calls(base, stream, *, named):
    tools = [{"name": n, "input_schema": SCHEMA} for n in NAMES]
    named = {"type": "tool", "name": NAMES[1]} if named else {"type": "any"}
    choice = {**named, "disable_parallel_tool_use": True}
    said = [{"role": "user", "content": "Go"}]
    fields = {"model": "parrot", "max_tokens": 200, "messages": said}
    fields |= {"tools": tools, "tool_choice": choice}
    with anthropic.Anthropic(base_url=base, **KEYS) as client:
        if not stream:
            made = client.messages.create(**fields)
        else:
            with client.messages.stream(**fields) as events:
                made = events.get_final_message()
    return [(b.name, json.dumps(b.input)) for b in made.content if b.type == "tool_use"]


@pytest.mark.parametrize("calls_of", [chat_calls, response_calls, message_calls])
def test_enforced_calls_fit_the_schema(server, calls_of):
    for stream in (False, True):
        for named in (False, True):
            [(name, arguments)] = calls_of(server.base, stream, named=named)
            assert name in NAMES[named:]
            jsonschema.validate(json.loads(arguments), SCHEMA)


def tool(name, **kinds):
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": [*kinds]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOWN = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi", "Quito", "Bern", "Riga")
PROMPTS = (
    ("What is the weather in {}?", tool("get_weather", city="string")),
    ("What time is it in {} now?", tool("get_time", city="string")),
    ("Find a hotel in {} for 3 people.", tool("find_hotel", city="string", people="integer")),
    ("Write to Bob that I am in {}.", tool("send_email", to="string", text="string")),
    ("Book a flight to {} on Monday.", tool("book_flight", town="string", day="string")),
)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_fifty_prompts_of_readmes_own_model(real, capsys):
    """A model of 135M that never saw a tool rarely calls one of its own accord."""
    cases = [(asked.format(town), tool) for asked, tool in PROMPTS for town in TOWN]

    def answer(case, choice):
        asked, tool = case
        said = [{"role": "user", "content": asked}]
        body = {"messages": said, "tools": [tool], "tool_choice": choice, "temperature": 0}
        body |= {"max_tokens": 400, "parallel_tool_calls": False}
        status, _, made = real.request("/v1/chat/completions", body, seconds=2000)
        assert status == 200, made
        return made["choices"][0]

    for choice in ("required", "auto"):
        with ThreadPoolExecutor(len(cases)) as pool:
            answers = list(pool.map(answer, cases, [choice] * len(cases)))
        called = [
            each
            for each in zip(cases, answers, strict=True)
            if each[1]["message"].get("tool_calls")
        ]
        for (_, tool), each in called:
            [call] = each["message"]["tool_calls"]
            if each["finish_reason"] == "tool_calls":
                schema = tool["function"]["parameters"]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        ended = sum(each["finish_reason"] == "tool_calls" for each in answers)
        with capsys.disabled():
            print(f"\n{choice}: {len(called)} of {len(cases)} call a tool, {ended} to the end")
        assert choice == "auto" or len(called) == len(cases)
