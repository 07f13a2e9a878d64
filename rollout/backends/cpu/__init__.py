"""The CPU backend: kernels in C, their Python bindings, and host memory."""
