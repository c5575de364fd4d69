"""Grammars in the form that the engine matches (llguidance's), made from what requests ask for."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from twolane.common.errors import FieldError
from twolane.common.grammars import MAX_GRAMMAR_BYTES, parser_limits
from twolane.frontend.parsers.reasoning import END_THINK, THINK

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,64}"
"""White space that JSON may have between two tokens. It is bounded: a model that writes nothing
else would never end."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar of all JSON values that a JSON schema allows.

    Raises:
        ValueError: the schema is no JSON, as a number that JSON has no form for.
    """
    text = json.dumps(schema, allow_nan=False)
    return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})


def regex_grammar(regex: str) -> str:
    """Return the grammar of all strings that match a regular expression as a whole."""
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of some strings."""
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def context_free_grammar(text: str) -> str:
    """Return a grammar that is given in Lark's or GBNF's form.

    Raises:
        ValueError: it is in neither.
    """
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def behind_thinking(grammar: str, *, opened: bool) -> str:
    """Return the grammar of an answer that follows the model's thinking.

    Args:
        grammar: of the answer.
        opened: whether the prompt has opened the thinking; if not, the model may think or not.
    """
    [answer, *others] = json.loads(grammar)["grammars"]
    begin = "" if opened else f'"{THINK}" '
    lark = (
        f"start: {'thoughts' if opened else 'thoughts?'} @answer\n"
        f"thoughts: {begin}thought SPACE\n"
        f"thought[lazy]: /(.|\\n)*{END_THINK.replace('/', chr(92) + '/')}/\n"
        "SPACE: /[ \\n]*/\n"
    )
    first = {"lark_grammar": lark}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}, *others]})


def check_grammar(grammar: str, field: str) -> str:
    """Return the grammar if it compiles.

    It takes at most a few tenths of a second, and gives up Python's lock meanwhile.

    Raises:
        FieldError: the grammar is too large, wrong, or has parts that are not implemented.
    """
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise FieldError(
            field, f"has {size} bytes as a grammar; at most {MAX_GRAMMAR_BYTES} can be"
        )
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if wrong:
        raise FieldError(field, "cannot be served: " + " ".join(messages[0].split())[:500])
    return grammar
