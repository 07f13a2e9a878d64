"""The worker runs the model on one step's batch, over its KV cache.

Used by `rollout.engine` and `rollout.tensor_parallel`.
"""
