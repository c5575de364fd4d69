"""Prompts of the forms of public chat templates, against those of `transformers`.

`transformers` renders messages as they are. It gets them in the form that each template is written
for; where it refuses, or drops what was said, the request has to be refused.
"""

import json
import re
from functools import cache

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from twolane.frontend.answer_formats import ModelFormats
from twolane.frontend.messages import Messages, turns_of
from twolane.frontend.text.codec import TextCodec, TextError
from twolane.frontend.text.template import ChatTemplate
from twolane.frontend.text.tokenizer import ModelTokenizer

from .checkpoints import BYTES
from .templates import GLM4_0414, MAGISTRAL, MISTRAL_TOOLS, TEMPLATES

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"city": "Zürich <b>", "days": 2}
CALL = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
TOOL_CALL = {"id": "abcDEF123", "type": "function", "function": CALL}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Now & then", "parameters": PARAMETERS},
    }
]


def user(content="Question1 ä<&>\n 'x'"):
    return {"role": "user", "content": content}


def texts(*words):
    return [{"type": "text", "text": word} for word in words]


def called(content):
    call = {"role": "assistant", "content": content, "tool_calls": [TOOL_CALL]}
    return [user(), call, {"role": "tool", "tool_call_id": "abcDEF123", "content": "Result5 °C"}]


SYSTEM = {"role": "system", "content": "System2 be <brief>"}
ANSWER = {"role": "assistant", "content": "Answer3 sure."}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAnswer3"}
CONVERSATIONS = {
    "user": [user()],
    "spaces around": [user("  Question1 \n")],
    "system": [SYSTEM, user()],
    "turns": [user(), ANSWER, user("Question4")],
    "system and turns": [SYSTEM, user(), ANSWER, user("Question4")],
    "two of the user": [user(), user("Question4")],
    "begins with an answer": [ANSWER, user()],
    "reasoning in the history": [user(), THOUGHT, user("Question4")],
    "one part": [user(texts("Question1"))],
    "two parts": [user(texts("Question1", "Question6"))],
    "parts everywhere": [
        {**SYSTEM, "content": texts("System2")},
        user(texts("Question1")),
        {**ANSWER, "content": texts("Answer3")},
        user(texts("Question4")),
    ],
    "two parts of the system": [{**SYSTEM, "content": texts("System2", "System7")}, user()],
    "developer": [{"role": "developer", "content": "System2 be brief"}, user()],
    "call beside null": called(None),
    "call beside empty text": called(""),
    "call and a further question": [*called(None), {**ANSWER}, user("Question4")],
    "no content": [user(), {"role": "assistant", "content": None}, user("Question4")],
}


def joins(form, role):
    """Whether a template needs parts to be written as one text."""
    return (form.first_part and role == "system") or not form.source.count("is iterable -")


def for_transformers(form, message):
    """Write a message as somebody would who has read the template."""
    made = dict(message)
    if made["role"] == "developer" and not form.developer:
        made["role"] = "system"
    content = made["content"]
    if isinstance(content, str) and form.parts:
        made["content"] = texts(content)
    elif isinstance(content, list) and not form.parts and joins(form, made["role"]):
        made["content"] = "\n".join(piece["text"] for piece in content)
    elif content is None and "tool_calls" not in made:
        made["content"] = [] if form.parts else ""
    elif content == "" and "tool_calls" in made and "content'] is none" in form.source:
        made["content"] = None
    if form.arguments == "object" and "tool_calls" in made:
        function = {**CALL, "arguments": ARGUMENTS}
        made["tool_calls"] = [{**TOOL_CALL, "function": function}]
    return made


@cache
def shows_tools(form):
    """Whether a template shows tools at all; some do only where the user has spoken last."""
    turns = [for_transformers(form, message) for message in CONVERSATIONS["user"]]
    shown = {"tools": TOOLS, "add_generation_prompt": True}
    return (
        "Now"
        in render_jinja_template([turns], chat_template=form.source, **shown, **SPECIALS)[0][0]
    )


