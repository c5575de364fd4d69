"""Request body of /v1/responses, and its conversion to a request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec.structs import replace
from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twolane.frontend import fields
from twolane.frontend.answer_formats import FormatOptions
from twolane.frontend.body import Body, wrong
from twolane.frontend.generate_request import (
    NO_DEFAULTS,
    Conversation,
    GenerateRequest,
    sampling_params,
)
from twolane.frontend.structured import jobs
from twolane.frontend.structured.grammar import ANY_OBJECT
from twolane.frontend.structured.jobs import OutputConstraint
from twolane.frontend.text.output_reader import TextOptions
from twolane.sampling import SamplingParams
from twolane.server.http.errors import ApiError, from_validation
from twolane.server.responses.items import (
    Item,
    Items,
    MessageItem,
    MessagePart,
    ReferenceItem,
    ToolsItem,
    Turn,
    joined,
    read_item,
)
from twolane.server.responses.tools import (
    AllowedTools,
    NamedTool,
    ResponseTool,
    ResponseToolChoice,
    ResponseTools,
    by_name,
    chosen_tools,
    qualified,
)

REPEATED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "max_tool_calls")
"""Fields that are repeated in the response and have no other effect."""
SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_ITEMS = TypeAdapter(Items)


def _input(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a list as items, so that errors name the item's field, or accept a string."""
    if isinstance(value, list):
        return _ITEMS.validate_python(value)
    if isinstance(value, str):
        return value
    text = "must be a string or a list of items"
    raise PydanticCustomError("invalid_value", "{text}", {"text": text})


Input = Annotated[str | Items, WrapValidator(_input)]


class ReasoningOptions(Body):
    """Options of the model's thinking."""

    inert = frozenset({"summary", "generate_summary", "context"})
    """Without effect: the thinking is shown as it is."""

    effort: str | None = None


class TextFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: fields.Schema | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Without effect: answers follow the schema in any case."""

    @model_validator(mode="after")
    def schema_where_it_belongs(self) -> "TextFormat":
        """Refuse a format that lacks its schema, and a schema without its format."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise wrong("schema", 'is required with the type "json_schema", and only there')
        return self

    @property
    def constraint(self) -> tuple[str, OutputConstraint] | None:
        """Constraint on the answer and the field that sets it; None: free text."""
        if self.type == "text":
            return None
        return "text.format", jobs.Schema(ANY_OBJECT if self.schema_ is None else self.schema_)


class TextConfig(Body):
    """Options of the answer's text."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponseStreamOptions(Body):
    """Options of the stream, none of which has an effect."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}


Included = Literal[
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
    "file_search_call.results",
]


