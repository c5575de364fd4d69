"""Tool calls in the forms of two templates over the three APIs, whole, streamed and enforced: those
of Qwen3-Next (Hermes' JSON), by a tiny hybrid model, and of Gemma 4, which thinks first."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import PreTrainedModel

from tests.model.checkpoints import config_of, random_model
from tests.server.parrot import HIDDEN, Learnt, write_parrot
from tests.server.serving import serving
from tests.server.test_harmony import events, post, send
from tests.server.test_hybrid import (
    ADD_NOTED,
    ARGUMENTS,
    MARK,
    OFF,
    check_result_is_read,
    check_streamed,
    joined,
)

QWEN3_NEXT = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, ' }}
{{- '"arguments": <args-json-object>}\\n' }}
{{- '</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string }}
{{- call.function.arguments | tojson if call.function.arguments is mapping }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}""" + (MARK + "{%- endif %}")
GEMMA4 = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- '<|tool>declaration:' + tool.function.name + '{description:<|"|>' }}
{{- (tool.function.description or '') + '<|"|>}<tool|>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|tool_response>response:add{value:<|"|>' + m.content }}
{{- '<|"|>}<tool_response|>' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- for call in m.tool_calls or [] %}{{- '<|tool_call>call:' + call.function.name + '{' }}
{%- for name, value in call.function.arguments | items %}
{{- ',' if not loop.first }}{{- name + ':' }}
{{- '<|"|>' + value + '<|"|>' if value is string else value | tojson }}{%- endfor %}
{{- '}<tool_call|>' }}{%- endfor %}{{- (m.content or '') + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<|channel>thought\\n<channel|>' }}{%- endif %}""" + (MARK + "{%- endif %}")


class Form(NamedTuple):
    """A model's template and its answers, as the texts of their tokens."""

    family: str
    template: str
    call: tuple[str, ...]
    answer: tuple[str, ...]
    thought: str | None


FORMS = {
    "qwen3-next": Form(
        "qwen3-next",
        QWEN3_NEXT,
        (
            *("I ask.\n", "<tool_call>\n", '{"name": "add",', ' "arguments": {"a": 1', "2, "),
            *('"note": "two', '\\nlines"', "}}", "\n</tool_call>"),
        ),
        ("It is", " 3."),
        None,
    ),
    "gemma4": Form(
        "gemma4-moe",
        GEMMA4,
        (
            *("<|channel>", "thought\n", "A tool", " helps.", "<channel|>", "I ask.\n"),
            *("<|tool_call>", "call:add{", "a:1", "2,note:", '<|"|>', "two", "\nlines"),
            *('<|"|>}', "<tool_call|>"),
        ),
        ("<|channel>thought\nHm", ".<channel|>", "It is", " 3."),
        "A tool helps.",
    ),
}


class Served(NamedTuple):
    base: str
    form: Form


@pytest.fixture(scope="module", params=FORMS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    form = FORMS[request.param]

    def tiny(vocabulary: int, end: int) -> PreTrainedModel:
        sizes = {"vocab_size": vocabulary, "hidden_size": HIDDEN, "eos_token_id": end}
        return random_model(config_of(form.family, sizes={**sizes, "tie_word_embeddings": False}))

    path: Path = tmp_path_factory.mktemp("forms") / request.param
    learnt = [Learnt("Sum", form.answer), Learnt("Call", form.call)]
    marks = {"after": MARK, "mark": lambda i: "\n" + (i + 2) * " "}
    write_parrot(path, learnt, form.template, made=tiny, **marks)
    with serving(str(path), "--served-model-name", "m", "--kv-tokens", "8000") as server:
        yield Served(server.base, form)


def test_calls_in_chat(served: Served) -> None:
    """Whole, streamed, with the result of the tool in the next request, and enforced."""
    base, form = served
    chat, tools = "/v1/chat/completions", [{"type": "function", "function": ADD_NOTED}]
    [choice] = post(base, chat, "Call", tools=tools)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"]) == (form.thought, "I ask.")
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    chunks = events(base, chat, "Call", tools=tools)
    assert joined(chunks, "content") == "I ask."
    check_streamed(chunks)
    check_result_is_read(base, message, tools)
    asked = {"tools": tools, "tool_choice": "required", "max_tokens": 48, **OFF}  # it never ends
    [choice] = post(base, chat, "Call", **asked)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"


def test_calls_in_responses(served: Served) -> None:
    base, form = served
    asked = {"input": "Call", "tools": [{"type": "function", **ADD_NOTED}], "stream": True}
    lines = send(base, "/v1/responses", asked).splitlines()
    said = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    whole = json.loads(send(base, "/v1/responses", {**asked, "stream": False}))
    for response in (whole, said[-1]["response"]):
        items = {item["type"]: item for item in response["output"]}
        assert json.loads(items["function_call"]["arguments"]) == ARGUMENTS
        assert items["message"]["content"][0]["text"] == "I ask."
        assert ("reasoning" in items) == (form.thought is not None)


def test_calls_in_messages(served: Served) -> None:
    base, form = served
    tool = {"name": "add", "input_schema": ADD_NOTED["parameters"]}
    body = post(base, "/v1/messages", "Call", max_tokens=50, tools=[tool])
    blocks = {block["type"]: block for block in body["content"]}
    assert blocks["tool_use"]["input"] == ARGUMENTS
    assert blocks.get("thinking", {}).get("thinking") == form.thought
    said = events(base, "/v1/messages", "Call", max_tokens=50, tools=[tool])
    deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == ARGUMENTS