def theirs(form, conversation, tools):
    """Return what `transformers` renders; None: it refuses, or drops what was said."""
    turns = [for_transformers(form, message) for message in conversation]
    calls = any("tool_calls" in message for message in conversation)
    try:
        (text,), _ = render_jinja_template(
            [turns],
            tools=tools,
            chat_template=form.source,
            add_generation_prompt=True,
            **SPECIALS,
        )
    except Exception:
        return None
    said = json.dumps([m for m in conversation if m["role"] != "assistant"])
    words = [f"{w}{n}" for w in ("Question", "System", "Result") for n in range(1, 8)]
    missing = [word for word in words if word in said and word not in text]
    missing += ["tools"] if tools and not shows_tools(form) else []
    return None if missing or (calls and not form.calls) else text


def backend():
    made = Tokenizer(models.BPE({name: place for place, name in enumerate(BYTES)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


BACKEND = backend()
SERVED = {
    name: TextCodec(ModelTokenizer(BACKEND, form.source, SPECIALS))
    for name, form in TEMPLATES.items()
}


def told(text, asked=None):
    """The user's message with what the system says in front."""
    return user(f"{text}\n\n{asked or user()['content']}")


OTHERS = {
    "two of the user": [user(user()["content"] + "\n\nQuestion4")],
    "system": [told("System2 be <brief>")],
    "system and turns": [told("System2 be <brief>"), ANSWER, user("Question4")],
    "parts everywhere": [
        told("System2", "Question1"),
        {**ANSWER, "content": texts("Answer3")},
        user(texts("Question4")),
    ],
    "two parts of the system": [told("System2\nSystem7")],
    "developer": [told("System2 be brief")],
    "begins with an answer": [user(""), ANSWER, user()],
    "no content": [user(), user("Question4")],
}
"""What a template that refuses a conversation gets in its place."""


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name, conversation, tools):
    messages, codec = CONVERSATIONS[conversation], SERVED[name]
    expected = theirs(TEMPLATES[name], messages, tools)
    if expected is None and conversation in OTHERS:
        expected = theirs(TEMPLATES[name], OTHERS[conversation], tools)
    turns = turns_of(TypeAdapter(Messages).validate_python(messages))
    if expected is None:
        with pytest.raises(TextError, match="chat template"):
            codec.chat(turns, tools=tools)
    else:
        tokens = codec.chat(turns, tools=tools)
        assert codec.decode(tokens, skip_special_tokens=False) == expected


@pytest.mark.parametrize("name", ["qwen2", "llama3.1", "mistral-tools", "vision", "harmony"])
def test_what_a_template_always_says_tells_nothing_of_its_form(name):
    """A prompt of the system may speak of developers, of None, or of calls as Python writes them:
    Hermes 2's does."""
    said = "You help a developer. Nonetheless: {'type': {'b': 1}} or " + '{"type": "text"}'
    source = TEMPLATES[name].source
    talking = ChatTemplate(f"{{{{ {said!r} }}}}{source}", SPECIALS).form
    assert talking == ChatTemplate(source, SPECIALS).form


def test_a_template_for_tools_alone_shows_calls():
    """Hermes 2 and 3: their template for tools walks over these, and refuses if there are none."""
    source = TEMPLATES["qwen2.5"].source.replace("{%- if tools %}", "{%- if tools | length %}")
    form = ChatTemplate(source, SPECIALS).form
    assert form.shows_tools
    assert form == ChatTemplate(TEMPLATES["qwen2.5"].source, SPECIALS).form


def test_a_model_that_is_only_told_to_list_its_calls_sees_them_in_the_content():
    """Granite 3.3: its template shows tools, and of messages only the content."""
    told = "{% if tools %}Call by <|tool_call|> and a list of {{ tools | tojson }}\n{% endif %}"
    source = told + "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    codec = TextCodec(ModelTokenizer(BACKEND, source, SPECIALS))
    for content in (None, "Well.", texts("Well.")):
        turns = turns_of(TypeAdapter(Messages).validate_python(called(content)))
        shown = codec.decode(codec.chat(turns, tools=TOOLS), skip_special_tokens=False)
        listed = json.dumps([{"name": "get_weather", "arguments": ARGUMENTS}], ensure_ascii=False)
        said = "Well." if content else ""
        assert f"assistant: {said}<|tool_call|>{listed}\ntool: Result5" in shown
    with pytest.raises(TextError, match="does not show tool calls"):
        silent = TextCodec(ModelTokenizer(BACKEND, source.replace("<|tool_call|>", ""), SPECIALS))
        silent.chat(turns, tools=TOOLS)


def test_tools_are_shown_under_the_name_that_the_template_has_for_them():
    """SmolLM3: its template takes functions as `xml_tools`."""
    source = "{% for t in xml_tools or [] %}{{ t | string }}{% endfor %}{{ messages[0].content }}"
    codec = TextCodec(ModelTokenizer(BACKEND, source, SPECIALS))
    turns = turns_of(TypeAdapter(Messages).validate_python([user("Hi")]))
    shown = codec.decode(codec.chat(turns, tools=TOOLS), skip_special_tokens=False)
    assert shown == f"{TOOLS[0]['function']}Hi"
    given = {"variables": {"xml_tools": [{"name": "other"}]}, "tools": TOOLS}
    shown = codec.decode(codec.chat(turns, **given), skip_special_tokens=False)
    assert shown == "{'name': 'other'}Hi"


def shown(source, messages, **more):
    """The prompt of messages as clients send them."""
    codec = TextCodec(ModelTokenizer(BACKEND, source, SPECIALS))
    turns = turns_of(TypeAdapter(Messages).validate_python(messages))
    return codec.decode(codec.chat(turns, **more), skip_special_tokens=False)


def raw(source, messages, **more):
    (text,), _ = render_jinja_template([messages], chat_template=source, **more, **SPECIALS)
    return text


def thinking(text):
    return {"type": "thinking", "thinking": text}


def test_thinking_goes_to_mistrals_templates_as_parts():
    """As its model cards and vLLM have it; other templates get `reasoning_content`."""
    instruct = [*texts("Be brief. "), thinking("How"), *texts("Then answer.")]
    said = [{"role": "system", "content": instruct}, user("Q")]
    told = [{**part, "closed": True} if "thinking" in part else part for part in instruct]
    sent = [{"role": "system", "content": told}, user("Q")]
    for answer in (
        {"reasoning_content": "Hm.", "content": "A"},
        {"reasoning": "Hm.", "content": texts("A")},
        {"content": [thinking("Hm."), *texts("A")]},
    ):
        history = [*sent, {"role": "assistant", **answer}, user("R")]
        content = [thinking("Hm."), *texts("A")]
        plain = [*said, {"role": "assistant", "content": content}, user("R")]
        assert shown(MAGISTRAL, history) == raw(MAGISTRAL, plain)
    call = {**called(None)[1], "reasoning_content": "Hm."}
    assert "[THINK]Hm.[/THINK][TOOL_CALLS]get_weather" in shown(MAGISTRAL, [user("Q"), call])
    going = {"role": "assistant", "reasoning_content": "Hm.", "content": ""}
    begun = shown(MAGISTRAL, [user("Q"), going], continue_final_message=True)
    assert begun.endswith("[/INST][THINK]Hm.[/THINK]")
    with pytest.raises(TextError, match=r"messages\[0\].content.*How"):
        shown(TEMPLATES["qwen3"].source, sent)
    with pytest.raises(ValueError, match="not of the assistant or the system"):
        shown(MAGISTRAL, [user([thinking("Hm.")])])


def test_a_template_that_takes_one_call_gets_several_one_by_one():
    """Llama 3's models make several calls, whose results its template refuses to show together."""
    source = TEMPLATES["llama3.1"].source
    first, call, result = called("I look.")
    second = {**TOOL_CALL, "id": "second", "function": {**CALL, "name": "other"}}
    results = [{**result, "tool_call_id": "second", "content": "Result6"}, result]
    both = {**call, "tool_calls": [TOOL_CALL, second]}
    apart = [
        {"role": "assistant", "content": None, "tool_calls": [second]},
        results[0],
        call,
        result,
    ]
    assert shown(source, [first, both, *results, user("Thanks")]) == shown(
        source, [first, *apart, user("Thanks")]
    )
    assert shown(source, [first, both]).count("parameters") == 2


def test_results_without_ids_follow_the_calls_in_their_order():
    source = TEMPLATES["llama3.1"].source
    first, call, result = called(None)
    bare = {name: value for name, value in result.items() if name != "tool_call_id"}
    second = {"id": "second", "type": "function", "function": {**CALL, "name": "other"}}
    both = [first, {**call, "tool_calls": [TOOL_CALL, second]}]
    prompt = shown(source, [*both, bare, {**bare, "content": "Result6"}])
    places = [prompt.index(word) for word in ("get_weather", "Result5", "other", "Result6")]
    assert places == sorted(places)
    with pytest.raises(TextError, match="single tool-calls"):
        shown(source, [*both, result, {**result, "tool_call_id": "nobodys"}])


def test_text_beside_calls_is_a_message_before_them_where_a_template_shows_only_one():
    """DeepSeek-R1's distilled models have such a template, and make calls of one tool again."""
    source = """{% for m in messages %}{% if m.content is none %}
{{- m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ m.content }}{% endif %};{% endfor %}"""
    call = shown(source, called(None)).split(";")[1]
    assert call.startswith('get_weather{"city')
    prompt = shown(source, [*called("I look."), ANSWER, *called(None)])
    asked = user()["content"]
    assert prompt.split(";")[:4] == [asked, "I look.", call, "Result5 °C"]
    assert prompt.split(";")[4:-1] == [ANSWER["content"], asked, call, "Result5 °C"]


def test_the_system_is_told_by_the_user_where_a_template_drops_it():
    """Mistral Nemo's shows it in the user's message if that is the last one."""
    source = """{% set system = messages[0].content if messages[0].role == 'system' %}
{%- for m in (messages[1:] if system else messages) %}{{ m.role }}:
{%- if loop.last and m.role == 'user' and system %}{{ system ~ '\n\n' }}{% endif %}
{{- m.content or m.tool_calls[0].function.name }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %};{% endfor %}"""
    asked = "user:System2 be <brief>\n\nQuestion1 ä<&>\n 'x';"
    assert shown(source, [SYSTEM, user()]) == asked
    assert shown(source, [SYSTEM, *called(None)]).startswith(asked + "assistant:get_weather")


STRICT_TURNS = """{% set n = namespace(turns=0) %}{% for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}
{%- if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}
{%- if (m.role == 'user') != (n.turns % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
{%- set n.turns = n.turns + 1 %}{% endif %}
{{- '[' ~ m.role[0] ~ ']' ~ (m.content or '') }}{% for c in m.tool_calls or [] %}
{{- c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}{% endfor %}"""
"""Mistral's rule, and that of Qwen 3.5: the system speaks first or not at all."""
LATE = {"role": "system", "content": "Late"}
CALL_AND_RESULT = '[a]get_weather{"city": "Zürich <b>", "days": 2}[t]Result5 °C'


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([ANSWER, user("Q")], "[u][a]Answer3 sure.[u]Q"),
        ([user("Q"), ANSWER, ANSWER, user("R")], "[u]Q[a]Answer3 sure.\n\nAnswer3 sure.[u]R"),
        ([*called(None), user("Q")], CALL_AND_RESULT + "[a][u]Q"),
        ([user("Q"), {"role": "assistant", "content": ""}, user("R")], "[u]Q[a][u]R"),
        ([user("Q"), ANSWER, LATE, user("R")], "[u]Q[a]Answer3 sure.[u]Late\n\nR"),
        ([user("Q"), {**LATE, "role": "developer"}], "[u]Q\n\nLate"),
        ([LATE, ANSWER, user("Q")], "[s]Late[u][a]Answer3 sure.[u]Q"),
        ([*called("I look."), LATE], CALL_AND_RESULT.replace("]", "]I look.", 1) + "[a][u]Late"),
    ],
)
def test_turns_alternate_where_a_template_wants_it(messages, prompt):
    assert shown(STRICT_TURNS, messages).endswith(prompt)


