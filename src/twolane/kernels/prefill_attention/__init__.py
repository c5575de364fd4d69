"""Attention of prompts over paged keys and values."""
