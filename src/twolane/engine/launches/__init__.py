"""Launches: plans are carried out, and what has finished is collected."""
