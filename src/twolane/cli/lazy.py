"""Groups of commands that import a command's module when the command runs.

Help and completion of one command then load nothing of the others, and `twolane --help` no command.
"""

from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class LazyCommands(TyperGroup):
    """A group whose commands are modules of one package, each with a Typer `app`."""

    package: ClassVar[str]
    lines: ClassVar[dict[str, str]]
    """One-line descriptions of the commands: the first line of their help."""
    modules: ClassVar[dict[str, str]] = {}
    """Modules in the package whose name is not that of their command."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return list(self.lines)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return what the group's help shows of a command, or None."""
        line = self.lines.get(cmd_name)
        return None if line is None else TyperCommand(cmd_name, help=line, callback=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command with all its options, and the words after it."""
        self.commands = {one: self.get_command(ctx, one) for one in self.lines}  # to suggest one
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.load(str(name)), rest

    @classmethod
    def load(cls, name: str) -> Any:
        """Return a command with its options."""
        module = import_module(f"{cls.package}.{cls.modules.get(name, name)}")
        command = get_command(module.app)
        command.name, command.epilog = name, str(module.__doc__).partition("\n\n")[2]
        return command


def command_app(**more: Any) -> typer.Typer:
    """Return the Typer of one command's module."""
    return typer.Typer(add_completion=False, rich_markup_mode="markdown", **more)
