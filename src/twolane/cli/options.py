"""Command-line options made from settings structs (`twolane.common.options`)."""

import functools
import inspect
import json
import math
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from twolane.cli.complete import COMPLETIONS, models
from twolane.cli.errors import wrong_setting
from twolane.common.errors import FieldError
from twolane.common.options import MAX_WHOLE, Setting, settings_of
from twolane.engine.config import EngineConfig

Command = Callable[..., None]

MODEL_HELP = (
    "An alias (smollm2-135m-instruct), a local directory, a .gguf file, a built-in shape "
    "(with --load-format dummy) or a Hugging Face id."
)
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", autocompletion=models, help=MODEL_HELP, show_default=False)
]


class Form(NamedTuple):
    """Format of a value on the command line."""

    kind: Any
    """Type from the parser: a text, or a list of texts for a repeatable option."""
    read: Callable[[Any], Any]
    """Converts it to the field's value.

    Raises:
        ValueError: the text has another form; the message continues "--flag …".
    """
    write: Callable[[Any], Any]
    """Converts the field's default to the option's."""


def takes(
    struct: type[msgspec.Struct],
    parameter: str,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    variables: bool = False,
) -> Callable[[Command], Command]:
    """Replace a command's parameter by options for all settings of a struct.

    Args:
        struct: whose settings these are.
        parameter: Name of the command's parameter that gets the fields set on the command line.
        only: names of the options that the command has; None: all.
        without: names of options that the command does not have.
        defaults: Defaults by option name, where this command's differ from the struct's.
        variables: Whether environment variables `TWOLANE_…` may replace options.
    """
    offered = [
        one
        for one in settings_of(struct)
        if one.name not in without and (only is None or one.name in only)
    ]

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        parameters = [one for one in signature.parameters.values() if one.name != parameter]
        parameters += [_parameter(one, defaults or {}, variables) for one in offered]

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            values = [(one, arguments.pop(one.name)) for one in offered]
            try:
                fields = _fields(struct, values)
            except FieldError as error:
                raise wrong_setting(error) from error
            command(**arguments, **{parameter: fields})

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def takes_engine_settings(*without: str) -> Callable[[Command], Command]:
    """Replace a command's `config` by the options of `EngineConfig` but those named.

    The command must also have a `model`.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            from twolane.engine.settings import check_settings

            config = EngineConfig(model=arguments["model"], **arguments.pop("config"))
            try:
                check_settings(config)
            except FieldError as error:
                raise wrong_setting(error) from error
            command(**arguments, config=config)

        return takes(EngineConfig, "config", without=without, variables=True)(run)

    return decorate


def finite(value: float | None) -> float | None:
    """Refuse an infinite or undefined number, as an option's callback."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be finite, not {value}")
    return value


def countable(value: int | None) -> int | None:
    """Refuse an absurdly large number, as an option's callback."""
    if value is not None and value > MAX_WHOLE:
        raise typer.BadParameter(f"must be at most {MAX_WHOLE}")
    return value


def _parameter(setting: Setting, defaults: Mapping[str, Any], variables: bool) -> inspect.Parameter:
    option, form = setting.option, _form(setting)
    default = defaults.get(setting.name, setting.default)
    environment = option.variable or ("TWOLANE_" + setting.name.upper() if variables else None)
    more = [] if option.alias is None else ["--" + option.alias.replace("_", "-")]
    info = typer.Option(
        *([setting.flag, *more] if more else []),
        rich_help_panel=option.panel,
        metavar=option.metavar,
        help=setting.help,
        envvar=environment,
        min=_scaled(option.least, option.factor, form.kind),
        max=_scaled(option.most, option.factor, form.kind),
        callback=_callback(setting, form),
        autocompletion=COMPLETIONS.get(setting.name),
        show_default=default not in (None, {}, ()),
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=form.write(default),
        annotation=Annotated[form.kind, info],
    )


def _scaled(bound: float | None, factor: float, kind: Any) -> float | None:
    if bound is None:
        return None
    return int(bound) if _holds(kind, int) else bound * factor


def _holds(kind: Any, number: type) -> bool:
    """Return whether the values of a type are numbers of this type, or None."""
    return number in (kind, *typing.get_args(kind))


def _callback(setting: Setting, form: Form) -> Callable[..., Any] | None:
    if form.kind == list[str]:
        return _no_blank
    if _holds(form.kind, int) and setting.option.most is None:
        return countable
    return finite if _holds(form.kind, float) and not setting.option.infinite else None


def _no_blank(ctx: typer.Context, param: typer.CallbackParam, value: list[str] | None) -> Any:
    """Refuse an option with a blank value: an empty key would let everybody in."""
    source = ctx.get_parameter_source(str(param.name))
    if (source is not None and source.name != "DEFAULT" and not value) or any(
        not text.strip() for text in value or ()
    ):
        raise typer.BadParameter("must not be empty")
    return value


def _fields(struct: type[msgspec.Struct], values: list[tuple[Setting, Any]]) -> dict[str, Any]:
    """Return the struct's fields by name; those of nested structs as such a struct.

    Raises:
        FieldError: a text has another form, or the nested struct refuses a value.
    """
    fields: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for setting, given in values:
        first, *rest = setting.path
        try:
            value = _form(setting).read(given)
        except ValueError as error:
            raise FieldError(setting.flag.removeprefix("--"), str(error)) from error
        (nested.setdefault(first, {}) if rest else fields)[setting.path[-1]] = value
    kinds = typing.get_type_hints(struct)
    return fields | {name: kinds[name](**inner) for name, inner in nested.items()}


def _form(setting: Setting) -> Form:
    """Return the format of a setting's values."""
    kind, option = setting.kind, setting.option
    if option.factor != 1.0 or option.none is not None:
        return Form(
            kind,
            lambda given: None if given in (None, option.none) else given / option.factor,
            lambda value: None if value is None else round(value * option.factor, 9),
        )
    if kind == dict[str, str]:
        return Form(list[str], functools.partial(pairs, named=option.named), list)
    if kind == dict[str, object]:
        return Form(str | None, json_object, lambda value: None)
    if kind == tuple[str, ...]:
        return Form(list[str], lambda given: tuple(given or ()), list)
    if kind == tuple[float, ...]:
        return Form(str, lambda given: tuple(map(number, given.split(","))), commas)
    if kind == tuple[int, ...] | None:
        return Form(str | None, whole_numbers, lambda value: None)
    if hasattr(kind, "parse"):
        return Form(str, kind.parse, str)
    return Form(kind, lambda given: given, lambda value: value)


def pairs(texts: list[str] | None, *, named: bool) -> dict[str, str]:
    """Parse NAME=PATH texts, or without `named` KEY=VALUE texts, whose dashes of keys become
    underscores."""
    read: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{text}: write {'NAME=PATH' if named else 'KEY=VALUE'}")
        key = key.strip() if named else key.strip().replace("-", "_")
        if key in read:
            raise ValueError(f"{key} is given twice")
        read[key] = value
    return read


def json_object(text: str | None) -> dict[str, object]:
    """Parse a JSON object, empty for an empty text."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def whole_numbers(text: str | None) -> tuple[int, ...] | None:
    """Parse integers separated by commas."""
    if text is None:
        return None
    try:
        return tuple(int(one) for one in text.split(",") if one.strip())
    except ValueError:
        raise ValueError(f"{text}: write numbers, such as 32,48,64") from None


def number(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def commas(numbers: tuple[float, ...]) -> str:
    """Format numbers separated by commas."""
    return ",".join(f"{one:g}" for one in numbers)
