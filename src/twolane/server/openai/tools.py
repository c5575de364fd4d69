"""The request fields of tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from twolane.frontend.body import Body, one_message
from twolane.frontend.structured.tools import Tool

MOST_TOOLS = 128
"""A request may bring this many tools, as in OpenAI's API."""


class FunctionDefinition(Body):
    """What a model is told of a function."""

    inert = frozenset({"strict"})
    """Without effect: the arguments of enforced calls follow the schema in any case."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,256}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(Body):
    """A tool that the model may call: a function."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates know it."""
        function = self.function.model_dump(exclude_none=True)
        return {"type": "function", "function": {"parameters": {}, **function}}

    def tool(self) -> Tool:
        """Return the tool as grammars and parsers know it."""
        return Tool(self.function.name, self.function.parameters)


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[ToolDefinition], Field(max_length=MOST_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice,
    one_message(
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    ),
]


def enforced(tools: Sequence[ToolDefinition], choice: "ToolChoice | None") -> list[Tool]:
    """Return the tools of which one must be called; none: the model is free.

    Raises:
        KeyError: the chosen tool is none of them.
    """
    if choice == "required":
        return [each.tool() for each in tools]
    if not isinstance(choice, NamedChoice):
        return []
    named = {each.function.name: each for each in tools}
    return [named[choice.function.name].tool()]
