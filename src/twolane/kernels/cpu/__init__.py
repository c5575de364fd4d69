"""Compiled CPU kernels: forward passes over tiles of few bits without Python between operations."""
