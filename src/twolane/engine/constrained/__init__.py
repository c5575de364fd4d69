"""Requests whose tokens a grammar or banned sequences constrain, and the masks of their steps."""
