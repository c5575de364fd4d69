"""Text of others on a terminal: of models, measured servers, checkpoints, and files' names."""

from typing import IO

_BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that turn the direction of the text around them."""
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in _BIDIRECTIONAL}


def printable(text: str) -> str:
    """Return a text with its control characters but newlines and tabs as \\x and two digits, or \\u
    and four: a terminal would obey them."""
    return text.translate(_CONTROLS)


def shown_on(file: IO[str], text: str) -> str:
    """Return a text as it is written to a file: `printable` for a terminal, else unchanged."""
    return printable(text) if file.isatty() else text
