"""Which replica answers a request: pure functions, and what they know of the replicas."""
