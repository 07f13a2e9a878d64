"""The CPU backend: kernels in C (native/), their Python bindings, torch fallbacks, host memory.
Used by `rollout.backends.select`, and by `rollout.weights` for fingerprints."""
