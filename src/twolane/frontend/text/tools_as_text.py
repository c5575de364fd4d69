"""Tools, calls and results as text, in Hermes' form, for chat templates that show none."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from twolane.frontend.text.template_form import Message, as_text, to_json

TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen's and Hermes' templates say of tools; the braces stand for their descriptions."""


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, system: bool
) -> list[Message]:
    """Return a conversation whose tools, calls and results are text.

    Args:
        messages: The conversation, in the form of `ChatTemplate.render`.
        tools: The tools that the model may call, in OpenAI's format; None: it may call none.
        system: Whether the template shows messages of the system; if not, the first message tells
            of the tools.
    """
    turns = list[Message]()
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            results = [joined("<tool_response>", m["content"], "</tool_response>") for m in group]
            turns.append({"role": "user", "content": joined(*results)})
        else:
            turns += map(with_calls_as_text, group)
    if not tools:
        return turns
    told = TOOLS.format("\n".join(map(to_json, tools)))
    first, rest = turns[0], turns[1:]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": joined(first["content"], "\n" + told)}, *rest]
    if system:
        return [{"role": "system", "content": told}, *turns]
    return [{**first, "content": joined(told + "\n", first["content"])}, *rest]


def with_calls_as_text(message: Message) -> Message:
    """Return a message with its calls at the end of its content."""
    if not message.get("tool_calls"):
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [call["function"] for call in message["tool_calls"]]
    written = (
        f'<tool_call>\n{{"name": {to_json(call["name"])}, '
        f'"arguments": {as_text(call["arguments"])}}}\n</tool_call>'
        for call in calls
    )
    return {**rest, "content": joined(message["content"], *written)}


def joined(*contents: Any) -> Any:
    """Return contents of messages as one text, or as a list where it has parts that are none."""
    parts = [
        part
        for content in contents
        for part in ([content] if isinstance(content, str) else content or ())
        if part
    ]
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else parts
