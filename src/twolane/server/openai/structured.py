"""The fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from twolane.frontend.body import wrong
from twolane.frontend.structured.grammar import (
    ANY_OBJECT,
    Maker,
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    regex_grammar,
)

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

    def maker(self) -> Maker | None:
        """Return what makes the grammar of the answer; None: it is free."""
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        return lambda: json_schema_grammar(ANY_OBJECT if schema is None else schema)


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

    def maker(self) -> Maker:
        """Return what makes the grammar of the answer."""
        if self.regex is not None:
            return lambda: regex_grammar(self.regex or "")
        if self.choice is not None:
            return lambda: choice_grammar(self.choice or [])
        if self.grammar is not None:
            return lambda: context_free_grammar(self.grammar or "")
        schema = ANY_OBJECT if self.json_object or self.json_ is None else self.json_
        return lambda: json_schema_grammar(
            json.loads(schema) if isinstance(schema, str) else schema
        )
