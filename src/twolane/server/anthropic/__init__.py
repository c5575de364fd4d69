"""Anthropic's endpoint /v1/messages."""
