"""The help of a command: every option on a line of its own, its description indented below.

The library's table gives names, types and descriptions a column each. At 80 columns it cuts the
names of the options that a reader looks for.
"""

import inspect
from typing import Any

from typer.core import TyperCommand

DEFAULT_PANELS = {"argument": "Arguments", "option": "Options"}
"""Headings of the parameters that name none, by their kind."""


class Command(TyperCommand):
    """A command whose help never truncates names, even in a narrow terminal."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line after the command's name: MODEL, [RUN]..."""
        params = [one for one in self.get_params(ctx) if not getattr(one, "hidden", False)]
        pieces = [piece for param in params for piece in param.get_usage_pieces(ctx)]
        return [
            str(self.options_metavar),
            *(piece.replace("{", "").replace("}", "") for piece in pieces),
        ]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        from rich.console import Console
        from rich.markdown import Markdown
        from rich.padding import Padding

        console = Console(highlight=False)
        # Most columns of the help.
        console.width = min(console.width, 100)
        console.print(self.get_usage(ctx), style="bold", markup=False)
        for text in self.help, *self._panels(ctx).items(), self.epilog:
            console.print()
            if isinstance(text, tuple):
                title, records = text
                console.print(title, style="bold yellow", markup=False)
                for names, description in records:
                    _print_record(console, names, description)
            elif text:
                console.print(Padding(Markdown(inspect.cleandoc(text)), (0, 1)))

    def _panels(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Return names and description of each parameter by the heading that it stands under."""
        panels: dict[str, list[tuple[str, str]]] = {one: [] for one in DEFAULT_PANELS.values()}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = getattr(param, "rich_help_panel", None)
                names, description = record
                if param.param_type_name == "argument":
                    names = names.partition(" <")[0]  # its type says less than its description
                heading = title or DEFAULT_PANELS[param.param_type_name]
                panels.setdefault(heading, []).append((names, description))
        return {title: records for title, records in panels.items() if records}


def _print_record(console: Any, names: str, description: str) -> None:
    """Print the names of a parameter, and below them its meaning and sources."""
    from rich.markdown import Markdown
    from rich.padding import Padding
    from rich.text import Text

    meaning, bracket, origin = description.rpartition("  [")
    if not bracket:
        meaning, origin = description, ""
    names = names.replace(" range>", ">")  # the bounds stand below
    console.print(Padding(Text(names, style="bold cyan"), (0, 2)))
    meaning = meaning.replace("<", r"\<")  # a template's mark, not HTML
    console.print(Padding(Markdown(meaning), (0, 1, 0, 6)))
    if origin:
        console.print(Padding(Text("[" + origin, style="dim"), (0, 1, 0, 6)))
