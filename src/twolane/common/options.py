"""Command-line options as metadata of the fields of settings structs.

A setting is written once, as a field of its struct:

    kv_tokens: Annotated[int | None, Option("Memory", "TOKENS", least=1)] = None
    \"\"\"Number of tokens that the KV pool holds; by default a share of the free memory.\"\"\"

The command line takes name, type, default, range and panel from there, and the help from the
docstring below the field. A field without an `Option` has none.
"""

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from twolane.common.errors import FieldError

MAX_WHOLE = 1 << 48
"""Largest value of integer settings that state no maximum."""
MAX_SEED = (1 << 63) - 1
"""Largest seed, a signed integer of 64 bits."""


class Option(msgspec.Struct, frozen=True):
    """The command-line option of a field, as metadata of its annotation."""

    panel: str
    """Heading under which the help shows the option."""
    metavar: str | None = None
    """Placeholder for the value in the help, such as TOKENS; by default the type's name."""
    least: float | None = None
    """Smallest value that the field may have, in the field's unit."""
    most: float | None = None
    """Largest value that the field may have, in the field's unit."""
    positive: bool = False
    """Whether the number must be above 0."""
    name: str | None = None
    """Name of the option with underscores; by default the field's name."""
    alias: str | None = None
    """Second name of the option, with underscores."""
    factor: float = 1.0
    """Factor from the field's unit to the option's: 1e3 for milliseconds."""
    none: float | None = None
    """Value of the option that stands for None."""
    infinite: bool = False
    """Whether the number may be infinite."""
    named: bool = False
    """Whether the keys of KEY=VALUE are arbitrary names, which are kept as they are."""
    variable: str | None = None
    """Environment variable that sets the option; by default `TWOLANE_` and the name."""
    help: str | None = None
    """Help text where the field's docstring does not fit the option's unit."""


def milliseconds(panel: str, name: str, **more: Any) -> Option:
    """Return the option, in milliseconds, of a field in seconds."""
    return Option(panel, "MS", name=f"{name}_ms", factor=1e3, **more)


class Nested(msgspec.Struct, frozen=True):
    """Metadata of a field that is itself a settings struct, whose options its owner has, too."""

    prefix: str = ""
    """Prefix of the names of its options."""


class Setting(msgspec.Struct, frozen=True):
    """A field with an option, of a settings struct or of one nested in it."""

    path: tuple[str, ...]
    """Names of the fields from the outer struct to it."""
    field: str
    """Name of the field in errors: its own, after the prefixes of nested structs."""
    kind: Any
    """Type of the field without metadata."""
    default: Any
    """The field's default value, or `msgspec.NODEFAULT`."""
    option: Option
    name: str
    """Name of the option, with underscores."""
    help: str

    @property
    def flag(self) -> str:
        """The option as it is written on the command line."""
        return "--" + self.name.replace("_", "-")


@functools.cache
def settings_of(struct: type[msgspec.Struct], prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings of a struct in the order of its fields, nested ones in place."""
    return tuple(_settings(struct, prefix))


def check_ranges(struct: msgspec.Struct) -> None:
    """Check that each number is finite and within the range of its field.

    Raises:
        FieldError: naming the first such field.
    """
    for setting in settings_of(type(struct)):
        value = functools.reduce(getattr, setting.path, struct)
        if isinstance(value, (int, float)):
            _check_range(setting.field, value, setting.option)


def check_types(struct: msgspec.Struct) -> None:
    """Check that each field has a value of its type, which constructors do not look at.

    Raises:
        FieldError: naming the first field that has not.
    """
    for name, kind in get_type_hints(type(struct)).items():
        value = getattr(struct, name)
        try:
            if isinstance(kind, type(msgspec.Struct)) and not isinstance(value, kind):
                raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
            msgspec.convert(msgspec.to_builtins(value), kind)
        except (TypeError, msgspec.ValidationError) as error:
            raise FieldError(name, f"has the wrong type: {error}") from error


def _check_range(field: str, value: float, option: Option) -> None:
    if math.isnan(value) or (math.isinf(value) and not option.infinite):
        raise FieldError(field, f"must be finite, not {value}")
    if option.positive and value <= 0:
        raise FieldError(field, f"must be positive, not {value}")
    if option.least is not None and value < option.least:
        raise FieldError(field, f"must be at least {option.least:g}, not {value}")
    if option.most is not None and value > option.most:
        raise FieldError(field, f"must be at most {option.most:g}, not {value}")
    if option.most is None and isinstance(value, int) and value > MAX_WHOLE:
        raise FieldError(field, f"must be at most {MAX_WHOLE}, not {value}")


def _settings(struct: type[msgspec.Struct], prefix: str) -> Iterator[Setting]:
    hints, docs = get_type_hints(struct, include_extras=True), docstrings(struct)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, *metadata = get_args(hint)
        for one in metadata:
            if isinstance(one, Nested):
                for inner in settings_of(kind, prefix + one.prefix):
                    path, name = (field.name, *inner.path), one.prefix + inner.field
                    yield msgspec.structs.replace(inner, path=path, field=name)
            elif isinstance(one, Option):
                name = prefix + (one.name or field.name)
                text = one.help or _in_unit(docs[field.name], one.factor)
                yield Setting((field.name,), field.name, kind, _default(field), one, name, text)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _in_unit(text: str, factor: float) -> str:
    """Return a field's docstring in the option's unit, seconds or milliseconds."""
    if factor == 1.0:
        return text
    return text.replace("seconds", "milliseconds").replace("Seconds", "Milliseconds")


@functools.cache
def docstrings(struct: type) -> dict[str, str]:
    """Return the docstrings of a class's fields, inherited ones too, each as one line of text."""
    docs = dict[str, str]()
    for base in struct.__bases__:
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            docs |= docstrings(base)
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return docs
