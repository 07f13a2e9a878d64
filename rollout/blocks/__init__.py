"""Allocates KV blocks and rows to requests, as ids. `rollout.worker` holds the memory itself."""