def test_a_message_of_the_system_alone_is_the_users_where_a_template_wants_one():
    """Qwen 3.5's asks for a query of the user."""
    source = """{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}
{{- raise_exception('No user query found in messages.') }}{% endfor %}"""
    assert shown(source, [SYSTEM]) == SYSTEM["content"]


def test_an_empty_answer_is_left_out_where_a_template_refuses_it():
    """Ministral's does; an answer may be cut in the thinking, and is sent back without."""
    source = """{% for m in messages %}{% if m.role == 'assistant' and not m.content %}
{{- raise_exception('must have content') }}{% endif %}{{ m.content }};{% endfor %}"""
    said = [user("Q"), {"role": "assistant", "content": None}, user("R")]
    assert shown(source, said) == "Q;R;"
    begun = [*said, {"role": "assistant", "content": ""}]
    with pytest.raises(TextError, match="must have content"):
        shown(source, begun)
    going = shown(source.replace("{{ m", "{{ m.role ~ ':' ~ m"), begun, continue_final_message=True)
    assert going == "user:Q;user:R;assistant:"


def test_tools_need_neither_a_description_nor_parameters():
    """gpt-oss' and Seed-OSS' templates read these keys of every tool."""
    source = """{% for t in tools %}{{ t.function.name + ':' + t.function.description }}
{%- for name in t.function.parameters.properties | list %},{{ name }}{% endfor %}
{%- for name in t.function.parameters['required'] or [] %}!{{ name }}{% endfor %};{% endfor %}
{{- messages[0].content }}"""
    bare = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert shown(source, [user("Q")], tools=[*bare, *TOOLS]) == "f:;get_weather:Now & then,city;Q"


