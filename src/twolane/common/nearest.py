"""What a mistyped name was probably meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the known name that is nearest; "" if none is near."""
    near = get_close_matches(name, set(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""
