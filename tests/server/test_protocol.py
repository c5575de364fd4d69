import json
from collections.abc import Iterable

import pytest
from pydantic import ValidationError

from twolane.common.errors import FieldError
from twolane.frontend.generate_request import text_of
from twolane.frontend.messages import turns_of
from twolane.frontend.prepare import effort_variables
from twolane.frontend.structured.jobs import ContextFree
from twolane.sampling import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS, SamplingParams
from twolane.server.anthropic.request import CountTokensRequest, MessagesRequest
from twolane.server.http import strict_json
from twolane.server.http.errors import ApiError, from_validation
from twolane.server.openai import protocol
from twolane.server.openai.embeddings import EmbeddingRequest
from twolane.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from twolane.server.responses.items import PREFIX, read_item
from twolane.server.responses.request import InputTokensRequest, ResponsesRequest

MESSAGES = [{"role": "user", "content": "Hi"}]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def refusal(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return from_validation(caught.value.errors())


@pytest.mark.parametrize("value", [5, [], ["x"]])
@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("structured_outputs.json", lambda value: {"structured_outputs": {"json": value}}),
        (
            "response_format.json_schema.schema",
            lambda value: {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": value},
                }
            },
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            lambda value: {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": value}}],
                    }
                ]
            },
        ),
    ],
)
def test_a_field_of_several_types_is_named_as_clients_write_it(param, body, value):
    error = refusal(ChatRequest, {"messages": MESSAGES, **body(value)})
    assert error.param == param
    assert error.message.startswith(f"{param}: must be a JSON object")


def test_a_system_that_is_no_text_is_told_as_such():
    error = refusal(MessagesRequest, {"messages": MESSAGES, "max_tokens": 5, "system": 5})
    assert (error.param, error.message.partition(":")[0]) == ("system", "system")


def unsupported(kind):
    return [(name, neutral) for name, neutral in kind.unsupported.items()]


@pytest.mark.parametrize(
    ("kind", "least"), [(CompletionRequest, {"prompt": "x"}), (ChatRequest, {"messages": MESSAGES})]
)
class TestUnsupportedFields:
    def test_neutral_values_are_accepted(self, kind, least):
        for name, neutral in unsupported(kind):
            for value in (None, *neutral):
                kind.model_validate({**least, name: value})

    def test_other_values_are_refused_by_name(self, kind, least):
        for name, _ in unsupported(kind):
            error = refusal(kind, {**least, name: {"other": "value"}})
            assert (error.status_code, error.param) == (400, name)
            assert error.code == "unsupported_parameter"

    def test_true_is_not_one(self, kind, least):
        assert refusal(kind, {**least, "n": True}).param == "n"
        assert refusal(kind, {**least, "use_beam_search": 0}).param == "use_beam_search"

    def test_unknown_fields_are_refused_by_name(self, kind, least):
        error = refusal(kind, {**least, "temprature": 1})
        assert (error.param, error.code) == ("temprature", "unknown_parameter")

    def test_bookkeeping_fields_are_accepted(self, kind, least):
        kind.model_validate(
            {**least, **{name: {"any": ["thing"]} for name in protocol.WITHOUT_EFFECT}}
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 2**31),
        ("top_k", 2**70),
        ("stream", "yes"),
        ("stop_token_ids", [-1]),
        ("priority", 2**40),
        ("repetition_penalty", 1e-46),  # 0 in float32
        ("repetition_penalty", 0.0099),
    ],
)
def test_wrong_types_name_the_field(field, value):
    error = refusal(CompletionRequest, {"prompt": "x", field: value})
    assert error.param.split("[")[0] == field
    assert field in error.message


FORMS = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": MESSAGES, "logprobs": True},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"messages": MESSAGES, "max_tokens": 5},
    EmbeddingRequest: {"input": "x"},
}


@pytest.mark.parametrize("kind", FORMS)
def test_whole_numbers_may_be_written_with_a_fraction_of_zero(kind):
    """As JSON Schema has it: clients whose language has one type of numbers write 8.0."""
    fields = kind.model_json_schema()["properties"]
    whole = {name for name, field in fields.items() if "integer" in json.dumps(field)}
    lists = {"prompt", "input", "stop_token_ids", "allowed_token_ids", "prompt_token_ids"}
    single = whole - lists
    assert single
    for name in single:
        value = getattr(kind.model_validate({**FORMS[kind], name: 1.0}), name)
        assert isinstance(value, int) or value is None, name
        assert refusal(kind, {**FORMS[kind], name: 1.5}).param == name


