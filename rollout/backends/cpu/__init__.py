"""The CPU backend: kernels in C (native/), their Python bindings, torch fallbacks, host memory.
`rollout.backends.select` makes it and, for fingerprints, `rollout.weights`."""
