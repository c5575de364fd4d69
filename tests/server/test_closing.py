"""`--disable-additional-properties`, and vLLM's field of this name, over each API.

The schema leaves one text if it is closed. A bias for commas has an open object go on.
"""

import json
import subprocess
import sys

import anthropic
import openai
import pytest

from twolane import LLM, SamplingParams

from ..hardening.checkpoint import SPECIAL, write_text_model
from .serving import serving

INNER = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
SCHEMA = {"type": "object", "properties": {"p": INNER}, "required": ["p"]}
VALUE = {"p": {"a": 1}}
FLAG = "--disable-additional-properties"
TURN = [{"role": "user", "content": "Go"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("closing") / "m")


@pytest.fixture(scope="module")
def comma(model):
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return {str(vocabulary[","]): 100, **{str(i): -100 for i in range(len(SPECIAL) - 1)}}


@pytest.fixture(scope="module")
def served(model):
    arguments = ("--served-model-name", "m", "--kv-tokens", "4096", FLAG)
    with serving(str(model), *arguments) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def json_schema(**more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}, **more}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema()},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
def test_schemas_of_completions_and_chat_are_closed(client, comma, fields):
    given = {"model": "m", "max_tokens": 80, "temperature": 0, "logit_bias": comma}
    said = client.completions.create(prompt="Go", extra_body=fields, **given).choices[0]
    assert (json.loads(said.text), said.finish_reason) == (VALUE, "stop")
    said = client.chat.completions.create(messages=TURN, extra_body=fields, **given).choices[0]
    assert (json.loads(said.message.content), said.finish_reason) == (VALUE, "stop")


def test_a_request_has_the_last_word(client, comma):
    given = {"model": "m", "prompt": "Go", "max_tokens": 80, "logit_bias": comma, "temperature": 0}
    for closes, finish in ((False, "length"), (None, "stop"), (True, "stop")):
        form = {"json": SCHEMA, "disable_additional_properties": closes}
        said = client.completions.create(extra_body={"structured_outputs": form}, **given)
        assert said.choices[0].finish_reason == finish
    form = {"regex": "a", "disable_additional_properties": False}
    said = client.completions.create(extra_body={"structured_outputs": form}, **given)
    assert said.choices[0].text == "a"
    form["disable_additional_properties"] = True
    with pytest.raises(openai.BadRequestError, match="disable_additional_properties is for json"):
        client.completions.create(extra_body={"structured_outputs": form}, **given)


def test_tools_and_responses_are_closed(client, comma):
    function = {"name": "f", "parameters": SCHEMA}
    said = client.chat.completions.create(
        model="m",
        messages=TURN,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
        temperature=0,
        logit_bias=comma,
    )
    [call] = said.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == VALUE
    more = {"max_output_tokens": 120, "extra_body": {"logit_bias": comma}, "temperature": 0}
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    said = client.responses.create(model="m", input="Go", text=form, **more)
    assert json.loads(said.output_text) == VALUE
    tools = [{"type": "function", "strict": True, **function}]
    said = client.responses.create(
        model="m", input="Go", tools=tools, tool_choice="required", **more
    )
    assert json.loads(said.output[0].arguments) == VALUE


def test_messages_are_closed(served):
    with anthropic.Anthropic(base_url=served.base, api_key="none", max_retries=0) as client:
        given = {"model": "m", "messages": TURN, "max_tokens": 120}
        said = client.messages.create(
            tools=[{"name": "f", "input_schema": SCHEMA}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            extra_body={"temperature": 0},
            **given,
        )
        assert [block.input for block in said.content] == [VALUE]
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        said = client.messages.create(extra_body={"output_config": form, "temperature": 0}, **given)
        assert json.loads(said.content[0].text) == VALUE


def test_batches_are_closed(model, comma, tmp_path):
    body = {"model": "m", "messages": TURN, "max_tokens": 80, "logit_bias": comma}
    body |= {"response_format": json_schema(), "temperature": 0}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(json.dumps(line) + "\n")
    options = ("--served-model-name", "m", "--device", "cpu", "--kv-tokens", "4096", FLAG)
    command = [sys.executable, "-m", "twolane", "run-batch", model, source, target, *options]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    answer = json.loads(target.read_text())["response"]["body"]
    assert json.loads(answer["choices"][0]["message"]["content"]) == VALUE


def test_programs_have_structured_outputs(model, comma):
    bias = {int(token): value for token, value in comma.items()}
    given = {"temperature": 0, "max_tokens": 80, "logit_bias": bias}
    form = {"json": SCHEMA, "disable_additional_properties": True}
    with LLM(str(model), device="cpu", kv_tokens=4096) as llm:
        [said] = llm.generate("Go", SamplingParams(**given), structured_outputs=form)
        assert (json.loads(said.text), said.finish_reason) == (VALUE, "stop")
        [said] = llm.chat(TURN, SamplingParams(**given, structured_outputs=form))
        assert json.loads(said.text) == VALUE
        pieces = llm.stream("Go", SamplingParams(**given), structured_outputs=form)
        assert json.loads("".join(piece.text for piece in pieces)) == VALUE
        [said] = llm.generate("Go", SamplingParams(**given, structured_outputs={"json": SCHEMA}))
        assert said.finish_reason == "length"
        for wrong, why in (
            ({"json": 1}, r"structured_outputs\.json: must be"),
            ({"regex": "a", "choice": ["a"]}, "structured_outputs: must have exactly one"),
            ({"regex": "("}, "structured_outputs cannot be served"),
        ):
            with pytest.raises(ValueError, match=why):
                llm.generate("Go", SamplingParams(**given), structured_outputs=wrong)
        with pytest.raises(ValueError, match="structured_outputs cannot be combined with grammar"):
            llm.generate("Go", SamplingParams(grammar="start: /a/", structured_outputs=form))
