"""Files, memory, cores and words that every package may use; no knowledge of the domain."""
