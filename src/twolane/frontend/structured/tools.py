"""Grammars that enforce tool calls in the model's format."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from twolane.frontend.parsers import harmony, recipients, tool_calls
from twolane.frontend.parsers.gemma_call import QUOTE
from twolane.frontend.parsers.pythonic import ARGUMENT_NAME
from twolane.frontend.parsers.readers import SEP
from twolane.frontend.structured import grammar
from twolane.frontend.structured.objects import DEFINED, json_expression
from twolane.frontend.structured.schema import (
    KindFinder,
    resolved,
    text_patterns,
    values_of,
    with_objects_only,
)

NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
GEMMA_KEY = re.compile(r"[^\s:,{}\[\]\"<>\/]+")
"""Names of parameters that Gemma 4 writes as they are."""
ANY_TEXT = (r"(.|\n)*",)
NO_TEXT: Mapping[str, Any] = {"type": ["number", "boolean", "null", "object", "array"]}
PLAIN = frozenset(("type", "properties", "required", "title", "description", "$defs", "$schema"))
"""Keywords of schemas whose objects need no other names than those of `properties`."""


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments; None: it has none."""
    strict: bool = False
    """Whether arguments follow the schema even where a call is optional."""
    description: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the format of chat templates, which write it as it is: its keys have
        the order of OpenAI's API, in which models were trained to read them."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters or {}}}

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of its arguments, without any but those that it names."""
        if self.parameters is None:
            return NO_PARAMETERS
        whole = with_objects_only(self.parameters)
        named = whole.get("properties")
        if not isinstance(named, dict) or not named or not whole.keys() <= PLAIN:
            return whole
        closed = {**whole, "additionalProperties": False}
        return closed if set(whole.get("required") or ()) <= named.keys() else whole


def with_open_arguments(tools: Sequence[Tool]) -> list[Tool]:
    """Return tools whose arguments follow their schemas if they are strict, else are any object."""
    return [tool if tool.strict else Tool(tool.name, grammar.ANY_OBJECT) for tool in tools]


def parameter_types(tools: Sequence[Tool]) -> dict[str, dict[str, frozenset[str]]]:
    """Return the JSON types of parameters by tool and parameter, where schemas name some."""
    finder = KindFinder()
    types: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        whole = tool.schema
        properties = whole.get("properties")
        known = properties if isinstance(properties, dict) else {}
        kinds = {name: finder.kinds_of(schema, whole) for name, schema in known.items()}
        types[tool.name] = {name: some for name, some in kinds.items() if some}
    return types


def calls_grammar(
    call_format: str,
    tools: Sequence[Tool],
    token_of: grammar.TokenOf,
    *,
    several: bool,
    closes: bool = False,
) -> str:
    """Return the grammar of an answer of calls only.

    Args:
        call_format: a name of `tool_calls.FORMATS`.
        tools: the tools that may be called; at least one.
        token_of: finds the special tokens that are marks of the format.
        several: true if more than one call may be made.
        closes: true if arguments have no other names than those that schemas declare.
    """
    marks = _Marks(token_of, closes)
    write, between, before, after = FORMATS[call_format]
    calls = [write(tool, marks) for tool in tools]
    rules = "\n".join(f"call_{i}: {call}" for i, call in enumerate(calls))
    call = " | ".join(f"call_{i}" for i in range(len(calls)))
    more = f" ({marks.of(*between)} call)*" if several else ""
    start = f"start: {marks.of(*before)} call{more} {marks.of(*after)}"
    lark = "\n".join([start, f"call: {call}", rules, *marks.rules])
    return grammar.lark_grammar(lark)


def bare_calls_grammar(
    tools: Sequence[Tool], token_of: grammar.TokenOf, *, several: bool, closes: bool = False
) -> str:
    """Return the grammar of calls without marks beside which an answer may be JSON, too.

    Calls are written as JSON throughout: a call that began with a fixed text would be the only way
    on after its first bracket. See `calls_grammar` for the arguments.
    """
    marks, calls = _Marks(token_of, closes), []
    for tool in tools:
        defined = _alone(True, tool.schema)
        fields = {"name": {"const": tool.name}, "parameters": tool.schema}
        whole = {**defined, "type": "object", "properties": fields, "required": [*fields]}
        calls.append(marks.json({**whole, "additionalProperties": False}))
    more = ' ("; " call)*' if several else ""
    lark = [f"start: call{more}", f"call: {' | '.join(calls)}", *marks.rules]
    return grammar.lark_grammar("\n".join(lark))


def strict_grammar(
    call_format: str,
    tools: Sequence[Tool],
    token_of: grammar.TokenOf,
    *,
    several: bool,
    closes: bool = False,
) -> str:
    """Return the grammar of an answer with free text up to the first call.

    From a call's mark on, the arguments of strict tools follow their schemas, those of the others
    are any object. What the parser would read as a call is one.

    Args:
        call_format: a name of `tool_calls.FORMATS`.
        tools: the tools that may be called; at least one.
        token_of: finds the special tokens that are marks of the format.
        several: true if more than one call may be made.
        closes: true if arguments have no other names than those that schemas declare.
    """
    marks = _Marks(token_of, closes)
    if call_format == "glm4_0414":
        return _strict_lines(tools, marks, several=several)
    if call_format == "pythonic":
        return _strict_lists(tools, marks, several=several)
    if call_format in CHANNELS:
        return _strict_channels(call_format, tools, marks)
    openings, (write, between, before, after) = OPENINGS[call_format], FORMATS[call_format]
    known = with_open_arguments(tools)
    calls = [write(tool, marks).removeprefix(marks.of(openings[0])) for tool in known]
    rules = [f"call_{i}: {call}" for i, call in enumerate(calls)]
    each_opens = not before and call_format not in BARE
    more = f" ({marks.of(*between)} call)*" if several and not each_opens else ""
    listed = f"{marks.of(*before[1:])} call{more} {marks.of(*after)}"
    bare = " | SPACE? bare SPACE?" if call_format in BARE else ""
    start = "start: block* TEXT?" if several else "start: TEXT? | block SPACE?"
    lark = [
        start + bare,
        f"block: opening {listed}",
        f"bare: {listed}" if bare else "",
        "call: " + " | ".join(f"call_{i}" for i in range(len(calls))),
        *rules,
        *_free_text(openings, marks, NO_CALL if bare else r"(.|\n)*"),
        "SPACE: /[ \\t\\r\\n]+/",
        *marks.rules,
    ]
    return grammar.lark_grammar("\n".join(filter(None, lark)))


def _strict_lines(tools: Sequence[Tool], marks: "_Marks", *, several: bool) -> str:
    """See `strict_grammar`: a call is a line with a tool's name, and its arguments below."""
    begin = "\\n|" + re.escape(ASSISTANT) if marks.is_text(ASSISTANT) else "\\n"
    calls, lines = [], []
    for i, tool in enumerate(tools):
        schema = tool.schema if tool.strict else grammar.ANY_OBJECT
        calls.append(f"line_{i} {marks.json(schema)}")
        name = re.escape(tool.name).replace("/", "\\/")
        lines.append(rf"line_{i}[lazy]: /((.|\n)*({begin}))?[ \t]*{name}[ \t]*\n/")
    behind = f"(TEXT? {marks.of(ASSISTANT)})?"
    start = "start: (behind call)* TEXT?" if several else "start: TEXT? | behind call SPACE?"
    lark = [start, f"behind: {behind}", "call: " + " | ".join(calls), *lines]
    lark += [r"TEXT: /(.|\n)+/", r"SPACE: /[ \t\r\n]+/", *marks.rules]
    return grammar.lark_grammar("\n".join(lark))


