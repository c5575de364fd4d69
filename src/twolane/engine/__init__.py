"""The books: requests, queue, KV cache, and the loop that drives the lanes."""