@pytest.mark.parametrize("value", [-(2**40), -1, 0, 1, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("field", ["priority", "truncate_prompt_tokens", "dimensions"])
def test_texts_to_embed_are_refused_by_the_field_of_their_own_body(field, value):
    """They are sent on as a completion, whose refusals are no answers of this endpoint."""
    try:
        body = EmbeddingRequest.model_validate({"input": "x", field: value})
    except ValidationError as error:
        assert from_validation(error.errors()).param == field
    else:
        body.request()


@pytest.mark.parametrize("prompt", [None, 3, {"a": 1}, [1, "a"], [[1], "a"], [[1.5]], [True]])
def test_a_wrong_prompt_is_one_clear_error(prompt):
    error = refusal(CompletionRequest, {"prompt": prompt})
    assert error.param == "prompt"
    assert "list of token ids" in error.message


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([0], [[0]]),
    ],
)
def test_prompt_forms(prompt, prompts):
    assert CompletionRequest.model_validate({"prompt": prompt}).request().prompts == prompts


def test_messages_as_templates_know_them():
    body = ChatRequest.model_validate(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
                {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
            ]
        }
    )
    assert turns_of(body.messages) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": ["a", "b"]},
        {"role": "assistant", "content": "c"},
    ]
    assert [text_of(turn) for turn in turns_of(body.messages)] == ["Be brief.", "a\nb", "c"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            "content[0].image_url",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, "content[0].y"),
        ({"role": "user", "content": ["x"]}, "content[0]"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "function", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "reasoning"),
        ({"role": "assistant", "content": "x", "tool_call_id": "1"}, "tool_call_id"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]},
            "tool_calls[0].function.name",
        ),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "audio"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_unserved_messages_are_refused(message, param):
    assert refusal(ChatRequest, {"messages": [message]}).param == f"messages[0].{param}"


@pytest.mark.parametrize("name", ["image_url", "image", "source", "file", "input_audio"])
def test_parts_that_are_no_text_are_refused_with_the_reason(name):
    """Clients have several forms of images."""
    part = {"type": name, name: {"data": "x"}}
    with pytest.raises(ValidationError, match="prompts are text"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": [part]}]})


def test_a_tool_may_return_nothing():
    """Agents send what a function returns, and that is often null."""
    nothing = {"role": "tool", "tool_call_id": "1", "content": None}
    (turn,) = turns_of(ChatRequest.model_validate({"messages": [nothing]}).messages)
    assert turn == nothing


def test_what_an_answer_contains_may_be_sent_back():
    """With the fields that clients keep of it, and those that they set to null."""
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}
        ],
        "reasoning_content": "Hm.",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "parsed": {"a": 1},
    }
    said = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, said]
    result = {"role": "tool", "tool_call_id": "1", "name": "f", "content": parts}
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    called, told, no = turns_of(
        ChatRequest.model_validate({"messages": [answer, result, refused]}).messages
    )
    assert called == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
        "reasoning_content": "Hm.",
    }
    assert told == {"role": "tool", "tool_call_id": "1", "name": "f", "content": ["a", "b"]}
    assert no == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize("given", ['{"a": 1}', "", None, "[1]", "{", {"a": 1}])
def test_arguments_of_calls(given):
    call = {**CALL, "function": {"name": "f", "arguments": given}}
    body = ChatRequest.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    [turn] = turns_of(body.messages)
    arguments = turn["tool_calls"][0]["function"]["arguments"]
    assert arguments == (given or {})  # a template may want the text as it was written


def test_sampling_defaults_are_openais():
    completion = CompletionRequest.model_validate({"prompt": "x"})
    chat = ChatRequest.model_validate({"messages": MESSAGES})
    assert completion.request().sampling == SamplingParams(max_tokens=16)
    assert chat.request().sampling == SamplingParams(max_tokens=None)


