"""gpt-oss' channels over all three APIs, whole and streamed, by a model that knows answers by
heart."""

import json
import urllib.request

import pytest

from tests.frontend.test_harmony import TEMPLATE
from tests.server.parrot import PROMPT, Learnt, write_parrot
from tests.server.serving import serving

ANSWER = (
    "<|channel|>analysis<|message|>We",
    " add.<|end|><|start|>",
    "assistant<|channel|>final<|message|>It",
    " is 3.",
)
CALL = (
    "<|channel|>analysis<|message|>A tool",
    ".<|end|><|start|>assistant<|channel|>commentary to=functions.add ",
    '<|constrain|>json<|message|>{"a": ',
    "1}",
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    learnt = [Learnt("Sum", ANSWER), Learnt("Call", CALL)]
    whole = TEMPLATE + "{%- if add_generation_prompt %}" + PROMPT + "{%- endif %}"
    path = write_parrot(tmp_path_factory.mktemp("harmony") / "model", learnt, whole)
    with serving(str(path), "--served-model-name", "m", "--kv-tokens", "20000") as server:
        yield server.base


def send(base: str, path: str, asked: dict) -> str:
    """The body of an answer."""
    headers = {"Content-Type": "application/json"}
    body = {"model": "m", "temperature": 0, **asked}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def post(base: str, path: str, said: str, **fields) -> dict:
    return json.loads(send(base, path, {"messages": [{"role": "user", "content": said}], **fields}))


def events(base: str, path: str, said: str, **fields) -> list[dict]:
    asked = {"messages": [{"role": "user", "content": said}], "stream": True, **fields}
    lines = [line[6:] for line in send(base, path, asked).splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chat(base) -> None:
    body = post(base, "/v1/chat/completions", "Sum")
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("We add.", "It is 3.")
    chunks = events(base, "/v1/chat/completions", "Sum")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = {name: "".join(d.get(name) or "" for d in deltas) for name in message}
    assert (parts["reasoning_content"], parts["content"]) == ("We add.", "It is 3.")


def test_a_call_in_chat(base) -> None:
    tools = [{"type": "function", "function": ADD}]
    body = post(base, "/v1/chat/completions", "Call", tools=tools)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "A tool."
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    turns = [{"role": "user", "content": "Call"}, choice["message"]]
    turns.append({"role": "tool", "tool_call_id": call["id"], "content": "Sum"})
    body = post(base, "/v1/chat/completions", "", tools=tools, messages=turns)
    assert body["choices"][0]["message"]["content"] == "It is 3."


def test_effort_is_that_of_the_template(base) -> None:
    """A token is a character."""
    counts = [
        post(base, "/v1/chat/completions", "Sum", reasoning_effort=effort)["usage"]
        for effort in ("low", "medium")
    ]
    assert counts[1]["prompt_tokens"] - counts[0]["prompt_tokens"] == len("medium") - len("low")


def test_responses(base) -> None:
    for said, tools in (("Sum", []), ("Call", [{"type": "function", **ADD}])):
        fields = {"input": said, "tools": tools, "reasoning": {"effort": "high"}}
        body = json.loads(send(base, "/v1/responses", fields))
        items = {item["type"]: item for item in body["output"]}
        thought = items["reasoning"]["content"][0]["text"]
        if tools:
            assert (thought, items["function_call"]["arguments"]) == ("A tool.", '{"a": 1}')
        else:
            assert (thought, items["message"]["content"][0]["text"]) == ("We add.", "It is 3.")


def test_messages(base) -> None:
    tool = {"name": "add", "input_schema": PARAMETERS}
    body = post(base, "/v1/messages", "Call", max_tokens=50, tools=[tool])
    blocks = {block["type"]: block for block in body["content"]}
    assert blocks["thinking"]["thinking"] == "A tool."
    assert blocks["tool_use"]["input"] == {"a": 1}
    said = events(base, "/v1/messages", "Sum", max_tokens=50)
    deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
    texts = {name: "".join(d.get(name, "") for d in deltas) for name in ("thinking", "text")}
    assert texts == {"thinking": "We add.", "text": "It is 3."}
