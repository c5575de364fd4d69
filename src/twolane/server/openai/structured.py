"""The fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and its
older `guided_` fields, SGLang's `regex` and `ebnf`."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from twolane.frontend.body import Body, wrong
from twolane.frontend.fields import Choices, Schema, SchemaOrText, StructuredOutputs, schema_of
from twolane.frontend.structured import jobs
from twolane.frontend.structured.grammar import ANY_OBJECT


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
    value: Schema | None = None
    """The schema where huggingface_hub has it, also for a `json_object`."""

    @model_validator(mode="after")
    def schema_where_it_belongs(self) -> "ResponseFormat":
        """Refuse the type "json_schema" without a schema, and a schema with another type."""
        places = {"schema": self.schema_, "value": self.value, "json_schema": self.json_schema}
        given = [name for name, schema in places.items() if schema is not None]
        if given and given[0] != "json_schema":
            if self.type == "text" or len(given) > 1:
                raise wrong(given[0], "cannot be combined with another schema or text")
        elif (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema", 'is required with the type "json_schema", and only there')
        return self

    def constraint(self) -> jobs.Schema | None:
        """Return the constraint on the answer; None: free text."""
        if self.type == "text":
            return None
        wrapped = None if self.json_schema is None else self.json_schema.schema_
        schemas = (schema for schema in (self.schema_, self.value, wrapped) if schema is not None)
        return jobs.Schema(next(schemas, ANY_OBJECT))


class ConstraintFields(Body):
    """All fields that constrain the answers, which say the same where a request gives several."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def one_constraint(self) -> "ConstraintFields":
        """Refuse several constraints at once, unless they are the same by several names, of which
        clients send that of each version of a server."""
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        made = [CONSTRAINTS[name](getattr(self, name)) for name in given]
        for name, each in zip(given[1:], made[1:], strict=True):
            if each != made[0]:
                raise wrong(given[0], f"cannot be combined with {name}")
        return self

    @property
    def constraint(self) -> tuple[str, jobs.OutputConstraint] | None:
        """Constraint on the answers and the field that sets it; None: there is none."""
        for name, make in CONSTRAINTS.items():
            if (value := getattr(self, name)) is not None and (made := make(value)) is not None:
                return name, made
        return None


CONSTRAINTS: Mapping[str, Callable[[Any], jobs.OutputConstraint | None]] = {
    "structured_outputs": StructuredOutputs.constraint,
    "regex": jobs.Regex,
    "ebnf": jobs.ContextFree,
    "guided_json": schema_of,
    "guided_regex": jobs.Regex,
    "guided_choice": jobs.Choices,
    "guided_grammar": jobs.ContextFree,
    "response_format": ResponseFormat.constraint,
}
"""The constraint of each of `ConstraintFields`; None: free text."""
