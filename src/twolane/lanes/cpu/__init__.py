"""Lanes on CPU cores: pinned threads over one copy of the weights and one KV cache."""
