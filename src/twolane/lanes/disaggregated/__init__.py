"""Prefill and decode in processes with devices of their own (1P1D), which both keep every page."""
