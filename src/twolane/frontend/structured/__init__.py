"""Structured output: from a request's schema, regex, choice or grammar to what the engine obeys."""
