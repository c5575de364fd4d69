"""Grammars in llguidance's format, made from constraints of requests."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from twolane.common.checked_json import Json
from twolane.common.errors import FieldError
from twolane.engine.constrained.matching import (
    MAX_GRAMMAR_BYTES,
    MAX_OPTIONAL,
    MAX_PATTERNS,
    MAX_RULES,
    parser_limits,
)
from twolane.frontend.parsers.reasoning import ThinkingMarks
from twolane.frontend.structured.closing import closed
from twolane.frontend.structured.ecma import rust_regex
from twolane.frontend.structured.gbnf import is_lark, plain_gbnf
from twolane.frontend.structured.gbnf_lexemes import lark_of_gbnf
from twolane.frontend.structured.objects import json_expression
from twolane.frontend.structured.schema import plain_schema

RULE = re.compile(r"^[ \t]*[!?]?[A-Za-z_][\w.-]*[^:\n\"/]*:", re.M)
"""The beginning of a rule in a Lark grammar."""
NAMED = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?:#|//)[^\n]*|(?P<name><[^<>\s\[\]]+>)'
)
"""A token that a Lark grammar names; strings, expressions and comments, which may seem to."""
TokenOf = Callable[[str], int | None]
"""Returns the id of an added token by its text; None: there is no such token."""
Maker = Callable[[], str]
"""Makes a grammar in llguidance's format; it may raise errors that `made_grammar` converts."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_schema_grammar(schema: Mapping[str, Any] | bool, *, closes: bool = False) -> str:
    """Return the grammar of all JSON values that a JSON schema allows.

    Args:
        schema: the schema.
        closes: true if objects have no other names than those they declare; see `closed`.

    Raises:
        ValueError: the schema is no JSON, as a number that JSON has no form for, allows no value,
            or is too complex to compile.
    """
    plain = checked_schema(schema, closes=closes)
    rules = list[str]()
    return lark_grammar("\n".join([f"start: {json_expression(plain, rules)}", *rules]))


def checked_schema(schema: object, *, closes: bool) -> Json:
    """Return an equivalent schema that can be compiled, with its objects closed if need be.

    Raises:
        ValueError: see `json_schema_grammar`.
    """
    plain = plain_schema(schema)
    if closes:
        plain = closed(plain)
    check_complexity(plain)
    return plain


