"""The fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from twolane.common.errors import FieldError
from twolane.frontend.structured.grammar import (
    ANY_OBJECT,
    check_grammar,
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    regex_grammar,
)

Schema = dict[str, Any] | bool
Maker = Callable[[], str]


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
            raise ValueError('needs json_schema with the type "json_schema", and only then')
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
            raise ValueError("needs exactly one of json, json_object, regex, choice and grammar")
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


def made(maker: Maker, field: str) -> str:
    """Return the grammar of a field, checked.

    Raises:
        FieldError: it cannot be made or does not compile.
    """
    try:
        return check_grammar(maker(), field)
    except FieldError:
        raise
    except (ValueError, RecursionError) as error:
        raise FieldError(field, f"cannot be served: {error}"[:500]) from error