LFM2 = """{% for m in ([{'role': 'system', 'content': 'List of tools: [' ~ (tools | tojson)[1:]}]
if tools else []) + messages %}<|im_start|>{{ m.role }}
{{ m.content if m.content is string else m.content | tojson }}<|im_end|>
{% endfor %}"""


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_calls_of_lfm_2_are_in_the_content(tools):
    """Its template shows no `tool_calls`; the model's card has them in the content."""
    shown_calls = shown(LFM2, called("I look."), tools=tools)
    python = '<|tool_call_start|>[get_weather(city="Zürich <b>", days=2)]<|tool_call_end|>'
    assert f"assistant\nI look.{python}<|im_end|>\n<|im_start|>tool\nResult5" in shown_calls
    assert f"assistant\n{python}<|im_end|>" in shown(LFM2, called(None), tools=tools)


def test_parts_that_a_template_writes_as_json_are_not_thinking():
    """LFM2.5's writes every part that it does not know as JSON, and thinking by its own key."""
    source = """{% for m in messages %}{{ '<think>' ~ m.thinking ~ '</think>' if m.thinking }}
{%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}
{{- p.text if p.type == 'text' else p | tojson }}{% endfor %}{% endif %}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }}({{ c.function.arguments | tojson }})]
{%- endfor %};{% endfor %}"""
    call = {**called("I look.")[1], "reasoning_content": "Hm."}
    begun = "Q;<think>Hm.</think>I look.[get_weather("
    assert shown(source, [user("Q"), call]).startswith(begun)


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning"])
def test_templates_read_thinking_by_either_name(read, sent):
    """Gemma 4's reads `reasoning`, Qwen 3's `reasoning_content`; vLLM gives them both."""
    source = f"{{% for m in messages %}}{{{{ m.{read} }}}}{{{{ m.content }}}}{{% endfor %}}"
    history = [user("Q"), {"role": "assistant", sent: "Hm.", "content": "A"}, user("R")]
    assert shown(source, history) == "QHm.AR"


