"""The CPU backend: numba kernels on numpy buffers."""