class InputTokensRequest(Body):
    """The body of POST /v1/responses/input_tokens: the fields that are part of a prompt."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conversation": ()}

    model: str | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def tools_can_be_called(self) -> Self:
        """Refuse different tools of one name, and a choice of tools that are not offered."""
        lists = {"tools": self.tools or ()}
        for place, item in enumerate(self.items):
            if isinstance(item, ToolsItem):
                lists[f"input[{place}].tools"] = item.tools
        for param, tools in lists.items():
            if twice := fields.ambiguous(by_name(tools)):
                raise wrong(param, f"has two different tools of the name {twice}")
        choice = self.tool_choice
        chosen = [choice] if isinstance(choice, NamedTool) else []
        if isinstance(choice, AllowedTools):
            chosen = choice.tools
        shown = {one.name for tool in self.all_tools for one in tool.shown()}
        for one in chosen:
            if qualified(one.namespace, one.name) not in shown:
                names = ", ".join(sorted(shown))[:200]
                raise wrong("tool_choice", f"is not one of the tools: {names}")
        if choice == "required" and not shown:
            raise wrong("tool_choice", "needs tools that the model can call")
        return self

    @property
    def all_tools(self) -> list[ResponseTool]:
        """All offered tools, including those among the items."""
        added = [tool for item in self.items if isinstance(item, ToolsItem) for tool in item.tools]
        return [*(self.tools or ()), *added]

    @property
    def items(self) -> Sequence[Item]:
        """The new items; a string is a user's message."""
        if isinstance(self.input, str):
            return (MessageItem(role="user", content=self.input),)
        return self.input

    def resolved(self, find: Callable[[str], dict[str, Any] | None]) -> Self:
        """Return the request with references replaced by the items.

        Args:
            find: returns an item by its id; None: it is not in memory.

        Raises:
            ApiError: 400, an item is not in memory.
        """
        if isinstance(self.input, str):
            return self
        items, known = list(self.input), dict[str, Item]()
        for place, item in enumerate(self.input):
            if isinstance(item, ReferenceItem) and item.id in known:
                items[place] = known[item.id]
            elif isinstance(item, ReferenceItem):
                found = find(item.id)
                if found is None:
                    param = f"input[{place}].id"
                    message = f"{param}: there is no item {item.id[:100]!r} in memory"
                    raise ApiError(400, message, code="item_not_found", param=param)
                items[place] = known[item.id] = read_item(found)
        return self.model_copy(update={"input": items})

    @property
    def turns(self) -> list[Turn]:
        """The new messages, as those of /v1/chat/completions."""
        return [item.turn() for item in self.items if isinstance(item, MessagePart)]

    def request(
        self, history: Sequence[Turn], defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> GenerateRequest:
        """Return the request of a conversation.

        Args:
            history: the messages before the new ones.
            defaults: sampling parameters of requests that say nothing of them.

        Raises:
            ApiError: 400, it cannot be served; the field is named as it is here.
            FieldError: a field is out of range.
        """
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        try:
            turns = fields.read_turns(joined([*first, *history, *self.turns]))
        except ValidationError as error:
            raise renamed(from_validation(error.errors(), "messages")) from error
        effort = None if self.reasoning is None else self.reasoning.effort
        conversation = Conversation(
            turns=turns,
            variables=self.chat_template_kwargs,
            effort=effort,
            drops_oldest=self.truncation == "auto",
        )
        return GenerateRequest(
            prompt_field="input",
            conversation=conversation,
            format=self._format,
            sampling=sampling_params({}, defaults),
            adapter=self.model,
        )

    @property
    def _format(self) -> FormatOptions:
        tools, mode, named = chosen_tools(self.all_tools, self.tool_choice)
        form = None if self.text is None else self.text.format
        constraint = None if form is None else form.constraint
        several = self.parallel_tool_calls is not False
        return FormatOptions.of(tools, mode, constraint, named=named, several=several)


class ResponsesRequest(fields.SamplingFields, InputTokensRequest):
    """The body of POST /v1/responses."""

    inert = fields.INERT.difference(REPEATED) | {"client_metadata"}
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **InputTokensRequest.unsupported,
        "background": (False,),
        "context_management": ([],),
        "top_logprobs": (0,),
        **dict.fromkeys(("access_programs", "background_options"), ()),
        **dict.fromkeys(("image", "moderation", "prompt"), ()),
    }

    max_output_tokens: fields.AnswerTokens | None = None
    stop: fields.Stop | None = None
    cache_salt: fields.CacheSalt | None = None
    priority: fields.Priority | None = None
    include: list[Included] | None = None
    """Without effect: thinking is shown as text, and the rest does not exist here."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: fields.Whole | None = None
    """Limit on calls of tools that OpenAI runs; without effect."""

    def request(
        self, history: Sequence[Turn], defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> GenerateRequest:
        """See `InputTokensRequest.request`."""
        limit = "max_output_tokens"
        sampled = {**self.sampled, "max_tokens": self.max_output_tokens}
        return replace(
            super().request(history, defaults),
            sampling=sampling_params(sampled, defaults, limit),
            text=TextOptions(stop=fields.stop_strings(self.stop)),
            limit_field=limit,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            stream=bool(self.stream),
        )

    def repeated(self, sampling: SamplingParams) -> dict[str, Any]:
        """Return the fields that the response repeats: all that Open Responses requires.

        Args:
            sampling: the sampling parameters, with defaults of fields that the request lacks.
        """
        choice = self.tool_choice
        return {
            **{name: getattr(self, name) for name in REPEATED},
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "max_output_tokens": self.max_output_tokens,
            **{name: getattr(sampling, name) for name in SAMPLED},
            "top_logprobs": 0,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
            "tools": [tool.repeated for tool in self.tools or ()],
            "text": {"format": self._repeated_format},
            "reasoning": {
                "effort": None if self.reasoning is None else self.reasoning.effort,
                "summary": None,
            },
            "metadata": self.metadata or {},
            "service_tier": "default",
            "store": self.store is not False,
            "truncation": self.truncation or "disabled",
            "background": False,
        }

    @property
    def _repeated_format(self) -> dict[str, Any]:
        if self.text is None or self.text.format is None:
            return {"type": "text"}
        return self.text.format.model_dump(exclude_none=True, by_alias=True)


def renamed(error: ApiError) -> ApiError:
    """Return an error about a converted message as one about the input."""
    if not (error.param or "").startswith("messages"):
        return error
    return error.about("input", error.message.replace(str(error.param), "input"))
