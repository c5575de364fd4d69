"""Request fields of tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from twolane.frontend.body import Body, one_message, wrong
from twolane.frontend.structured.tools import Tool

MAX_TOOLS = 1024
"""Most tools of a request. OpenAI's API takes 128; users of MCP have hundreds."""
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,256}$")]


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

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the format of chat templates."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {}, **function}}

    def tool(self) -> Tool:
        """Return the tool for grammars and parsers."""
        function = self.function
        return Tool(function.name, function.parameters, strict=bool(function.strict))


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Body):
    """The choice of some tools, which are the only ones that the model sees."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | AllowedChoice,
    one_message(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


def ambiguous(named: Iterable[tuple[str, object]]) -> str | None:
    """Return the name of two tools that differ: nobody could say which one is called; None: there
    are none.

    Args:
        named: each tool behind its name. The same tool may come twice.
    """
    known: dict[str, object] = {}
    return next((name for name, tool in named if known.setdefault(name, tool) != tool), None)


def check_names(tools: "Sequence[ToolDefinition] | None") -> None:
    """Refuse two different functions of one name.

    Raises:
        PydanticCustomError: there are.
    """
    if twice := ambiguous((tool.function.name, tool) for tool in tools or ()):
        raise wrong("tools", f"has two different functions of the name {twice}")


def shown(tools: Sequence[ToolDefinition] | None) -> list[dict[str, Any]] | None:
    """Return tools in the format of chat templates; None: there are none."""
    return [tool.for_template() for tool in tools] if tools else None


def chosen_names(choice: "ToolChoice | None") -> list[str] | None:
    """Return the names of the tools that a choice allows; None: it allows all."""
    match choice:
        case NamedChoice():
            return [choice.function.name]
        case AllowedChoice():
            return [each.function.name for each in choice.allowed_tools.tools]
    return None


def offered(
    tools: Sequence[ToolDefinition], choice: "ToolChoice | None"
) -> Sequence[ToolDefinition]:
    """Return the tools that the model sees."""
    if choice == "none":
        return ()
    if not isinstance(choice, AllowedChoice):
        return tools
    names = chosen_names(choice) or ()
    return [each for each in tools if each.function.name in names]


def enforced(tools: Sequence[ToolDefinition], choice: "ToolChoice | None") -> list[Tool]:
    """Return the tools one of which must be called; empty: none must."""
    if isinstance(choice, NamedChoice):
        return [each.tool() for each in tools if each.function.name == choice.function.name]
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    return [each.tool() for each in offered(tools, choice)] if mode == "required" else []
