"""Shared parts of systems: admission, batches, slices and checks of settings."""
