"""Execution of steps: EagerExecutor, and the copies between host and device that all executors
share. Used by the CPU and CUDA backends."""
