"""Chat templates: Jinja programs that come with a model, run in a sandbox.

The environment is that of `transformers`, which cannot be imported without PyTorch; a test holds
the two against each other.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import escape

from twolane.frontend.text.template_form import (
    PYTHON_CALLS,
    Message,
    TemplateForm,
    part,
    thinking_part,
    to_json,
    with_names_of_results,
    with_tools,
)

TAG = "CONTINUE-FINAL-MESSAGE-HERE "
OTHER_TOOLS = "xml_tools"
"""The variable in which SmolLM3's template takes functions, as they are in OpenAI's `tools`."""
RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
"""Variables that have request fields of their own."""


class GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training; here its content is
    rendered. As in `transformers`, what it sets is not seen after it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PublicNamespace(Namespace):
    """Jinja's `namespace()` without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        """Refuse underscored names, as in `__setitem__`."""
        _self, *rest = args
        for name in dict(*rest, **kwargs):
            PublicNamespace.check(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        PublicNamespace.check(name)
        super().__setitem__(name, value)

    @staticmethod
    def check(name: object) -> None:
        """Raise `TemplateError` for an underscored name."""
        if isinstance(name, str) and name.startswith("_"):
            raise TemplateError(f"namespace attribute {name!r} is not allowed")


def fail(message: str) -> NoReturn:
    """Raise a template's own error about its messages."""
    raise TemplateError(message)


MAX_REPEATED = 1 << 24
"""Most characters, entries or bits of a product or power in a template."""


class BoundEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounded products, one of which could take all memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See Jinja's sandbox."""
        size = 0
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(repeated, "__len__"):
                    size = len(repeated) * times
        elif isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right
        if size > MAX_REPEATED:
            raise TemplateError(f"{operator} makes too much: {size}")
        return super().call_binop(context, operator, left, right)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of chat templates."""
    made = BoundEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = fail
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.globals["namespace"] = PublicNamespace
    return made


MAX_WORDS = 64
"""Most words of a message that are searched in the prompt, from each of its ends."""
SEEN = "SeenWord7"
"""Word in the probes' contents."""
HELLO: Message = {"role": "user", "content": "Hello"}
CALLED: Mapping[str, Any] = {"arguments": {"key": SEEN}, "name": "call_it"}
RESULT: Message = {
    "role": "tool",
    "content": "Result",
    "name": "call_it",
    "tool_call_id": "abcDEF123",
}
LONG_ID = "call_abcdef0123456789abcdef01"
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "do_it",
        "description": "It is done",
        "parameters": {
            "type": "object",
            "properties": {"how": {"type": "string", "description": "How it is done"}},
            "required": ["how"],
        },
    },
}
"""Tool of the probes for templates that need one."""


