"""Attention of decode steps over paged keys and values."""
