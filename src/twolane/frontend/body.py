"""Validated input objects: each field is honoured, accepted without effect, or refused by name.

The HTTP endpoints and `LLM` read their fields with the same classes, so that both serve and refuse
the same ones with the same words.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar, LiteralString, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twolane.common.nearest import did_you_mean

IGNORED: ContextVar[list[str] | None] = ContextVar("ignored", default=None)
"""Collects names of ignored unknown fields; None: they are refused."""
T = TypeVar("T", bound="Body")
Location = tuple[str | int, ...]
"""Path to a value in an object: field names and list indices."""
MAX_REPEATED = 200
"""Most characters of a client's text that an error repeats."""
PROXIES = frozenset({"extra_content", "provider_specific_fields"})
"""Fields that proxies add to whatever a history repeats."""
NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")
"""Pydantic's error types for a value that is not an object."""


def one_message(text: str) -> WrapValidator:
    """Return a validator that replaces the errors of all members of a union by one message."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("invalid_value", "{text}", {"text": text}) from error

    return WrapValidator(validate)


def wrong(param: str, problem: str, kind: LiteralString = "invalid_value") -> PydanticCustomError:
    """Return a validation error for a field of the object."""
    return PydanticCustomError(kind, "{param} {problem}", {"param": param, "problem": problem})


class Body(BaseModel):
    """A JSON object of which every field is honoured or refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Refused fields, each with the neutral values that are accepted."""
    why_unsupported: ClassVar[Mapping[str, str]] = {}
    """Messages for fields of `unsupported` that need more than "is not supported"."""
    inert: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted with any value and have no effect."""
    null_is_unset: ClassVar[bool] = False
    """Whether unknown fields are accepted as long as they are null."""

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, body: Any) -> Any:
        """Drop fields without effect; refuse the first that is unknown or not supported."""
        if not isinstance(body, dict):
            return body
        fields = field_names(cls)
        for name, value in body.items():
            if name in fields or name in cls.inert or (cls.null_is_unset and value is None):
                continue
            if name not in cls.unsupported and (ignored := IGNORED.get()) is not None:
                ignored.append(shortened(str(name)))
                continue
            if name not in cls.unsupported:  # pydantic would collect them all
                context = {"param": name, "meant": did_you_mean(str(name), fields)}
                raise PydanticCustomError("unknown_field", "unknown field", context)
            if not is_neutral(value, cls.unsupported[name]):
                why = cls.why_unsupported.get(name, "is not supported")
                raise wrong(name, why, "unsupported_field")
        return {name: value for name, value in body.items() if name in fields}


@cache
def field_names(form: type[Body]) -> frozenset[str]:
    """Return the field names of a model as senders write them."""
    return frozenset(field.alias or name for name, field in form.model_fields.items())


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Return whether an unsupported field has a neutral value (1 is not True here)."""
    return value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in neutral
    )


class Finding(NamedTuple):
    """The first error in an object."""

    kind: str
    """Pydantic's type of the error, or the one given to `wrong`."""
    param: str | None
    """Path of the field at fault as the sender wrote it; None: the object itself."""
    message: str
    """One sentence that names the field."""


def first_finding(errors: Sequence[Any], prefix: str = "") -> Finding:
    """Convert the first of pydantic's errors to a message that names the field's path.

    Args:
        errors: the result of `ValidationError.errors()`.
        prefix: name of the object, if it is itself a field of something.
    """
    error = errors[0]
    context = error.get("ctx", {})
    location = (*error["loc"], context["param"]) if "param" in context else error["loc"]
    param = field_name((prefix, *location) if prefix else location)
    if "problem" in context:
        message = f"{param} {context['problem']}"
    elif param is None:
        message = error["msg"]
    else:
        message = {
            "unknown_field": f"unknown field {param!r}{context.get('meant', '')}",
            "missing": f"{param} is required",
            **dict.fromkeys(NO_OBJECT, f"{param} must be a JSON object"),
        }.get(error["type"], f"{param}: {error['msg']}")
    return Finding(error["type"], param, message)


def field_name(location: Location) -> str | None:
    """Return pydantic's location as a path: ("body", "messages", 0, "role") → messages[0].role.

    None: it is the body itself. Names are those of the client, and shortened.
    """
    in_query = location[:1] == ("query",) and len(location) > 1  # else it is a field's name
    parts = location[1:] if in_query or location[:1] in (("body",), ("header",)) else location
    if not parts:
        return None
    name = shortened(str(parts[0]))
    for part in parts[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{shortened(part)}"
    return name


def shortened(text: str) -> str:
    """Return a client's text cut to the length that an error repeats."""
    return text if len(text) <= MAX_REPEATED else text[:MAX_REPEATED] + "…"


def read(form: type[T], fields: Mapping[str, Any]) -> T:
    """Validate fields that a Python caller gives.

    Raises:
        ValueError: one of them is refused; the message names it.
    """
    try:
        return form.model_validate(dict(fields))
    except ValidationError as error:
        raise ValueError(first_finding(error.errors()).message) from error