def test_sampling_defaults_may_be_the_models():
    """What a request says comes first, also where it says what OpenAI's defaults are."""
    models = {"temperature": 0.6, "top_k": 20}
    body = CompletionRequest.model_validate({"prompt": "x", "top_k": 0})
    expected = SamplingParams(temperature=0.6, top_k=0, max_tokens=16)
    assert body.request(models).sampling == expected
    body = CompletionRequest.model_validate({"prompt": "x", "temperature": 1, "top_p": 0.5})
    assert body.request(models).sampling == SamplingParams(top_k=20, top_p=0.5, max_tokens=16)


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_refusal_of_a_seed_names_the_last_one_that_is_taken(seed):
    body = CompletionRequest.model_validate({"prompt": "x", "seed": seed})
    assert body.request().sampling.seed == seed
    beyond = refusal(CompletionRequest, {"prompt": "x", "seed": seed + (1 if seed > 0 else -1)})
    assert beyond.param == "seed"
    assert f"equal to {seed}" in str(beyond)


def test_every_sampling_field_arrives():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": 5,
        "min_tokens": 2,
        "stop_token_ids": [4],
        "ignore_eos": True,
    }
    params = CompletionRequest.model_validate({"prompt": "x", **given}).request().sampling
    assert params == SamplingParams(**{**given, "stop_token_ids": (4,)})


def test_the_limit_is_named_as_the_client_did():
    body = ChatRequest.model_validate({"messages": MESSAGES, "max_completion_tokens": 0})
    with pytest.raises(ValueError, match=r"^max_completion_tokens must be at least 1"):
        body.request()
    error = refusal(
        ChatRequest, {"messages": MESSAGES, "max_completion_tokens": 1, "max_tokens": 2}
    )
    assert error.param == "max_completion_tokens"


def test_stream_options_need_a_stream():
    body = {"prompt": "x", "stream_options": {"include_usage": True}}
    assert refusal(CompletionRequest, body).param == "stream_options"
    assert CompletionRequest.model_validate({**body, "stream": True}).stream_options.include_usage


def lists_in(schema):
    """Yield the lists anywhere in a core schema of pydantic's."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        schema = schema.values()
    if not isinstance(schema, str) and isinstance(schema, Iterable):
        for part in schema:
            yield from lists_in(part)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest])
def test_lists_fail_at_their_first_error(kind):
    """A body with a million errors takes no time and no memory for those that nobody is told."""
    lists = list(lists_in(kind.__pydantic_core_schema__))
    assert lists
    assert all(found.get("fail_fast") for found in lists)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatRequest, {"messages": [{}] * 1000}, "messages[0].role"),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [-1] * 1000}, "stop_token_ids[0]"),
        (DetokenizeRequest, {"tokens": [1, *["a"] * 1000]}, "tokens[1]"),
        (CompletionRequest, {"prompt": "x", **{f"x{i}": 1 for i in range(1000)}}, "x0"),
        (ChatRequest, {"messages": [{f"x{i}": 1 for i in range(1000)}]}, "messages[0].x0"),
    ],
)
def test_of_many_errors_the_first_is_found(kind, body, param):
    """As many as one item has fields are collected, not as many as there are items or keys."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 2
    assert from_validation(caught.value.errors()).param == param


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS))),
        ("stop_token_ids", [7] * MAX_STOP_TOKEN_IDS),
        ("logit_bias", {str(token): 1 for token in range(MAX_BIASED_TOKENS)}),
    ],
)
def test_lists_that_are_walked_for_each_token_have_a_bound(field, most):
    request = CompletionRequest.model_validate({"prompt": "x", field: most}).request()
    assert len(getattr(request.sampling, field)) == len(most)
    more = {**most, "9999": 1} if isinstance(most, dict) else [*most, 7]
    error = refusal(CompletionRequest, {"prompt": "x", field: more})
    assert error.param == field
    with pytest.raises(FieldError, match=f"^{field} "):
        params = {int(k): v for k, v in more.items()} if isinstance(more, dict) else tuple(more)
        SamplingParams(**{field: params})


@pytest.mark.parametrize("block", ["x", {}, {"type": []}, {"type": "image", "source": 1}])
@pytest.mark.parametrize("result", [True, False], ids=["in a result", "in the content"])
def test_blocks_of_another_type_are_refused_by_it(block, result):
    """In the words of the list that they stand in, and not by the fields that they have."""
    within = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    turn = {"role": "user", "content": [within if result else block]}
    error = refusal(MessagesRequest, {"messages": [turn], "max_tokens": 5})
    place = "messages[0].content[0]" + ".content[0]" * result
    assert error.message.startswith(f"{place}.type must be one of text, document, ")
    assert error.param == f"{place}.type"


