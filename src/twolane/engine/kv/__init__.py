"""The KV cache: its pages, the tree that shares them, and what others learn of it."""