def _strict_lists(tools: Sequence[Tool], marks: "_Marks", *, several: bool) -> str:
    """See `strict_grammar`: a list begins with a bracket and a tool's name, other ones are text."""
    known = with_open_arguments(tools)
    rules, lists = [], []
    for i, tool in enumerate(known):
        name = re.escape(tool.name).replace("/", "\\/")
        rules.append(rf"list_{i}[lazy]: /(.|\n)*\[[ \t\r\n]*{name}[ \t\r\n]*\(/")
        rules.append(f'arguments_{i}: {python_arguments(tool, marks)} ")"')
        lists.append(f"list_{i} arguments_{i}")
    calls = " | ".join(
        f"{json.dumps(tool.name + '(')} arguments_{i}" for i, tool in enumerate(known)
    )
    more = '(", " call)* "]"' if several else '"]"'
    start = "start: list* TEXT?" if several else "start: TEXT? | list SPACE?"
    lark = [start, f"list: ({' | '.join(lists)}) {more}", f"call: {calls}", *rules]
    lark += [r"TEXT: /(.|\n)+/", r"SPACE: /[ \t\r\n]+/", *marks.rules]
    return grammar.lark_grammar("\n".join(lark))


def _strict_channels(call_format: str, tools: Sequence[Tool], marks: "_Marks") -> str:
    """See `strict_grammar`: messages in channels or to recipients, the last of which may be a call.

    Raises:
        ValueError: the marks of messages are no special tokens.
    """
    end, before, names = CHANNELS[call_format]
    between = (end, harmony.START, harmony.MESSAGE, *filter(None, [before]))
    if any(map(marks.is_text, between)):
        raise ValueError("strict calls need the marks of messages to be special tokens")
    known = with_open_arguments(tools)
    ended, opened = marks.of(end, harmony.START), marks.of(before)
    lark = [
        f'start: (message {ended} "assistant")* (message | call)',
        f"message: {opened} NAME {marks.of(harmony.MESSAGE)} TEXT?",
        "call: " + " | ".join(f"call_{i}" for i in range(len(known))),
        *(f"call_{i}: {FORMATS[call_format].call(tool, marks)}" for i, tool in enumerate(known)),
        "NAME: " + " | ".join(map(json.dumps, names)),
        r"TEXT: /(.|\n)+/",
        *marks.rules,
    ]
    return grammar.lark_grammar("\n".join(lark))


