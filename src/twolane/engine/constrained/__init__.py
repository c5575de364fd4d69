"""Requests whose tokens a grammar constrains: their matchers and the masks of their steps."""
