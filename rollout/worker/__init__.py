"""The worker: runs the model on one step's batch, over its KV cache."""