def _free_text(openings: Sequence[str], marks: "_Marks", text: str) -> list[str]:
    """Return rules for text, given by a regular expression, and for such text before calls."""
    begins = [f"TEXT? {marks.of(mark)}" for mark in openings if not marks.is_text(mark)]
    written = [re.escape(mark).replace("/", "\\/") for mark in openings if marks.is_text(mark)]
    lazy = f"written[lazy]: /{text}({'|'.join(written)})/"  # it ends with the first one
    rules = [f"TEXT: /{text}/", *([lazy] if written else [])]
    return [*rules, "opening: " + " | ".join([*begins, *(["written"] if written else [])])]


class _Marks:
    """Lark terminals of marks: special tokens by id, others as text."""

    def __init__(self, token_of: grammar.TokenOf, closes: bool) -> None:
        self._token_of, self._closes = token_of, closes
        self.rules: list[str] = []

    def of(self, *marks: str) -> str:
        """Return the terminals of some marks in sequence."""
        return " ".join(grammar.terminal(mark, self._token_of) for mark in marks if mark)

    def is_text(self, mark: str) -> bool:
        """Return whether a mark is text and not a special token."""
        return self._token_of(mark) is None

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for the JSON values of a schema.

        Raises:
            ValueError: it is too complex to compile.
        """
        return json_expression(grammar.checked_schema(schema, closes=self._closes), self.rules)

    def text_until(self, mark: str, patterns: Sequence[str] = ()) -> str:
        """Return a rule for text up to and including the first mark; it matches all patterns."""
        name = f"until_{len(self.rules)}"
        escaped = mark.replace("/", "\\/").replace("\n", "\\n")
        each = [f"/{pattern}{escaped}/" for pattern in patterns or ANY_TEXT]
        # A text that does not match yet would go on after the mark, which ends it for the parser.
        core = escaped.removeprefix("\\n").removesuffix("\\n")
        each += [rf"~/(.|\n)*{core}(.|\n)*{core}(.|\n)*/"] if patterns else []
        self.rules.append(f"{name}[lazy]: {' & '.join(each)}")
        return name

    def rule(self, matched: str, kind: str = "rule") -> str:
        """Add a rule, or a terminal if the kind is in upper case; return its name."""
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}: {matched}")
        return name


def bare_heads(call_format: str, tools: Sequence[Tool]) -> Sequence[str]:
    """Return the texts with which the grammar of calls lets one begin; none where marks do."""
    return [_json_head(tool, "parameters") for tool in tools] if call_format in BARE else ()


def _json_head(tool: Tool, key: str) -> str:
    return '{"name": ' + json.dumps(tool.name) + f', "{key}": '


def _json_call(key: str, begin: str, end: str) -> Callable[[Tool, _Marks], str]:
    def call(tool: Tool, marks: _Marks) -> str:
        head = _json_head(tool, key)
        arguments = marks.json(tool.schema)
        parts = [marks.of(begin), "" if not begin.endswith(">") else '"\\n"', json.dumps(head)]
        tail = ['"}"', '"\\n"' if end else "", marks.of(end)]
        return " ".join(part for part in [*parts, arguments, *tail] if part)

    return call


def _named_call(*head: str, tail: Sequence[str] = ()) -> Callable[[Tool, _Marks], str]:
    """Return a rule for a call with marks before its arguments, with NAME for the tool's name, and
    after them."""

    def call(tool: Tool, marks: _Marks) -> str:
        before = marks.of(*[mark.replace("NAME", tool.name) for mark in head])
        return f"{before} {marks.json(tool.schema)} {marks.of(*tail)}"

    return call


def _call_to_recipient(tool: Tool, marks: _Marks) -> str:
    """Return a rule for a call of Muse Glimmer, which is a message to the tool."""
    call = _marked_call(
        *('\n<atem:invoke name="NAME">\n', '<atem:parameter name="NAME">', "</atem:parameter>\n"),
        *("</atem:invoke>\n", ("<atem:function_calls>", "</atem:function_calls>")),
    )
    return f"{marks.of(f' to={tool.name}', harmony.MESSAGE)} {call(tool, marks)}"


def _mistral_call(tool: Tool, marks: _Marks) -> str:
    """Return a rule for a call of Mistral's models since Small 3.2, which may have an id."""
    number = f"({marks.of('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?"
    head = f"{marks.of('[TOOL_CALLS]', tool.name)} {number} {marks.of('[ARGS]')}"
    return f"{head} {marks.json(tool.schema)}"


