"""A tiny Qwen3.5 with experts: thinking and tool calls in its template's form over the three APIs,
whole and streamed, and what its server tells of states."""

import json
import urllib.request

import msgspec
import pytest
import zmq
from transformers import PreTrainedModel

from tests.model.checkpoints import config_of, random_model
from tests.server.parrot import HIDDEN, Learnt, write_parrot
from tests.server.serving import serving
from tests.server.test_harmony import ADD, PARAMETERS, events, post, send
from twolane.engine.kv.events import BlockStored, KVEventBatch
from twolane.engine.kv.page_hash import page_hashes
from twolane.router.state import read_state

MARK = "{#- what follows the prompt -#}"
TEMPLATE = """{%- set last = namespace(query=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nCall them so:\\n\\n<tool_call>\\n<function=example_function_name>\\n' }}
{{- '<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.query %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{%- set shown = value if value is string else value | tojson %}
{{- '<parameter=' + name + '>\\n' + shown + '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}""" + (
    MARK + "{%- endif %}"
)
"""The form of Qwen3.5's: the prompt opens the thinking, which earlier turns lack."""
ANSWER = ("We", " add.\n", "</think>\n\n", "It is", " 3.")
PLAIN = ("Four", ", at once.")
CALL = (
    *("A tool", " helps.\n", "</think>\n", "\nI", " ask.\n\n", "<tool_call>\n", "<function=add>\n"),
    *("<parameter=a>\n", "1", "2\n", "</parameter>\n", "<parameter=note>\n", "two\nlines"),
    *("\n</parameter>\n</function>", "\n</tool_call>"),
)
NOTED = {"type": "object", "properties": {**PARAMETERS["properties"], "note": {"type": "string"}}}
ADD_NOTED = {**ADD, "parameters": NOTED}
ARGUMENTS = {"a": 12, "note": "two\nlines"}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def tiny_qwen(vocabulary: int, end: int) -> PreTrainedModel:
    sizes = {"vocab_size": vocabulary, "hidden_size": HIDDEN, "eos_token_id": end}
    return random_model(config_of("qwen3.5-moe", sizes=sizes))


@pytest.fixture(scope="module")
def replays(tmp_path_factory) -> str:
    """The address that serves the KV events since the start."""
    return f"ipc://{tmp_path_factory.mktemp('events') / 'replays'}"


@pytest.fixture(scope="module")
def base(tmp_path_factory, replays):
    learnt = [Learnt("Sum", ANSWER), Learnt("Call", CALL), Learnt("Plain", PLAIN)]
    path = tmp_path_factory.mktemp("hybrid") / "model"
    # Of white space, after which the prompt still ends with the mark that opens the thinking.
    marks = {"after": MARK, "mark": lambda i: "\n" + (i + 2) * " "}
    write_parrot(path, learnt, TEMPLATE, made=tiny_qwen, **marks)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
    (path / "generation_config.json").write_text(json.dumps(sampling))
    events_at = (
        "--kv-events-endpoint",
        "tcp://127.0.0.1:*",
        "--kv-events-replay-endpoint",
        replays,
    )
    args = ("--served-model-name", "m", "--kv-tokens", "20000", *events_at)
    with serving(str(path), *args) as server:
        yield server.base


def get(base: str, path: str) -> str:
    with urllib.request.urlopen(base + path, timeout=60) as answer:
        return answer.read().decode()


def known(replays: str) -> list[set[int]]:
    """The pages that a late subscriber knows, and those of them with a snapshot."""
    groups: list[set[int]] = [set(), set()]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(replays)
        socket.send_multipart([b"", bytes(8)])
        while socket.poll(60_000):
            _, _, batch = socket.recv_multipart()
            if not batch:
                return groups
            for event in msgspec.msgpack.decode(batch, type=KVEventBatch).events:
                if isinstance(event, BlockStored):
                    groups[event.group_idx or 0].update(event.block_hashes)
    raise TimeoutError


def joined(chunks: list[dict], name: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(name) or "" for chunk in chunks)


