"""Text of others on a terminal: of servers that are measured, checkpoints, and files' names."""

_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Return a text with control characters but newlines and tabs as \\x and two digits: a terminal
    would obey them."""
    return text.translate(_CONTROLS)
