"""The CUDA backend: Triton kernels, device memory and CUDA graphs. `rollout.backends.select`
creates it for a CUDA device. `rollout.backends.shared_buffer` uses its `runtime`."""