class ChatTemplate:
    """A model's chat template, compiled.

    Args:
        source: the Jinja program.
        special_tokens: texts of special tokens by name, which are variables of the template.
        form: the form of the template's messages; None: it is determined when needed.

    Raises:
        TemplateSyntaxError: it is not one.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], form: TemplateForm | None = None
    ) -> None:
        made = environment()
        self.source = source
        self._template = made.from_string(source)
        self._special_tokens = dict(special_tokens)
        if form is not None:
            self.form = form
        program = made.parse(source)
        self.names_developer = any(c.value == "developer" for c in program.find_all(nodes.Const))
        """Whether the template mentions the role "developer"."""
        wanted = meta.find_undeclared_variables(program)
        self.variables = wanted - RESERVED - self._special_tokens.keys() - made.globals.keys()
        """Variables that `chat_template_kwargs` may set."""

    @cached_property
    def form(self) -> TemplateForm:
        """Format in which the template reads messages."""
        return find_form(self)

    @cached_property
    def usual(self) -> str:
        """Rendering of a short message; empty if the template refuses it."""
        return self.tried([HELLO]) or ""

    @cached_property
    def _needed(self) -> Sequence[Mapping[str, Any]] | None:
        """Tools that the template needs to render anything."""
        try:
            self.raw([HELLO])
        except Exception:  # templates are programs that come with the model
            return [TOOL]
        return None

    def tried(
        self,
        turns: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str | None:
        """Return the rendering of unadapted messages; None: the template refuses them."""
        tools = tools or self._needed
        try:
            return self.raw(turns, add_generation_prompt=add_generation_prompt, tools=tools)
        except Exception:  # templates are programs that come with the model
            return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: dictionaries with "role" and "content" at least; the content is text, a list
                of texts and of parts that are thinking (the parts of a message), or None beside
                tool calls.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: end inside the last message, for the model to go on with it.
            variables: further ones.
            tools: the tools that the model may call, in OpenAI's format.

        Raises:
            TemplateError: the template refuses.
            ValueError: the last message cannot be continued: the template drops or changes it.
        """
        messages = with_names_of_results(messages)
        messages = with_tools(messages, tools, self.form.system_tools) if tools else messages
        turns = [turn for message in messages for turn in self.form.adapted(message)]
        last = turns[-1]["content"]
        if continue_final_message:
            last, turns[-1]["content"] = continued(last)
        text = self.raw(
            turns, add_generation_prompt=add_generation_prompt, variables=variables, tools=tools
        )
        return cut_at_tag(text, last) if continue_final_message else text

    def raw(
        self,
        turns: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the rendering of unadapted messages."""
        more = dict(variables or {})
        if tools and OTHER_TOOLS in self.variables:  # it may take `tools` for other things
            more.setdefault(OTHER_TOOLS, [tool["function"] for tool in tools])
        return self._template.render(
            **{**self._special_tokens, **more},
            messages=list(turns),
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            documents=None,
        )


def continued(content: Any) -> tuple[str, Any]:
    """Return the text at a content's end, and the content with the tag appended."""
    if isinstance(content, list):
        parts = content if content and "text" in content[-1] else [*content, part("")]
        last = parts[-1]["text"]
        return last, [*parts[:-1], part(last + TAG)]
    return content or "", (content or "") + TAG


def find_form(template: ChatTemplate) -> TemplateForm:
    """Determine how a template reads messages by rendering probes and searching for their words."""
    roles: dict[str, Sequence[Message]] = {"system": (HELLO,), "user": (), "assistant": (HELLO,)}
    system_tools = find_system_tools(template)
    text_roles = [role for role in roles if shows(template, role_probe(role, SEEN))]
    part_roles = [
        role
        for role in roles
        if shows(template, role_probe(role, [part("Hello"), part(SEEN)]))
        or (role not in text_roles and shows(template, role_probe(role, [part(SEEN)])))
    ]  # some show the first part only
    arguments, contents = find_call_form(template)
    if arguments is not None:
        called = call_probe(arguments, contents[0])
        for content, found in ((SEEN, text_roles), ([part(SEEN)], part_roles)):
            answered = [*called[:2], {**RESULT, "content": content}]
            # The call shows the word once.
            if shows(template, answered, times=2):
                found.append("tool")
    named_calls = arguments is None and shows_named_calls(template)
    if not text_roles and not part_roles:  # it refuses all that was tried
        text_roles = [*roles]
    return TemplateForm(
        tuple(text_roles),
        tuple(part_roles),
        arguments,
        null_content=None in contents,
        empty_content="" in contents or not contents,
        developer=template.names_developer
        and shows(template, [{"role": "developer", "content": SEEN}, HELLO]),
        turn_end=find_turn_end(template, "assistant" in text_roles),
        calls_as_text="" if arguments or named_calls else find_call_mark(template),
        shows_tools=system_tools is not None
        or any(shows_tool(template, turns) for turns in ([HELLO], role_probe("system", SEEN))),
        system_tools=system_tools,
        thinking_parts="assistant" in part_roles
        and shows(template, role_probe("assistant", [thinking_part(SEEN), part("Hello")])),
        thinking_key=arguments is not None
        and shows_thinking(template, arguments, contents[0])
        and not shows_thinking(template, arguments, contents[0], "reasoning_content"),
        thinking_alone=arguments is not None
        and not shows_thinking(template, arguments, "Beside it"),
        named_calls=named_calls,
        short_ids=arguments is not None and not shows(template, long_id_probe(arguments, contents)),
    )


def role_probe(role: str, content: Any) -> list[Message]:
    """Return a conversation in which a message of this role has this content."""
    message = {"role": role, "content": content}
    around: dict[str, list[Message]] = {
        "system": [message, HELLO],
        "user": [message],
        "assistant": [HELLO, message, HELLO],
    }
    return around[role]


def call_probe(arguments: Literal["object", "text"], content: str | None) -> list[Message]:
    """Return a conversation with a tool call in this form beside this content."""
    value = CALLED["arguments"] if arguments == "object" else to_json(CALLED["arguments"])
    call = {
        "id": RESULT["tool_call_id"],
        "type": "function",
        "function": {**CALLED, "arguments": value},
    }
    return [HELLO, {"role": "assistant", "content": content, "tool_calls": [call]}, RESULT]


def shows_thinking(
    template: ChatTemplate,
    arguments: Literal["object", "text"],
    content: str | None,
    key: str = "thinking",
) -> bool:
    """Return whether the template shows the thinking before a tool call, given under this key, and
    the content beside the call."""
    hello, called, result = call_probe(arguments, content)
    turns = [hello, {**called, key: SEEN}, result]
    return shows(template, turns, content or "", times=2)


def long_id_probe(
    arguments: Literal["object", "text"], contents: Sequence[str | None]
) -> list[Message]:
    """Return a conversation with a tool call whose id is as long as those of answers."""
    hello, called, result = call_probe(arguments, contents[0])
    call = {**called["tool_calls"][0], "id": LONG_ID}
    return [hello, {**called, "tool_calls": [call]}, {**result, "tool_call_id": LONG_ID}]


def shows_named_calls(template: ChatTemplate) -> bool:
    """Return whether the template shows calls as messages of their own, by the tool's name."""
    called = {"role": "assistant", "metadata": CALLED["name"], "content": SEEN}
    result = {"role": "observation", "content": RESULT["content"]}
    return shows(template, [HELLO, called, result], CALLED["name"], RESULT["content"])


def find_call_form(
    template: ChatTemplate,
) -> tuple[Literal["object", "text"] | None, Sequence[str | None]]:
    """Determine the format of a call's arguments, and the contents that may accompany it."""
    forms: tuple[Literal["object", "text"], ...] = ("object", "text")
    for arguments in forms:
        contents = [
            content
            for content in (None, "")
            if shows(template, call_probe(arguments, content), CALLED["name"])
        ]
        if contents:
            return arguments, contents
    return None, ()


def find_system_tools(template: ChatTemplate) -> Literal["beside", "within"] | None:
    """Determine how a message of the system makes the template show tools; None: it shows them
    without one, or never."""
    places: tuple[Literal["beside", "within"], ...] = ("beside", "within")
    if shows_tool(template, [HELLO]):
        return None
    tried = (p for p in places if shows_tool(template, with_tools([HELLO], [TOOL], p)))
    return next(tried, None)


def shows_tool(template: ChatTemplate, turns: Sequence[Message]) -> bool:
    """Return whether the template renders the probes' tool in this conversation."""
    return TOOL["function"]["name"] in (template.tried(turns, tools=[TOOL]) or "")


def find_call_mark(template: ChatTemplate) -> str:
    """Return the mark after which the model lists its calls, or an empty text."""
    text = template.tried([HELLO], tools=[TOOL]) or ""
    # Granite 3 and Phi-4-mini are told the marks before a JSON list of calls; LFM2 is not.
    marks = {mark: mark for mark in ("<|tool_call|>", "functools")} | dict.fromkeys(
        ("List of tools: [", "List of tools: <|tool_list_start|>["), PYTHON_CALLS
    )
    return next((mark for told, mark in marks.items() if told in text), "")


def shows(template: ChatTemplate, turns: Sequence[Message], *words: str, times: int = 1) -> bool:
    """Return whether the template renders `SEEN` and `words` as text, not as Python's repr.

    What it always says may look like Python.
    """
    text = template.tried(turns)
    if text is None:
        return False
    pythonic = ("None", "{'", '"{\\"', "'type'", '"type": "text"', '"type": "thinking"')
    return (
        text.count(SEEN) >= times
        and all(word in text for word in words)
        and all(text.count(mark) <= template.usual.count(mark) for mark in pythonic)
    )


def find_turn_end(template: ChatTemplate, as_text: bool) -> str:
    """Return the text that the template puts after an answer, or an empty text."""
    content = SEEN if as_text else [part(SEEN)]
    answered = [HELLO, {"role": "assistant", "content": content}]
    text = template.tried(answered, add_generation_prompt=False) or ""
    # Most characters after an answer that are searched for a turn's end.
    return text.rpartition(SEEN)[2].strip()[:100]


def missing_words(message: str, text: str) -> str | None:
    """Return the first word of a message that its prompt lacks, or None.

    A template may strip a message, or write it as JSON or HTML does. If it changes more, its first
    and last words are looked for, one by one.
    """
    if any(form in text for form in spellings(message.strip())):
        return None
    words = message.split()
    if len(words) > 2 * MAX_WORDS:
        words = words[:MAX_WORDS] + words[-MAX_WORDS:]
    return next((w for w in words if not any(form in text for form in spellings(w))), None)


def spellings(words: str) -> Iterable[str]:
    """Return the ways in which a template may write a text."""
    as_json = to_json(words)[1:-1], json.dumps(words)[1:-1]
    return dict.fromkeys((words, *as_json, str(escape(words))))


def cut_at_tag(text: str, last: str) -> str:
    """Return the text up to the tag after the last message.

    Raises:
        ValueError: the message is not in the text as it was given.
    """
    place = text.rfind(TAG.strip())
    if place < 0 or not text[:place].rstrip().endswith(last.strip()):
        raise ValueError("continue_final_message: the chat template drops or changes the message")
    # A template that strips its messages took the tag's own space with it.
    kept = text[:place]
    return kept if text.startswith(TAG, place) else kept.rstrip()