def test_results_have_the_names_of_their_tools():
    """Functionary's template puts the name and a text together; clients send the call's id only."""
    source = """{% for m in messages %}{% if m.role == 'tool' %}{{ 'name=' + m['name'] + ':' }}
{%- endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}
{{- c.function.arguments | tojson }}{% endfor %};{% endfor %}"""
    told = "name=get_weather:Result5 °C"
    assert told in shown(source, called(None))
    named = {**called(None)[2], "name": "other"}
    assert "name=other:Result5 °C" in shown(source, [*called(None)[:2], named])
    nobodys = {**called(None)[2], "tool_call_id": "nobodys"}
    with pytest.raises(TextError, match="chat template"):
        shown(source, [*called(None)[:2], nobodys])


@pytest.mark.parametrize("source", [MAGISTRAL, MISTRAL_TOOLS], ids=["magistral", "mistral"])
def test_templates_of_short_ids_get_short_ones_of_others(source):
    """Ids of our own answers, of Anthropic's API and others have more than 9 characters."""
    for given in ("call_0123456789abcdef01234567", "toolu_01A", "abc-EF123", "ÄäÖöÜüßßß"):
        turns = json.loads(json.dumps(called(None)).replace("abcDEF123", given))
        prompt = shown(source, turns)
        [ours] = {
            match[0] for match in re.finditer(r"(?<![A-Z0-9])[A-Z0-9]{9}(?![A-Z0-9])", prompt)
        }
        assert prompt == shown(source, called(None)).replace("abcDEF123", ours)


