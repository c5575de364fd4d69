"""Lanes on an NVIDIA GPU: green contexts, CUDA graphs, and streams chained by events."""
