"""Check of the regular expressions of a tokenizer's decoder.

Tokens become text on the API process's event loop, one at a time, and the expressions run by
backtracking: `(a+)+$` takes a second for forty characters.
"""

import json
import re
from collections.abc import Iterator

from tokenizers import decoders

PART = re.compile(
    r"(?P<set>\[\^?\]?(?:\\.|[^\[\]\\])*\])|(?P<escape>\\.)"
    r"|(?P<count>(?:[*+?]|\{[0-9,]*\})[?+]?)|(?P<other>.)",
    re.DOTALL,
)
"""A part of an expression; a count repeats the part before it."""


def check_decoder(decoder: decoders.Decoder | None) -> None:
    """Refuse a decoder that could block the event loop.

    Raises:
        ValueError: it has an expression that is not quick on any text.
    """
    if decoder is None:
        return
    for expression in expressions(json.loads(decoder.__getstate__())):
        if not is_quick(expression):
            raise ValueError(
                f"decoder: the regular expression {expression[:80]!r} may take long on some texts"
            )


def expressions(form: object) -> Iterator[str]:
    """Yield the regular expressions of a part of a `tokenizer.json`."""
    if isinstance(form, dict):
        if isinstance(expression := form.get("Regex"), str):
            yield expression
        form = list(form.values())
    for part in form if isinstance(form, list) else ():
        yield from expressions(part)


def is_quick(expression: str) -> bool:
    """Return whether matching takes at most about quadratic time.

    True only for expressions that repeat at most one character or set, and neither look around nor
    back: enough for spaces and the marks of words.
    """
    # Most characters of an expression.
    if len(expression) > 200 or "(?" in expression:
        return False
    counts, before = 0, ""
    for part in PART.finditer(expression):
        if part.lastgroup == "count":
            counts += 1
            if before == ")":
                return False
        elif part[0] == "[" or (part.lastgroup == "escape" and part[0][1] in "123456789gk"):
            return False  # a set within a set, or what a group has matched
        before = part[0]
    # Most `|` of an expression: each may double the steps at every position.
    return counts <= 1 and expression.count("|") <= 2
