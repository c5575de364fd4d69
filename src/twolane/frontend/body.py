"""Objects that come from outside: each field is honoured, known to say nothing, or refused by name.

The HTTP endpoints and `LLM` read their fields with the same classes, so that both serve and refuse
the same ones with the same words.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from difflib import get_close_matches
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

IGNORED: ContextVar[list[str] | None] = ContextVar("ignored", default=None)
"""Takes the names of unknown fields, which change nothing then; None: they are refused."""
T = TypeVar("T", bound="Body")
Location = tuple[str | int, ...]
"""Where a value is in an object: names of fields, and places in lists."""
MOST_REPEATED = 200
"""An error repeats at most this many characters of a client's own text."""
NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")
"""Pydantic reports one of these types when something else stands where an object should."""


def one_message(text: str) -> WrapValidator:
    """Say `text` when a value fits none of a union's members, instead of one error for each."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("invalid_value", "{text}", {"text": text}) from error

    return WrapValidator(validate)


def wrong(param: str, problem: str, kind: LiteralString = "invalid_value") -> PydanticCustomError:
    """Return an error that names the field at fault, which is one of the object's."""
    return PydanticCustomError(kind, "{param} {problem}", {"param": param, "problem": problem})


class Body(BaseModel):
    """A JSON object of which every field is honoured or refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are refused, each with the values that change nothing and are accepted."""
    why_unsupported: ClassVar[Mapping[str, str]] = {}
    """Why a field of `unsupported` is refused, where there is more to say than that it is."""
    inert: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted with any value and change nothing."""
    null_says_nothing: ClassVar[bool] = False
    """Whether unknown fields are accepted as long as they are null."""

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, body: Any) -> Any:
        """Drop fields that say nothing; refuse the first that is unknown or not served."""
        if not isinstance(body, dict):
            return body
        fields = field_names(cls)
        for name, value in body.items():
            if name in fields or name in cls.inert or (cls.null_says_nothing and value is None):
                continue
            if name not in cls.unsupported and (ignored := IGNORED.get()) is not None:
                ignored.append(shortened(str(name)))
                continue
            if name not in cls.unsupported:  # pydantic would collect them all
                near = get_close_matches(str(name), fields, 1)
                found = {"param": name, **({"near": near[0]} if near else {})}
                raise PydanticCustomError("unknown_field", "unknown field", found)
            if not is_neutral(value, cls.unsupported[name]):
                why = cls.why_unsupported.get(name, "is not supported")
                raise wrong(name, why, "unsupported_field")
        return {name: value for name, value in body.items() if name in fields}


@cache
def field_names(form: type[Body]) -> frozenset[str]:
    """Return the names of a form's fields as senders write them."""
    return frozenset(field.alias or name for name, field in form.model_fields.items())


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Whether an unsupported field holds a value that changes nothing (1 is not True here)."""
    return value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in neutral
    )


class Finding(NamedTuple):
    """The first thing that is wrong with an object."""

    kind: str
    """Pydantic's type of the error, or the one given to `wrong`."""
    param: str | None
    """The field at fault as the sender finds it; None: the object itself."""
    message: str
    """One sentence that names the field."""


def first_finding(errors: Sequence[Any], prefix: str = "") -> Finding:
    """Turn pydantic's errors into the first of them, told with the field's place.

    Args:
        errors: of `ValidationError.errors()`.
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
            "unknown_field": f"unknown field {param!r}"
            + (f"; did you mean {context['near']!r}?" if "near" in context else ""),
            "missing": f"{param} is required",
            **dict.fromkeys(NO_OBJECT, f"{param} must be a JSON object"),
        }.get(error["type"], f"{param}: {error['msg']}")
    return Finding(error["type"], param, message)


def field_name(location: Location) -> str | None:
    """Write pydantic's location as in JSON: ("body", "messages", 0, "role") → messages[0].role.

    None: it is the body itself. Names are those of the client, and shortened.
    """
    parts = location[1:] if location[:1] in (("body",), ("header",)) else location
    if not parts:
        return None
    name = shortened(str(parts[0]))
    for part in parts[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{shortened(part)}"
    return name


def shortened(text: str) -> str:
    """Cut what a client sent to what an error repeats."""
    return text if len(text) <= MOST_REPEATED else text[:MOST_REPEATED] + "…"


def read(form: type[T], fields: Mapping[str, Any]) -> T:
    """Read fields that a program gives.

    Raises:
        ValueError: one of them is refused; the message names it.
    """
    try:
        return form.model_validate(dict(fields))
    except ValidationError as error:
        raise ValueError(first_finding(error.errors()).message) from error
