"""Chat templates: Jinja programs that come with a model, run in a sandbox.

The environment is that of `transformers`, which cannot be imported without PyTorch; a test holds
the two against each other.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]
TAG = "CONTINUE-FINAL-MESSAGE-HERE "
RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
"""Variables that are set by fields of their own."""


class Generation(Extension):
    """`{% generation %}`: marks what the assistant said, for training; here it is just shown."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the block's content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PublicNamespace(Namespace):
    """A template's `namespace()`, without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        """Refuse underscored names, as `__setitem__` does."""
        _self, *rest = args
        for name in dict(*rest, **kwargs):
            PublicNamespace.check(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        PublicNamespace.check(name)
        super().__setitem__(name, value)

    @staticmethod
    def check(name: object) -> None:
        """Raise `TemplateError` for an underscored name."""
        if isinstance(name, str) and name.startswith("_"):
            raise TemplateError(f"namespace attribute {name!r} is not allowed")


def fail(message: str) -> NoReturn:
    """Let a template refuse its messages."""
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; unlike Jinja's own filter without escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment() -> ImmutableSandboxedEnvironment:
    """Return what chat templates run in."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = fail
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.globals["namespace"] = PublicNamespace
    return made


class ChatTemplate:
    """A model's chat template, compiled.

    Args:
        source: the Jinja program.
        special_tokens: by name; the template sees them as variables.

    Raises:
        TemplateSyntaxError: it is not one.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        made = environment()
        self._template = made.from_string(source)
        self._special_tokens = dict(special_tokens)
        wanted = meta.find_undeclared_variables(made.parse(source))
        self.variables = wanted - RESERVED - self._special_tokens.keys() - made.globals.keys()
        """What `chat_template_kwargs` may set."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: with "role" and "content" at least; the content is text.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: end inside the last message, for the model to go on with it.
            variables: further ones.

        Raises:
            TemplateError: the template refuses.
            ValueError: the last message cannot be continued: the template drops or changes it.
        """
        turns = [dict(message) for message in messages]
        last = turns[-1]["content"]
        if continue_final_message:
            turns[-1]["content"] = last + TAG
        text = self._template.render(
            **{**self._special_tokens, **(variables or {})},
            messages=turns,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
        )
        return cut_at_tag(text, last) if continue_final_message else text


def cut_at_tag(text: str, last: str) -> str:
    """Return the text up to the tag behind the last message.

    Raises:
        ValueError: the message is not in the text as it was given.
    """
    place = text.rfind(TAG.strip())
    if place < 0 or not text[:place].rstrip().endswith(last.strip()):
        raise ValueError("continue_final_message: the chat template drops or changes the message")
    # A template that strips its messages took the tag's own space with it.
    kept = text[:place]
    return kept if text.startswith(TAG, place) else kept.rstrip()
