"""Ranks: processes that share each layer of a model. Groups and collectives."""
