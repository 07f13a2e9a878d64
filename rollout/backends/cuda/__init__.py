"""The CUDA backend: Triton kernels, device memory and CUDA graphs. `rollout.backends.select` makes
it for a CUDA device, and `rollout.backends.shared_buffer` uses its runtime."""