def regex_grammar(regex: str) -> str:
    """Return the grammar of all strings that match a regular expression as a whole.

    Raises:
        ValueError: see `rust_regex`.
    """
    return LLMatcher.grammar_from_regex(rust_regex(regex))


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of some strings as one terminal: as rules, a few thousand exceed the
    parser's bounds."""
    return lark_grammar("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def context_free_grammar(text: str, token_of: TokenOf = lambda _: None) -> str:
    """Return a grammar given in Lark's format or GBNF.

    Args:
        text: the grammar.
        token_of: finds added tokens, which a Lark grammar may name.

    Raises:
        ValueError: it is in neither, is too complex to compile, or has parts in other forms.
    """

    def numbered(part: re.Match[str]) -> str:
        token = None if part["name"] is None else token_of(part["name"])
        return part[0] if token is None else f"<[{token}]>"

    lark = NAMED.sub(numbered, text) if is_lark(text) else lark_of_gbnf(plain_gbnf(text))
    if "%json" in lark:
        raise ValueError("%json is not supported in a grammar: give the schema alone")
    rules = len(RULE.findall(lark))
    if rules > MAX_RULES:
        raise ValueError(f"the grammar has {rules} rules; at most {MAX_RULES} can be")
    return lark_grammar(lark)


def lark_grammar(lark: str) -> str:
    """Return a grammar in Lark's format to which a prefix can be added."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def check_complexity(schema: object) -> None:
    """Check that a schema can be compiled in bounded time and stack.

    Raises:
        ValueError: it has too many references, or too many optional properties or patterns of
            properties in one object.
    """
    references: set[str] = set()
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack.extend(part)
        elif isinstance(part, Mapping):
            stack.extend(part.values())
            references.add(str(part.get("$ref")))
            check_object(part)
    if len(references) > MAX_RULES:
        raise ValueError(f"the schema has more than {MAX_RULES} different references")


def check_object(schema: Mapping[str, Any]) -> None:
    """Check that no position in an object has too many possible next properties.

    Raises:
        ValueError: it has.
    """
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping) and len(patterns) > MAX_PATTERNS:
        raise ValueError(f"patternProperties can be at most {MAX_PATTERNS} of one object")
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, Mapping) and len(properties) > MAX_OPTIONAL:
        always = {str(name) for name in required} if isinstance(required, list) else set()
        if len(properties.keys() - always) > MAX_OPTIONAL:
            problem = f"an object has more than {MAX_OPTIONAL} properties that are not required"
            raise ValueError(problem)


def after_thinking(grammar: str, token_of: TokenOf, thinking: ThinkingMarks) -> str:
    """Return the grammar of an answer that follows the model's thinking.

    Args:
        grammar: the grammar of the answer.
        token_of: finds the marks of thinking among the added tokens.
        thinking: the marks of thinking; unless the prompt has opened it, it may think or not.
    """
    [answer, *others] = json.loads(grammar)["grammars"]
    end, opened = terminal(thinking.end, token_of), thinking.opened
    if end.startswith("<["):
        thought = f"thought: /(.|\\n)*/ {end}"
    else:
        thought = "thought[lazy]: /(.|\\n)*" + re.escape(thinking.end).replace("/", "\\/") + "/"
    lark = [
        f"start: {'thoughts' if opened or thinking.needed else 'thoughts?'} @answer",
        f"thoughts: {'' if opened else terminal(thinking.begin, token_of)} thought SPACE",
        thought,
        "SPACE: /[ \\n]{0,32}/",  # bounded, as WHITESPACE is
    ]
    first = {"lark_grammar": "\n".join(lark)}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}, *others]})


def either(answer: str, calls: str, before: str) -> str:
    """Return the grammar of an answer or of calls.

    Args:
        answer: the grammar of the answer.
        calls: the grammar of the calls.
        before: Lark terminals before the answer, or nothing.
    """
    [text, *others] = json.loads(answer)["grammars"]
    [called, *more] = json.loads(calls)["grammars"]
    named = [{**text, "name": "text"}, *others, {**called, "name": "calls"}, *more]
    first = {"lark_grammar": f"start: {before} @text | @calls"}
    return json.dumps({"grammars": [first, *named]})


def terminal(mark: str, token_of: TokenOf) -> str:
    """Return the Lark terminals of a mark: an added token, or text, which may have such in it."""
    token = token_of(mark)
    if token is not None:
        return f"<[{token}]>"
    parts = [part for part in _SPECIAL.split(mark) if part]
    tokens = [token_of(part) for part in parts]
    if len(parts) == 1 or all(each is None for each in tokens):
        return json.dumps(mark)
    both = zip(parts, tokens, strict=True)
    return " ".join(json.dumps(p) if each is None else f"<[{each}]>" for p, each in both)


_SPECIAL = re.compile(r"(<\|?[a-z_]+\|?>)")
"""The form of special tokens within marks; Gemma 4's have one bar."""


def check_grammar(grammar: str, field: str) -> str:
    """Return the grammar if it compiles.

    It takes at most a few tenths of a second, and gives up Python's lock meanwhile.

    Raises:
        FieldError: the grammar is too large, wrong, or has parts that are not implemented.
    """
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise FieldError(
            field, f"has {size} bytes as a grammar; at most {MAX_GRAMMAR_BYTES} are allowed"
        )
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if wrong:
        raise FieldError(field, "cannot be served: " + " ".join(messages[0].split())[:500])
    return grammar


def made_grammar(maker: Maker, field: str) -> str:
    """Return a field's grammar if it can be made and compiles.

    Raises:
        FieldError: it cannot.
    """
    try:
        return check_grammar(maker(), field)
    except (FieldError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's own kinds, and its panics, are no `Exception`
        problem = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, RecursionError):
            problem = "it is nested too deeply"
        raise FieldError(field, f"cannot be served: {problem}"[:500]) from error