def test_a_format_may_come_by_the_names_of_several_versions_of_a_server():
    grammar = 'root ::= "a"'
    body = {"prompt": "x", "guided_grammar": grammar, "structured_outputs": {"grammar": grammar}}
    assert CompletionRequest.model_validate(body).constraint == (
        "structured_outputs",
        ContextFree(grammar),
    )


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (ChatRequest, {"messages": [5]}, "messages[0]", "messages[0] must be a JSON object"),
        (
            ChatRequest,
            {"messages": [*MESSAGES, {**MESSAGES[0], "function_call": {}}]},
            *("messages[1].function_call", "messages[1].function_call is not supported"),
        ),
        (
            ChatRequest,
            {"messages": [{**MESSAGES[0], "nope": 1}]},
            *("messages[0].nope", "unknown field 'messages[0].nope'"),
        ),
        (CompletionRequest, {"prompt": "x", "": 1}, "", "unknown field ''"),
        (
            *(CompletionRequest, {"prompt": "x", "max_tokns": 1}, "max_tokns"),
            "unknown field 'max_tokns'; did you mean 'max_tokens'?",
        ),
        (
            CompletionRequest,
            {
                "prompt": "x",
                "guided_json": {},
                "structured_outputs": {"json": {}, "disable_additional_properties": True},
            },
            *("structured_outputs", "structured_outputs cannot be combined with guided_json"),
        ),
        (
            *(CompletionRequest, {"prompt": "x", "guided_json": {}, "regex": "x"}, "regex"),
            "regex cannot be combined with guided_json",
        ),
        *(
            (
                *(CompletionRequest, {"prompt": prompt, "prompt_token_ids": [1]}),
                "prompt_token_ids",
                "prompt_token_ids needs a prompt that is one text",
            )
            for prompt in (["x", "x"], [2, 3], [[2], [3]], [[2]])
        ),
        (
            CompletionRequest,
            {"prompt": "x", "best_of": 2},
            *("best_of", "best_of must equal n: all generated answers are returned"),
        ),
        (
            CompletionRequest,
            {"prompt": "x", "stream_options": {}},
            *("stream_options", "stream_options needs stream = true"),
        ),
        (
            TokenizeRequest,
            {},
            *("prompt", "prompt or messages is required, and only one of them"),
        ),
    ],
)
def test_errors_name_the_field_once_and_with_its_place(kind, body, param, message):
    """`param` is where the client finds the field in its own body."""
    error = refusal(kind, body)
    assert (error.param, error.message) == (param, message)


def test_errors_repeat_little_of_what_came():
    """An answer is not as large as the request that was wrong."""
    name = "x" * 2_000_000
    error = refusal(CompletionRequest, {"prompt": "x", name: 1})
    assert error.param == "x" * 200 + "…"
    assert len(error.message) < 300
    with pytest.raises(ApiError) as twice:
        strict_json.parse(f'{{"{name}": 1, "{name}": 2}}'.encode())
    assert len(twice.value.message) < 300


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"a": "\\ud83d"}', "a"),
        ('{"b": "\\ud83d\\ude00", "a": [1, {"c": ["\\ude00"]}]}', "a[1].c[0]"),
        ('{"a": {"\\ud83d\\u0041": 1}}', "a"),
        ('{"\\ud83d\\u0041": 1}', None),
        ('{"a": ' * 99 + '"\\ud83d"' + "}" * 99, ".".join("a" * 8)),
    ],
)
def test_half_of_an_emoji_is_told_with_its_field(text, param):
    with pytest.raises(ApiError, match="has a lone surrogate") as refused:
        strict_json.parse(text.encode())
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param or 'the body'} has")


def test_a_number_of_too_many_digits_is_told_as_such():
    with pytest.raises(ApiError, match=r"a number has more than \d+ digits$"):
        strict_json.parse(b'{"a": ' + b"9" * 9999 + b"}")


