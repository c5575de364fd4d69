"""Launching kernels: Triton's and those that NVRTC compiles."""
