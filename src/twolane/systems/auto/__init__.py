"""`auto`: the system that picks the fastest way to prefill within the SLOs."""
