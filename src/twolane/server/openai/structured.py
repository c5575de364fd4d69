"""The fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from twolane.frontend.body import wrong
from twolane.frontend.structured import jobs
from twolane.frontend.structured.grammar import ANY_OBJECT

Schema = dict[str, Any] | bool


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class JsonSchema(_Fields):
    """A JSON schema with OpenAI's fields around it."""

    name: str
    schema_: Schema | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Without effect: answers follow the schema in any case."""


class ResponseFormat(_Fields):
    """What form the answer has (OpenAI)."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def schema_where_it_belongs(self) -> "ResponseFormat":
        """Refuse a format that lacks its schema, and a schema without its format."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema", 'goes with the type "json_schema", and only with it')
        return self

    def wanted(self) -> jobs.Schema | None:
        """Return what the answer is to be; None: it is free."""
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        return jobs.Schema(ANY_OBJECT if schema is None else schema)


class StructuredOutputs(_Fields):
    """What form the answer has (vLLM): exactly one of the fields is given."""

    json_: Schema | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def exactly_one(self) -> "StructuredOutputs":
        """Refuse none and several."""
        if len(self.model_fields_set) != 1:
            known = "json, json_object, regex, choice and grammar"
            raise PydanticCustomError("invalid_value", f"must have exactly one of {known}")
        return self

    def wanted(self) -> jobs.Wanted:
        """Return what the answer is to be."""
        if self.regex is not None:
            return jobs.Regex(self.regex)
        if self.choice is not None:
            return jobs.Choices(self.choice)
        if self.grammar is not None:
            return jobs.ContextFree(self.grammar)
        if isinstance(self.json_, str):
            return jobs.SchemaText(self.json_)
        return jobs.Schema(ANY_OBJECT if self.json_object or self.json_ is None else self.json_)
