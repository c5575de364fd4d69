"""Files, memory, cores and shared names; no knowledge of the domain."""