def _marked_call(
    head: str, key: str, end: str, tail: str = "", marks_around: tuple[str, str] = ("", "")
) -> Callable[[Tool, _Marks], str]:
    """Return a rule for a call whose arguments are plain text between marks.

    Args:
        head: What is before the arguments, with NAME for the tool's name.
        key: What is before a value, with NAME for the parameter's.
        end: What is after a value.
        tail: What is after the last one.
        marks_around: The marks before and after all of it.
    """

    def call(tool: Tool, marks: _Marks) -> str:
        whole = tool.schema
        before, _, after = key.partition("NAME")
        any_one = f'{json.dumps(before)} /[^<>\\n"]+/ {json.dumps(after)} {marks.text_until(end)}'
        body = [] if "properties" in whole else [f"({any_one})*"]
        for name, schema, needed in _parameters(whole):
            opened = json.dumps(key.replace("NAME", name))
            value = _xml_value(schema, whole, marks, end)
            body.append(f"({opened} {value})" + ("" if needed else "?"))
        begin, close = map(marks.of, marks_around)
        named, closed = (
            json.dumps(head.replace("NAME", tool.name)),
            json.dumps(tail) if tail else "",
        )
        return " ".join(filter(None, [begin, named, *body, closed, close]))

    return call


def _xml_call(begin: str, end: str) -> Callable[[Tool, _Marks], str]:
    """Return a rule for a call of Qwen3-Coder's form between marks."""
    head, key = "\n<function=NAME>\n", "<parameter=NAME>\n"
    return _marked_call(head, key, "\n</parameter>\n", "</function>\n", (begin, end))


def _pythonic_call(tool: Tool, marks: _Marks) -> str:
    return f'{json.dumps(tool.name + "(")} {python_arguments(tool, marks)} ")"'


def python_arguments(tool: Tool, marks: _Marks) -> str:
    """Return a rule for named arguments in Python's syntax with JSON values.

    They come in the order of the schema; those that are not required may be left out.

    Raises:
        ValueError: an argument's name cannot be written so.
    """
    whole = tool.schema
    if "properties" not in whole:
        one = f"/[A-Za-z_][A-Za-z0-9_]*=/ {marks.json({})}"
        return f'({one} (", " {one})*)?'
    rules = []
    for name, schema, needed in _parameters(whole):
        if ARGUMENT_NAME.fullmatch(name) is None:
            raise ValueError(f"the parameter {name!r} of {tool.name} has no name as in Python")
        one = f"{json.dumps(name + '=')} {marks.json(_alone(schema, whole))}"
        rules.append((marks.rule(one), needed))
    return _in_order(rules, ", ", marks)


def _in_order(rules: Sequence[tuple[str, bool]], separator: str, marks: _Marks) -> str:
    """Return a rule for arguments, each given by a rule and whether it is needed, in this order."""
    begins, behind, optional = list[str](), "", True
    for one, needed in reversed(rules):
        begins = [f"{one} {behind}", *([] if needed else begins)]
        behind = marks.rule(f"({json.dumps(separator)} {one}){'' if needed else '?'} {behind}")
        optional &= not needed
    return f"({' | '.join(begins)}){'?' if optional else ''}" if begins else ""


