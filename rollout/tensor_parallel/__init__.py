"""Tensor parallelism: several processes each run a part of one engine's model.

Used by `rollout.engine.build` and `rollout.apis.spmd`.
"""
