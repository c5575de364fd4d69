"""Several ranks of one engine: the launch log of rank 0 and the followers that replay it."""
