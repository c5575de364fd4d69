"""The fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twolane.frontend.body import Body, one_message, wrong
from twolane.frontend.fields import Schema
from twolane.frontend.structured import jobs
from twolane.frontend.structured.grammar import ANY_OBJECT

SchemaOrText = Annotated[
    dict[str, Any] | bool | str, one_message("must be a JSON object, a boolean, or a text of one")
]


class JsonSchema(Body):
    """A JSON schema with OpenAI's fields around it."""

    name: str
    schema_: Schema | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Without effect: answers follow the schema in any case."""


class ResponseFormat(Body):
    """The format of the answer (OpenAI)."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    """The schema where llama.cpp has it, also for a `json_object`."""

    @model_validator(mode="after")
    def schema_where_it_belongs(self) -> "ResponseFormat":
        """Refuse the type "json_schema" without a schema, and a schema with another type."""
        if self.schema_ is not None:
            if self.type == "text" or self.json_schema is not None:
                raise wrong("schema", "cannot be combined with json_schema or text")
        elif (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema", 'is required with the type "json_schema", and only there')
        return self

    def constraint(self) -> jobs.Schema | None:
        """Return the constraint on the answer; None: free text."""
        if self.type == "text":
            return None
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        return jobs.Schema(ANY_OBJECT if schema is None else schema)


class StructuredOutputs(Body):
    """The format of the answer (vLLM): exactly one of the fields is given."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "disable_fallback": (False,),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def exactly_one(self) -> "StructuredOutputs":
        """Require exactly one format."""
        forms = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(one is not None for one in forms) != 1:
            known = "json, json_object, regex, choice and grammar"
            raise PydanticCustomError("invalid_value", f"must have exactly one of {known}")
        return self

    def constraint(self) -> jobs.OutputConstraint:
        """Return the constraint on the answer."""
        if self.regex is not None:
            return jobs.Regex(self.regex)
        if self.choice is not None:
            return jobs.Choices(self.choice)
        if self.grammar is not None:
            return jobs.ContextFree(self.grammar)
        if isinstance(self.json_, str):
            return jobs.SchemaText(self.json_)
        return jobs.Schema(ANY_OBJECT if self.json_object or self.json_ is None else self.json_)
