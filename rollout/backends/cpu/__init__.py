"""The CPU backend: kernels in C (native/), their Python bindings, torch fallbacks, host memory."""