def test_glm_4_sees_calls_as_messages_of_their_own():
    """GLM-4-0414: its template has the tool's name as metadata, and a role for observations."""
    history = called("I look.")
    history[1]["tool_calls"] *= 2
    call = {
        "role": "assistant",
        "metadata": "get_weather",
        "content": json.dumps(ARGUMENTS, ensure_ascii=False),
    }
    plain = [history[0], {"role": "assistant", "content": "I look."}, call, call]
    plain.append({"role": "observation", "content": "Result5 °C"})
    assert shown(GLM4_0414, history, tools=TOOLS) == raw(
        GLM4_0414, plain, tools=TOOLS, add_generation_prompt=True
    )
    assert "I look" not in shown(GLM4_0414, called(None))
    assert "None" not in shown(GLM4_0414, called(None))


GLM4_9B = """[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}<|system|>
{% for tool in item['tools'] %}## {{ tool['function'] | tojson(indent=4) }}{% endfor %}{% endif %}
{%- if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}
{{ item['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
BESIDE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- if m.role == 'system' and tools %}<|tool|>{{ tools | tojson }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(("source", "given"), [(GLM4_9B, {"tools": TOOLS}), (BESIDE, {})])
def test_tools_that_only_a_message_of_the_system_shows(source, given):
    """GLM-4-9B takes them from that message, which there need not be."""
    for messages in ([user()], [SYSTEM, user()]):
        first = [] if messages[0] is SYSTEM else [{"role": "system", "content": ""}]
        plain = [dict(turn) for turn in [*first, *messages]]
        plain[0] |= given
        wanted = raw(source, plain, tools=TOOLS, add_generation_prompt=True)
        assert shown(source, messages, tools=TOOLS) == wanted
        assert "Now & then" in wanted
        assert shown(source, messages) == raw(source, messages, add_generation_prompt=True)
    assert ModelFormats(GLM4_9B, shows_tools=True).calls == "glm4_0414"
    history = shown(GLM4_9B, called(None), tools=TOOLS)
    assert f"<|assistant|>get_weather\n{json.dumps(ARGUMENTS, ensure_ascii=False)}" in history
    assert history.endswith("<|observation|>\nResult5 °C<|assistant|>")


def test_special_tokens_are_hidden():
    made = backend()
    made.add_special_tokens(["[THINK]"])
    made.add_tokens(["<think>"])
    codec = TextCodec(ModelTokenizer(made, None, SPECIALS))
    hidden = [codec.hides(text) for text in ("[THINK]", "<think>", "a", "none")]
    assert hidden == [True, False, False, False]
    assert not TextCodec(None).hides("[THINK]")


def test_there_are_twenty_templates():
    assert len({form.source for form in TEMPLATES.values()}) >= 20


def test_most_conversations_are_served():
    """The rule above is empty for a template that refuses all of them."""
    for form in TEMPLATES.values():
        served = [c for c in CONVERSATIONS.values() if theirs(form, c, None) is not None]
        assert len(served) >= 5
