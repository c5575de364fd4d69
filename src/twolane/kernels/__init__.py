"""Kernels of the CUDA lanes: Triton everywhere, CUDA C++ where a chip gives more to it."""
