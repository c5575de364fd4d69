"""`--config FILE`: options of a command from a YAML file, by the names of their flags.

A value comes from the flag, else from the environment, else from the file, else it is the default.
Values are taken as they are written and read like those of flags, so that YAML's own ideas of types
(`no`, `1e3`, `08000`) do not matter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from twolane.common.nearest import did_you_mean

NULL = "tag:yaml.org,2002:null"


def load(ctx: typer.Context, path: Path | None) -> Path | None:
    """Set the file's values as defaults of the command that is being parsed.

    Raises:
        typer.BadParameter: the file cannot be read, or a key is unknown, double or of a wrong form.
    """
    if path is not None and not ctx.resilient_parsing:
        try:
            ctx.default_map = dict(settings(path, keys_of(ctx.command)))
        except ValueError as error:
            raise typer.BadParameter(f"{path}: {error}") from error
    return path


def config_option(**more: Any) -> Any:
    """Return the option `--config` of a command."""
    return typer.Option(
        "--config",
        metavar="FILE.yaml",
        is_eager=True,
        callback=load,
        help="File of options by the names of their flags, as `seed: 7`. Flags and environment "
        "variables come before the file.",
        **more,
    )


def keys_of(command: Any) -> dict[str, Any]:
    """Return the command's parameters by the keys under which a file may set them."""
    keys: dict[str, Any] = {}
    for param in command.params:
        if param.is_eager or getattr(param, "hidden", False):
            continue
        flags = [flag[2:] for flag in param.opts if flag.startswith("--")]
        keys |= dict.fromkeys(flags or [param.name], param)
    return keys


def settings(path: Path, keys: dict[str, Any]) -> Iterator[tuple[str, str | list[str]]]:
    """Yield each parameter's name with its value as text.

    Raises:
        ValueError: the file cannot be read, or says what cannot be; the message has the line.
    """
    seen: dict[str, str] = {}
    for key_node, value_node in entries(path):
        line = key_node.start_mark.line + 1
        if key_node.id != "scalar":
            raise ValueError(f"line {line}: a list or a mapping is an unknown key")
        key = key_node.value
        param = keys.get(key.replace("_", "-"))
        if param is None:
            meant = did_you_mean(key.replace("_", "-"), keys) or ", no flag has this name"
            raise ValueError(f"line {line}: unknown key {key!r}{meant}")
        if param.name in seen:
            raise ValueError(f"line {line}: {key} is given twice")
        seen[param.name] = key
        try:
            if not is_default(value_node, param):
                yield param.name, value(value_node, param)
        except ValueError as error:
            raise ValueError(f"line {line}: {key} {error}") from error


def entries(path: Path) -> list[tuple[Any, Any]]:
    """Return the YAML nodes of the file's keys and values.

    Raises:
        ValueError: the file cannot be read or is no mapping.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        root = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ValueError(error.strerror) from error
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"is not YAML: {str(error).splitlines()[0]}") from error
    if root is None or root.tag == NULL:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("must hold lines of the form `key: value`")
    return list(root.value)


def is_default(node: Any, param: Any) -> bool:
    """Return whether a YAML value leaves a flag at its default.

    Raises:
        ValueError: nothing stands where values should, as an API key that a template did not fill
            in; the message continues "KEY …".
    """
    if node.tag == NULL and not node.value and getattr(param, "multiple", False):
        raise ValueError("is empty; write ~ for none")
    return bool(node.tag == NULL)


def value(node: Any, param: Any) -> str | list[str]:
    """Return a YAML value as the text, or texts, of a flag.

    Raises:
        ValueError: it has the wrong form; the message continues "KEY …".
    """
    many = getattr(param, "multiple", False)
    if node.id == "scalar":
        return [node.value] if many else str(node.value)
    if not many:
        raise ValueError("takes one value")
    if node.id == "sequence":
        return [scalar(item) for item in node.value]
    separator = next((mark for mark in "=:" if mark in (param.metavar or "")), None)
    if separator is None:
        raise ValueError("takes a list")
    return [f"{scalar(key)}{separator}{scalar(item)}" for key, item in node.value]


def scalar(node: Any) -> str:
    """Return the text of a YAML node that holds one value."""
    if node.id != "scalar":
        raise ValueError("is nested too deeply")
    return str(node.value)