def _gemma_call(tool: Tool, marks: _Marks) -> str:
    """Return a rule for a call of Gemma 4. Strings have its marks; values of other types, and what
    is within them, are JSON, which the parser reads, too.

    Raises:
        ValueError: a parameter's name cannot be written so.
    """
    whole, rules = tool.schema, []
    for name, schema, needed in _parameters(whole):
        if GEMMA_KEY.fullmatch(name) is None:
            raise ValueError(f"the parameter {name!r} of {tool.name} cannot be written as a key")
        rule = f"{json.dumps(name + ':')} {_gemma_value(schema, whole, marks)}"
        rules.append((marks.rule(rule), needed))
    arguments = _in_order(rules, ",", marks)
    if "properties" not in whole:
        one = f"/{GEMMA_KEY.pattern}:/ ({_gemma_text(marks)} | {marks.json(NO_TEXT)})"
        arguments = f'({one} ("," {one})*)?'
    head, begin, end = json.dumps(f"call:{tool.name}{{"), "<|tool_call>", "<tool_call|>"
    return f'{marks.of(begin)} {head} {arguments} "}}" {marks.of(end)}'


def _gemma_value(schema: Any, whole: Mapping[str, Any], marks: _Marks) -> str:
    """Return a rule for a value; one that may be text is text, as in `_xml_value`."""
    known = resolved(schema, whole)
    if "string" not in KindFinder().kinds_of(known, whole):
        return marks.json(_alone(schema, whole))
    values = values_of(known)
    if values is None:
        return _gemma_text(marks, _patterns(known, whole))
    mark = marks.of(QUOTE)
    quoted = (
        f"{mark} {json.dumps(value) if value else ''} {mark}"
        if isinstance(value, str)
        else json.dumps(json.dumps(value))
        for value in values
    )
    return f"({' | '.join(quoted)})"


def _gemma_text(marks: _Marks, patterns: Sequence[str] = ()) -> str:
    """Return a rule for text between marks that matches all patterns."""
    if marks.is_text(QUOTE):
        return f"{marks.of(QUOTE)} {marks.text_until(re.escape(QUOTE), patterns)}"
    text = " & ".join(f"/{pattern}/" for pattern in patterns or ANY_TEXT)
    return f"{marks.of(QUOTE)} {marks.rule(text, 'TEXT')} {marks.of(QUOTE)}"


