"""Mixtures of experts on a GPU: who goes where, and products grouped by expert."""
