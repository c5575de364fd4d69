"""Sums over the ranks of a model, joined with what follows them."""
