"""The engine: the loop that drives the lanes, and its accounting: requests, queue, KV cache."""
