"""Halves of surrogate pairs: JSON's escapes can name them, and no encoding can write them."""

import re

HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, as is left where an emoji is cut in two."""


def with_whole_characters(text: str) -> str:
    """Return a text with replacement characters for halves of surrogate pairs; two halves that
    belong together become their character."""
    if not HALF_PAIR.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