def test_a_byte_order_mark_is_skipped():
    data = '\ufeff{"a": "\\ud83d\\ude00"}'.encode()
    assert strict_json.parse(data) == strict_json.parse_again(data) == {"a": "😀"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_generation_prompt", True),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"x": 1}),
    ],
)
def test_a_text_is_not_rendered(name, value):
    """What says how to render a conversation is refused by name beside a text, not ignored."""
    error = refusal(TokenizeRequest, {"prompt": "x", name: value})
    assert (error.param, error.message) == (name, f"{name} needs messages")
    TokenizeRequest.model_validate({"prompt": "x", name: None})
    TokenizeRequest.model_validate({"messages": MESSAGES, name: value})


@pytest.mark.parametrize(
    ("effort", "known", "told"),
    [
        ("high", {"reasoning_effort"}, {"reasoning_effort": "high"}),
        ("high", {"enable_thinking"}, {"enable_thinking": True}),
        ("none", {"thinking", "tools"}, {"thinking": False}),
        (
            "none",
            {"reasoning_effort", "enable_thinking"},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        ("none", set(), {}),
        ("low", {"reasoning_strength", "thinking_budget"}, {"reasoning_strength": "low"}),
        ("none", {"reasoning_strength", "thinking_budget"}, {"thinking_budget": 0}),
    ],
)
def test_a_reasoning_effort_reaches_a_template_by_the_variables_that_it_has(effort, known, told):
    assert effort_variables(effort, known.__contains__) == told


def test_thinking_and_effort_of_messages_reach_a_template_by_the_variables_that_it_has():
    """How much effort is no wish to think, nor not to."""

    def variables(known, **fields):
        given = {"model": "m", "max_tokens": 5, "messages": MESSAGES, **fields}
        chat = MessagesRequest.model_validate(given).request(known.__contains__).conversation
        assert chat.effort is None
        return chat.variables

    all_known = {"reasoning_effort", "enable_thinking", "thinking"}
    low = {"output_config": {"effort": "low"}}
    assert variables(all_known, **low) == {"reasoning_effort": "low"}
    assert variables({"enable_thinking"}, **low) is None
    wanted, unwanted = ({"thinking": {"type": kind}} for kind in ("adaptive", "disabled"))
    assert variables({"thinking"}, **wanted) == {"thinking": True}
    assert variables(all_known, **unwanted) == {"enable_thinking": False, "thinking": False}
    assert variables({"reasoning_strength"}, **low) == {"reasoning_strength": "low"}
    assert variables({"thinking_budget"}, **wanted) is None
    off = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
    assert variables({"thinking_budget"}, **unwanted) == off


def test_two_tools_of_one_name_are_refused():
    """The same one may come twice, and tools among the items may renew an earlier one."""
    old, new = ({"name": "f", "description": text} for text in ("old", "new"))
    as_chat = [{"type": "function", "function": tool} for tool in (old, new)]
    as_items = [{"type": "function", **tool} for tool in (old, new)]
    as_messages = [{**tool, "input_schema": {}} for tool in (old, new)]
    in_space = {"type": "namespace", "name": "n", "tools": as_items}
    chat, items = {"messages": MESSAGES}, {"input": "Hi"}
    messages = {"model": "m", "max_tokens": 5, **chat}
    for form, body, tools in (
        (ChatRequest, chat, as_chat),
        (TokenizeRequest, chat, as_chat),
        (ResponsesRequest, items, as_items),
        (InputTokensRequest, items, as_items),
        (ResponsesRequest, items, [in_space]),
        (MessagesRequest, messages, as_messages),
        (CountTokensRequest, chat, as_messages),
    ):
        error = refusal(form, {**body, "tools": tools})
        assert (error.status_code, error.param) == (400, "tools")
        assert error.message.endswith(f"of the name {'n.f' if tools == [in_space] else 'f'}")
        same = tools[:1] * 2 if len(tools) > 1 else [{**in_space, "tools": as_items[:1] * 2}]
        form.model_validate({**body, "tools": same})
    both = {"input": [{"type": "additional_tools", "tools": as_items}]}
    assert refusal(ResponsesRequest, both).param == "input[0].tools"
    free = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    alike = [{"type": "custom", "name": "f"}, {"type": "function", "name": "f", "parameters": free}]
    assert refusal(ResponsesRequest, {**items, "tools": alike}).param == "tools"
    added = [{"type": "additional_tools", "tools": [tool]} for tool in as_items]
    user = {"role": "user", "content": "Hi"}
    asked = ResponsesRequest.model_validate({"input": [*added, user], "tools": as_items[:1]})
    [told] = asked.request([]).format.tools
    assert told.description == "new"


def test_templates_get_tools_with_their_keys_in_the_order_of_the_api():
    """Qwen's, Llama's and other templates write tools with `tojson`, as they are."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    named = {"name": "f", "description": "It works"}
    tool = {"type": "function", "function": {**named, "parameters": schema}}
    messages = {"model": "m", "max_tokens": 5, "messages": MESSAGES}
    items = {"input": "Hi", "tools": [{"type": "function", "parameters": schema, **named}]}
    blocks = {**messages, "tools": [{"input_schema": schema, **named}]}
    for request in (
        ChatRequest.model_validate({"messages": MESSAGES, "tools": [tool]}).request(),
        ResponsesRequest.model_validate(items).request([]),
        MessagesRequest.model_validate(blocks).request(lambda _: False),
    ):
        [told] = request.format.tools
        assert json.dumps(told.for_template()) == json.dumps(tool)


TEXTS = [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": TEXTS, "id": "x" * 200, "status": "odd"},
        {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x", "status": [[1]]},
        {"type": "function_call_output", "call_id": "1", "output": TEXTS, "id": [[]]},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "x"},
        {"type": "agent_message", "author": "a", "recipient": "b", "content": TEXTS[:1]},
        {
            "type": "additional_tools",
            "tools": [TOOL, {"type": "namespace", "name": "n", "tools": [TOOL]}],
        },
    ],
)
def test_a_listed_item_can_be_sent_again_and_says_the_same(item):
    kept = read_item(item)
    listed = kept.listed()
    again = read_item(json.loads(json.dumps(listed)))
    kind = item.get("type", "message")
    assert (listed["type"], listed["status"]) == (kind, "completed")
    assert listed["id"] == "rs_1" or listed["id"].startswith(PREFIX[kind] + "_")
    assert again.listed() == listed
    if kind == "additional_tools":
        assert again.tools == kept.tools
    else:
        assert again.turn() == kept.turn()


def test_what_proxies_add_to_the_parts_of_a_history_says_nothing():
    """Claude Code sends the blocks of an answer again as its proxy wrote them."""
    added = {"provider_specific_fields": {"a": 1}, "extra_content": {"google": {}}}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s", **added}
    text = {"type": "text", "text": "Yes.", **added}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}, **added}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text], **added}
    answer = {"role": "assistant", "content": [thinking, text, call]}
    said = [*MESSAGES, answer, {"role": "user", "content": [result]}]
    chat = MessagesRequest.model_validate({"max_tokens": 5, "messages": said})
    turns = chat.request(lambda _: False).conversation.turns
    assert [turn["role"] for turn in turns][-2:] == ["assistant", "tool"]
    assistant = {"role": "assistant", "content": [thinking, text]}
    [_, turn] = turns_of(ChatRequest.model_validate({"messages": [*MESSAGES, assistant]}).messages)
    assert (turn["content"], turn["reasoning_content"]) == (["Yes."], "Hm.")
    output = {"type": "function_call_output", "call_id": "a", "output": [text], **added}
    items = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", **added}]
    request = ResponsesRequest.model_validate({"input": [*items, output]})
    assert [turn["role"] for turn in request.turns] == ["assistant", "tool"]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_may_stand_beside_the_type_of_the_format(kind):
    """As in llama.cpp's server, and as `value` from huggingface_hub."""

    def asked(**form):
        return {"messages": MESSAGES, "response_format": {"type": kind, **form}}

    schema = {"type": "object", "required": ["a"]}
    for place in ("schema", "value"):
        request = ChatRequest.model_validate(asked(**{place: schema}))
        assert request.response_format.constraint().schema == schema
    two = asked(schema=schema, value=schema)
    assert refusal(ChatRequest, two).param == "response_format.schema"
    both = asked(schema=schema, json_schema={"name": "a", "schema": schema})
    assert refusal(ChatRequest, both).param == "response_format.schema"
    free = asked(type="text", schema=schema)
    assert refusal(ChatRequest, free).param == "response_format.schema"
