"""Lone surrogates, which JSON's escapes can name and no encoding can write."""

import re

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate, as is left where an emoji is cut in two."""


def with_whole_characters(text: str) -> str:
    """Return a text with lone surrogates replaced by U+FFFD; pairs become their character."""
    if not LONE_SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