def check_streamed(chunks: list[dict]) -> list[dict]:
    """Return the parts of the one streamed call: its arguments are whole and come in pieces."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [call for delta in deltas for call in delta.get("tool_calls") or []]
    streamed = "".join(part["function"].get("arguments") or "" for part in parts)
    assert json.loads(streamed) == ARGUMENTS
    assert len(parts) > 2, "arguments come in pieces"
    return parts


def check_result_is_read(base: str, message: dict, tools: list[dict]) -> None:
    """The answer that follows a call and its result speaks of the result."""
    turns = [{"role": "user", "content": "Call"}, message]
    [call] = message["tool_calls"]
    turns.append({"role": "tool", "tool_call_id": call["id"], "content": "Sum"})
    body = post(base, "/v1/chat/completions", "", tools=tools, messages=turns)
    assert body["choices"][0]["message"]["content"] == "It is 3."


def test_chat(base) -> None:
    chat = "/v1/chat/completions"
    message = post(base, chat, "Sum")["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("We add.", "It is 3.")
    chunks = events(base, chat, "Sum")
    shown = joined(chunks, "reasoning_content"), joined(chunks, "content")
    assert shown == ("We add.", "It is 3.")
    message = post(base, chat, "Plain", **OFF)["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (None, "Four, at once.")


def test_calls_in_chat(base) -> None:
    """Whole, streamed, and with the result of the tool in the next request."""
    chat, tools = "/v1/chat/completions", [{"type": "function", "function": ADD_NOTED}]
    [choice] = post(base, chat, "Call", tools=tools)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("A tool helps.", "I ask.")
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    parts = check_streamed(events(base, chat, "Call", tools=tools))
    assert parts[0]["function"]["name"] == "add"
    check_result_is_read(base, message, tools)
    [choice] = post(base, chat, "Call", tools=tools, tool_choice="required", **OFF)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    json.loads(call["function"]["arguments"])


def test_responses(base) -> None:
    for said, tools in (("Sum", []), ("Call", [{"type": "function", **ADD_NOTED}])):
        asked = {"input": said, "tools": tools, "stream": True}
        lines = send(base, "/v1/responses", asked).splitlines()
        said_events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        whole = json.loads(send(base, "/v1/responses", {**asked, "stream": False}))
        for response in (whole, said_events[-1]["response"]):
            items = {item["type"]: item for item in response["output"]}
            thought = items["reasoning"]["content"][0]["text"]
            if tools:
                assert thought == "A tool helps."
                assert json.loads(items["function_call"]["arguments"]) == ARGUMENTS
            else:
                shown = items["message"]["content"][0]["text"]
                assert (thought, shown) == ("We add.", "It is 3.")


def test_messages(base) -> None:
    tool = {"name": "add", "input_schema": NOTED}
    body = post(base, "/v1/messages", "Call", max_tokens=50, tools=[tool])
    blocks = {block["type"]: block for block in body["content"]}
    assert blocks["thinking"]["thinking"] == "A tool helps."
    assert blocks["tool_use"]["input"] == ARGUMENTS
    said = events(base, "/v1/messages", "Call", max_tokens=50, tools=[tool])
    deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
    parts = {n: "".join(d.get(n, "") for d in deltas) for n in ("thinking", "partial_json")}
    assert parts["thinking"] == "A tool helps."
    assert json.loads(parts["partial_json"]) == ARGUMENTS


def test_what_the_server_tells_of_states(base, replays) -> None:
    """A prompt that is repeated begins with a snapshot, which routers, subscribers of events and
    metrics know of."""
    tokens = [3 + i % 90 for i in range(100)]
    facts = {"prompt": tokens, "max_tokens": 1}
    marks = json.loads(send(base, "/fleet/landmarks/completions", facts))
    assert marks["states"]
    assert marks["tokens"] == [*range(16, 100, 16)], "all of its pages"
    usages = [json.loads(send(base, "/v1/completions", facts))["usage"] for _ in range(2)]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] == 96
    digest = read_state(get(base, "/fleet/state").encode()).digest
    assert digest is not None
    assert digest.as_set() & {*marks["hashes"]} == {marks["hashes"][-1]}
    pages, states = known(replays)
    hashes = [*page_hashes(tokens, 16)]
    assert {*hashes} <= pages
    assert states & {*hashes} == {hashes[-1]}
    lines = get(base, "/metrics").splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if "states" in line or "snapshot" in line)
    names = {name.partition("{")[0] for name in values if not name.startswith("#")}
    assert {"twolane:state_pool_bytes", "twolane:snapshot_hits_total"} <= names
    held = {name: float(v) for name, v in values.items() if 'pool="snapshots",state="held"' in name}
    [size] = held.values()
    data = json.loads(get(base, "/dashboard/data?window=minute"))["states"]
    assert size == data["bytes"] * data["snapshots"][0] > 0
    assert data["hits"] >= 1
    assert data["requests"][0] == 0
