"""Request fields of tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from twolane.frontend.body import Body, one_message
from twolane.frontend.fields import MAX_TOOLS, FunctionName
from twolane.frontend.structured.tools import Tool


class FunctionDefinition(Body):
    """A function as the model sees it."""

    null_is_unset = True

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether the arguments follow the schema even where a call is optional."""


class ToolDefinition(Body):
    """A tool that the model may call: a function."""

    inert = frozenset({"cache_control"})
    null_is_unset = True

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self) -> Tool:
        """Return the tool for templates, grammars and parsers."""
        function = self.function
        strict = bool(function.strict)
        return Tool(function.name, function.parameters, strict, function.description)


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def names(self) -> list[str]:
        """Names of the tools that may be called."""
        return [self.function.name]


class AllowedFunctions(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Body):
    """The choice of some tools, which are the only ones that the model sees."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions

    @property
    def names(self) -> list[str]:
        """See `NamedChoice.names`."""
        return [each.function.name for each in self.allowed_tools.tools]


Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | AllowedChoice,
    one_message(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


def chosen_tools(
    tools: Sequence[ToolDefinition] | None, choice: "ToolChoice | None"
) -> tuple[Sequence[Tool], str | None, str | None]:
    """Return the tools that the model may see, the mode of `FormatOptions.of`, and the name of the
    one tool to call."""
    offered = [each.tool() for each in tools or ()]
    match choice:
        case NamedChoice():
            return offered, None, choice.function.name
        case AllowedChoice():
            names = choice.names
            allowed = [tool for tool in offered if tool.name in names]
            return allowed, choice.allowed_tools.mode, None
    return offered, choice, None
