"""Parsers of what models write: reasoning, tool calls, and the text that is left for the user."""
