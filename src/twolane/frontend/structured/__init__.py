"""Structured output: compiles a request's schema, regex, choice or grammar for the engine."""
