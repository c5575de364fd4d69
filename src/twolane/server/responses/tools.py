"""Tools of /v1/responses, and their conversion to functions, the only tools that models know."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from twolane.common.checked_json import Json
from twolane.frontend.body import Body, one_message, wrong
from twolane.frontend.fields import MAX_TOOLS
from twolane.frontend.structured.tools import Tool

CUSTOM_INPUT = "input"
"""Argument of the function that stands for a tool with free text as input."""
HOSTED = ("web_search", "web_search_preview", "image_generation", "tool_search")
"""Tools run by OpenAI that clients offer by default; the model does not see them."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
TOOL_INERT = frozenset({"allowed_callers", "defer_loading", "output_schema", "async"})


class CalledTool(NamedTuple):
    """A tool as an answer names it."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """Whether its input is free text."""


class FunctionTool(Body):
    """A function that the client runs."""

    inert = TOOL_INERT
    null_is_unset = True

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def repeated(self) -> Json:
        """The tool as the response repeats it."""
        return self.model_dump()

    def shown(self, namespace: str | None = None) -> list[Tool]:
        """Return the tool as functions, which models know."""
        name = qualified(namespace, self.name)
        return [Tool(name, self.parameters, bool(self.strict), self.description)]

    def called(self, namespace: str | None = None) -> dict[str, CalledTool]:
        """Return the tools as answers name them, by the name that the model knows."""
        return {qualified(namespace, self.name): CalledTool(self.name, namespace)}


class CustomToolFormat(Body):
    """The format of a custom tool's input."""

    null_is_unset = True

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def grammar_where_it_belongs(self) -> "CustomToolFormat":
        """Refuse the type "grammar" without a grammar, and a grammar with another type."""
        if {self.type == "grammar"} != {self.syntax is not None, self.definition is not None}:
            problem = 'and syntax are required with the type "grammar", and only there'
            raise wrong("definition", problem)
        return self

    @property
    def shown(self) -> str | None:
        """Description of the format for the model, which is not enforced; None: any text."""
        if self.definition is None:
            return None
        return f"The input follows this grammar ({self.syntax}):\n{self.definition}"


class CustomTool(Body):
    """A tool with free text as input."""

    inert = TOOL_INERT
    null_is_unset = True

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: CustomToolFormat | None = None

    @property
    def repeated(self) -> Json:
        """See `FunctionTool.repeated`."""
        return self.model_dump(exclude_none=True)

    def shown(self, namespace: str | None = None) -> list[Tool]:
        """See `FunctionTool.shown`."""
        properties = {CUSTOM_INPUT: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [CUSTOM_INPUT]}
        texts = [self.description, None if self.format is None else self.format.shown]
        description = "\n\n".join(filter(None, texts)) or None
        return [Tool(qualified(namespace, self.name), parameters, description=description)]

    def called(self, namespace: str | None = None) -> dict[str, CalledTool]:
        """See `FunctionTool.called`."""
        return {qualified(namespace, self.name): CalledTool(self.name, namespace, custom=True)}


class HostedTool(Body):
    """A tool that this server does not run and the model does not see."""

    type: str

    @classmethod
    def read(cls, value: Any) -> "HostedTool":
        """Validate the tool's type only: its settings have no effect."""
        return cls(type=value["type"])

    @property
    def repeated(self) -> Json:
        """See `FunctionTool.repeated`."""
        return self.model_dump()

    def shown(self) -> list[Tool]:
        """See `FunctionTool.shown`."""
        return []

    def called(self) -> dict[str, CalledTool]:
        """See `FunctionTool.called`."""
        return {}


Named = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(Body):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[Named], Field(max_length=MAX_TOOLS, fail_fast=True)]

    @property
    def repeated(self) -> Json:
        """See `FunctionTool.repeated`."""
        tools = [tool.repeated for tool in self.tools]
        return {**self.model_dump(exclude={"tools"}, exclude_none=True), "tools": tools}

    def shown(self) -> list[Tool]:
        """See `FunctionTool.shown`."""
        return [shown for tool in self.tools for shown in tool.shown(self.name)]

    def called(self) -> dict[str, CalledTool]:
        """See `FunctionTool.called`."""
        return {name: one for tool in self.tools for name, one in tool.called(self.name).items()}


ResponseTool = FunctionTool | CustomTool | NamespaceTool | HostedTool


def _tool(value: Any) -> ResponseTool:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "function":
            return FunctionTool.model_validate(value)
        case "custom":
            return CustomTool.model_validate(value)
        case "namespace":
            return NamespaceTool.model_validate(value)
        case str() if kind in HOSTED:
            return HostedTool.read(value)
    known = ", ".join(("function", "custom", "namespace", *HOSTED))
    raise wrong("type", f"must be one of {known}: others are run by OpenAI", "unsupported_field")


ResponseTools = Annotated[
    list[Annotated[ResponseTool, PlainValidator(_tool), WithJsonSchema({"type": "object"})]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Body):
    """The choice of some tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    one_message(
        'must be "none", "auto", "required", {"type": "function", "name": …} or '
        '{"type": "allowed_tools", "mode": …, "tools": […]}'
    ),
]


def qualified(namespace: str | None, name: str) -> str:
    """Return a tool's name for the model, with its namespace."""
    return name if namespace is None else f"{namespace}.{name}"


def by_name(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, object]]:
    """Yield the name of each tool that the model sees, with its kind and what the model is told."""
    for tool in tools:
        space = tool.name if isinstance(tool, NamespaceTool) else None
        for one in tool.tools if isinstance(tool, NamespaceTool) else [tool]:
            if isinstance(one, FunctionTool | CustomTool):
                yield qualified(space, one.name), (one.type, one.shown(space))


def chosen_tools(
    tools: Sequence[ResponseTool], choice: "ResponseToolChoice | None"
) -> tuple[list[Tool], str | None, str | None]:
    """Return the tools that the model may see, the mode of `FormatOptions.of`, and the name of the
    one tool to call.

    Of two tools of one name the last counts: those among the items may renew an earlier one.
    """
    shown = [*{one.name: one for tool in tools for one in tool.shown()}.values()]
    if isinstance(choice, NamedTool):
        return shown, None, qualified(choice.namespace, choice.name)
    if isinstance(choice, AllowedTools):
        allowed = {qualified(one.namespace, one.name) for one in choice.tools}
        return [one for one in shown if one.name in allowed], choice.mode, None
    return shown, choice, None


def called_tools(tools: Sequence[ResponseTool]) -> Mapping[str, CalledTool]:
    """Return all tools as answers name them, by the name that the model knows."""
    return {name: called for tool in tools for name, called in tool.called().items()}
