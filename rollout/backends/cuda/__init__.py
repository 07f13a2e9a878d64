"""The CUDA backend: Triton kernels, device memory and CUDA graphs."""