def _patterns(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    """Return the patterns of a value that can only be text; see `text_patterns`."""
    only_text = KindFinder().kinds_of(schema, whole) == {"string"}
    return text_patterns(schema) if only_text else []


def _parameters(whole: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return name, schema and whether it is required of each possible parameter.

    Raises:
        ValueError: one is required and can have no value.
    """
    required = whole.get("required") or ()
    known = (whole.get("properties") or {}).items()
    impossible = [name for name, schema in known if schema is False and name in required]
    if impossible:
        raise ValueError(f"the parameter {impossible[0]!r} is required and can have no value")
    return [(name, schema, name in required) for name, schema in known if schema is not False]


def _alone(schema: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's schema with the definitions that it refers to."""
    defined = {name: whole[name] for name in DEFINED & whole.keys()}
    return defined if schema is True else {**schema, **defined}


def _xml_value(schema: Any, whole: Mapping[str, Any], marks: _Marks, end: str) -> str:
    """Return a rule for a parameter's value and its end; `whole` is the schema of all parameters. A
    value that may be text is written unquoted, as the parser reads it."""
    known = resolved(schema, whole)
    if "string" not in KindFinder().kinds_of(known, whole):
        return f"{marks.json(_alone(schema, whole))} {json.dumps(end)}"
    values = values_of(known)
    if values is None:
        return marks.text_until(end, _patterns(known, whole))
    written = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return f"({' | '.join(json.dumps(each) for each in written)}) {json.dumps(end)}"


ASSISTANT = "<|assistant|>"
CALL, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


class WrittenCalls(NamedTuple):
    """How a model writes the calls of an answer."""

    call: Callable[[Tool, _Marks], str]
    """Makes the rule of one call."""
    between: tuple[str, ...] = ()
    """Marks between two calls."""
    before: tuple[str, ...] = ()
    """Marks before the first call."""
    after: tuple[str, ...] = ()
    """Marks after the last one."""


def _in_list(call: Callable[[Tool, _Marks], str], begin: str, *end: str) -> WrittenCalls:
    """Return the format of calls in a list between these marks."""
    return WrittenCalls(call, (", ",), (begin, "["), ("]", *end))


_OBJECT = _json_call("arguments", "", "")
FORMATS: Mapping[str, WrittenCalls] = {
    harmony.NAME: WrittenCalls(
        _named_call(
            *(harmony.CHANNEL, "commentary to=functions.NAME ", "<|constrain|>", "json"),
            harmony.MESSAGE,
        )
    ),
    recipients.NAME: WrittenCalls(_call_to_recipient),
    "hermes": WrittenCalls(_json_call("arguments", "<tool_call>", "</tool_call>"), ("\n",)),
    "qwen3_coder": WrittenCalls(_xml_call("<tool_call>", "</tool_call>"), ("\n",)),
    "seed_oss": WrittenCalls(_xml_call("<seed:tool_call>", "</seed:tool_call>"), ("\n",)),
    "llama3_json": WrittenCalls(_json_call("parameters", "", ""), ("; ",)),
    "mistral": _in_list(_OBJECT, "[TOOL_CALLS]"),
    "mistral_args": WrittenCalls(_mistral_call),
    "granite": _in_list(_OBJECT, "<|tool_call|>"),
    "phi4_mini_json": _in_list(_OBJECT, "functools"),
    "llama_nemotron_json": _in_list(_OBJECT, "<TOOLCALL>", "</TOOLCALL>"),
    "deepseek_v3": WrittenCalls(
        _named_call(CALL, "function", SEP, "NAME\n```json\n", tail=("\n```", END_CALL)),
        *(("\n",), tool_calls.LISTS, ("<｜tool▁calls▁end｜>",)),
    ),
    "deepseek_v31": WrittenCalls(
        _named_call(CALL, "NAME", SEP, tail=(END_CALL,)),
        *((), tool_calls.LISTS, ("<｜tool▁calls▁end｜>",)),
    ),
    "glm4_0414": WrittenCalls(_named_call("NAME\n"), (ASSISTANT,)),
    "glm45": WrittenCalls(
        _marked_call(
            *("NAME\n", "<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n"),
            marks_around=("<tool_call>", "</tool_call>"),
        ),
        ("\n",),
    ),
    "minimax_m2": WrittenCalls(
        _marked_call(
            '<invoke name="NAME">\n', '<parameter name="NAME">', "</parameter>\n", "</invoke>"
        ),
        *(("\n",), ("<minimax:tool_call>", "\n"), ("\n", "</minimax:tool_call>")),
    ),
    "minicpm5": WrittenCalls(
        _marked_call(
            *('NAME">', '<param name="NAME">', "</param>"),
            marks_around=('<function name="', "</function>"),
        ),
        ("\n",),
    ),
    "hunyuan_a13b": _in_list(_OBJECT, "<tool_calls>", "</tool_calls>"),
    "gemma4": WrittenCalls(_gemma_call),
    "lfm2": _in_list(_pythonic_call, "<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": WrittenCalls(
        _pythonic_call, ("\n",), ("<function_calls>", "\n"), ("\n", "</function_calls>")
    ),
    "pythonic": WrittenCalls(_pythonic_call, (", ",), ("[",), ("]",)),
}
"""How calls are written, by the names of `tool_calls.FORMATS`."""
OPENINGS: Mapping[str, tuple[str, ...]] = {
    **{name: form.begin for name, form in tool_calls.FORMATS.items()},
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), tool_calls.LISTS),
    "lfm2": ("<|tool_call_start|>",),
}
"""Marks of the first call in an answer that may have text before it; the first one is what
calls are written to begin with."""
NO_CALL = r"[\[ \t\r\n]*([^{\[ \t\r\n](.|\n)*)?"
"""Text that does not begin like a call without a mark, or a list of such calls."""
BARE = ("llama3_json",)
"""Formats in which an answer that begins like a call is one."""
ANSWERS: Mapping[str, str] = {
    harmony.NAME: harmony.THINKING.bare,
    recipients.NAME: f" {recipients.TO_USER}",
}
"""Marks before an answer in whose place there may be a call."""
CHANNELS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    harmony.NAME: (harmony.END, harmony.CHANNEL, harmony.CHANNELS),
    recipients.NAME: (recipients.END, "", recipients.RECIPIENTS),
}
"""Formats of messages with headers: the mark between two messages, the mark before the header's
name, and the names of messages that are no calls."""
